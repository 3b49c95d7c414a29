"""A shared expert beside the choice of the routed ones, for one token and weights of another kind.

Neither reads the other's results, so each launch does a part of both: the first products of the
shared expert and the router's; its second product and the choice. Each launch less saves the wait
for the end of the one before, which is longer than what the router and the choice compute.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import (
    ExpertChoice,
    ExpertWeights,
    ScaledWeight,
    Weight,
)
from sglang.srt.layers.triton_ops.early_start import early_start
from sglang.srt.layers.triton_ops.expert_choice import ChoiceLaunch, choose_of_token
from sglang.srt.layers.triton_ops.gemv import plan
from sglang.srt.layers.triton_ops.scaled.gemv import (
    PlainProduct,
    constants_of,
    scaled_gated_gemv,
    store_scaled_rows,
)
from sglang.srt.layers.triton_ops.scaled.tiles import is_aligned, kind_of, zeros_of


@triton.jit(do_not_specialize_on_alignment=["tokens_ptr"])
def _choose_and_multiply_kernel(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    table_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    factor: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    out_ptr: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SCORING: tl.constexpr,
    BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TWO_OF_GROUP: tl.constexpr,
    GATE: tl.constexpr,
    TAGS: tl.constexpr,
    TABLE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FP8: tl.constexpr,
    ZEROS: tl.constexpr,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(1 + n / BLOCK_N,)`: the first program chooses the token's experts, each other one
    computes BLOCK_N outputs of the shared expert."""
    nth = tl.program_id(0)
    if nth == 0:
        choose_of_token(
            logits_ptr, bias_ptr, table_ptr, tokens_ptr, weights_ptr, ids_ptr, factor,
            nth.to(tl.int64), EXPERTS, TOP_K, PLACES, GROUPS, TOP_GROUPS, BLOCK_E, BLOCK_P, BLOCK_G,
            BLOCK_S, SCORING, BIAS, RENORMALIZE, TWO_OF_GROUP, GATE, TAGS, TABLE, EARLY,
        )  # fmt: skip
    else:
        store_scaled_rows(
            x_ptr, weight_ptr, scales_ptr, zeros_ptr, scales_ptr, out_ptr, (nth - 1) * BLOCK_N, N,
            K, FP8, ZEROS, HEIGHT, GROUP, SPAN, PACKED, BLOCK_N, BLOCK_K, False, GATED, LIMIT,
            ALPHA, SHIFT, EARLY,
        )  # fmt: skip


def are_alike(first: Weight, second: Weight) -> bool:
    """True if one kernel can read both weights."""
    if isinstance(first, ScaledWeight) and isinstance(second, ScaledWeight):
        return kind_of(first) == kind_of(second) and first.is_fp4 == second.is_fp4
    return isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)


def shared_apart(experts: ExpertWeights) -> tuple[Weight, Weight] | None:
    """The shared expert's weights if they are not in the products of the others; None: they are, or
    there are none."""
    shared, others = experts.shared, (experts.gate_up, experts.down)
    if shared is None or (experts.biases is None and all(map(are_alike, shared, others))):
        return None
    return shared


def choose_beside_shared(
    x: torch.Tensor,
    router: torch.Tensor,
    choice: ExpertChoice,
    experts: ExpertWeights,
    tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Choose the experts of a token and compute the shared one, whose weights have scales and are
    of another kind than the others'.

    Args:
        x: Contiguous `[1, hidden_size]`.
        router: Contiguous `[num_experts, hidden_size]`: logits are its product, rounded to the
            dtype of `x` unless it is fp32.
        tokens: See `choose_experts`.

    Returns:
        Weights and ids as from `choose_experts`, and the shared output `[1, hidden_size]`,
        which is not weighted yet. None: there are several tokens, or other weights.
    """
    shared = shared_apart(experts)
    if len(x) != 1 or shared is None or plan(*router.shape) is None:
        return None
    gate_up, down = shared
    if not (isinstance(gate_up, ScaledWeight) and isinstance(down, ScaledWeight)):
        return None
    if choice.shared_gate is not None:
        return None
    dtype = router.dtype if router.dtype == torch.float32 else x.dtype
    logits = torch.empty((1, len(router)), dtype=dtype, device=x.device)
    inner = x.new_empty((1, down.shape[1]))
    beside = PlainProduct(router, logits)
    scaled_gated_gemv(x, gate_up, inner, activation=experts.activation, beside=beside)
    launch, out = ChoiceLaunch.of(logits, choice, tokens), torch.empty_like(x)
    constants = constants_of(down, None, None)
    assert not down.is_fp4 or is_aligned(inner, down.elements)
    _choose_and_multiply_kernel[(1 + triton.cdiv(constants["N"], constants["BLOCK_N"]),)](
        *launch.arguments, inner, down.elements, down.scales, zeros_of(down), out,
        **launch.constants, **constants, **early_start(x),
    )  # fmt: skip
    return launch.weights, launch.ids, out
