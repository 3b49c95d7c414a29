"""Experts with scales for few tokens: `fused_experts` for weights of fewer bits."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import ScaledWeight
from sglang.srt.layers.triton_ops.early_start import await_then_start_next, early_start
from sglang.srt.layers.triton_ops.rounding import gate
from sglang.srt.layers.triton_ops.scaled.gemv import (
    inputs_at_once,
    kind_of,
    multiply_row,
    multiply_rows,
    zeros_of,
)

_FEATURES: Final = 4
_FEATURES_OF_INT4: Final = 8
"""Features that a program of either product computes."""
_INPUTS: Final = 2048
"""Inputs, of several experts of a token, that a program of the second product reads at a time."""


@triton.jit(do_not_specialize=["tokens"])
def _gate_up_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    shared_scales_ptr: tl.tensor,
    shared_zeros_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    inner_ptr: tl.tensor,
    tokens: tl.tensor,
    HIDDEN: tl.constexpr,
    FEATURES: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    FP8: tl.constexpr,
    ZEROS: tl.constexpr,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_I: tl.constexpr,
    ONE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute ROWS features of an expert for all its tokens, in the program of its first token."""
    token = tl.program_id(1) // PLACES
    place = tl.program_id(1) % PLACES
    # `_down_kernel` begins to read weights once ids are known.
    await_then_start_next(EARLY)
    # Uses of a chosen expert are numbered like the ids, uses of the shared expert by token.
    numbers = tl.arange(0, BLOCK_I)
    used = numbers < tokens
    current = token
    per_token = 1
    expert = tl.zeros([], tl.int64)
    weights = shared_ptr
    scales = shared_scales_ptr
    zeros = shared_zeros_ptr
    if place < TOP_K:
        current = token * TOP_K + place
        per_token = TOP_K
        expert = tl.load(ids_ptr + current).to(tl.int64)
        weights = weight_ptr
        scales = scales_ptr
        zeros = zeros_ptr
        if not ONE:
            is_choice = numbers < tokens * TOP_K
            used = is_choice & (tl.load(ids_ptr + numbers, mask=is_choice, other=-1) == expert)
    if not ONE:  # noqa: SIM102 - known when this is compiled
        if tl.min(tl.where(used, numbers, BLOCK_I), axis=0) < current:
            return
    nth = tl.arange(0, 2 * ROWS)
    rows = tl.minimum(tl.program_id(0) * ROWS + nth // 2, FEATURES - 1) + nth % 2 * FEATURES
    rows += expert * 2 * FEATURES
    features = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    while current < BLOCK_I:
        user = current // per_token
        totals = multiply_row(
            x_ptr + user.to(tl.int64) * HIDDEN, weights, scales, zeros, rows,
            HIDDEN, FP8, ZEROS, HEIGHT, GROUP, SPAN, PACKED, BLOCK_H, False,
        )  # fmt: skip
        # Rounded at the same points as for many tokens.
        dtype = inner_ptr.dtype.element_ty
        gates, ups = tl.split(tl.reshape(totals.to(dtype).to(tl.float32), [ROWS, 2]))
        inner = gate(gates, ups, dtype)
        own = tl.where(place < TOP_K, current % per_token, TOP_K)
        to = inner_ptr + (user * PLACES + own).to(tl.int64) * FEATURES + features
        tl.store(to, inner.to(dtype), mask=features < FEATURES)
        if ONE:
            current += BLOCK_I
        else:
            current = tl.min(tl.where(used & (numbers > current), numbers, BLOCK_I), axis=0)


@triton.jit
def _down_kernel(
    inner_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    shared_scales_ptr: tl.tensor,
    shared_zeros_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    HIDDEN: tl.constexpr,
    FEATURES: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    FP8: tl.constexpr,
    ZEROS: tl.constexpr,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_F: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute ROWS features of a token: the weighted sum over its experts.

    The previous kernel is `_gate_up_kernel`, so ids may be read before the wait, which
    `multiply_rows` makes; see `early_start`.
    """
    token = tl.program_id(1).to(tl.int64)
    features = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    read = tl.minimum(features, HIDDEN - 1).to(tl.int64)
    inner = inner_ptr + token * PLACES * FEATURES
    total = tl.zeros([ROWS], tl.float32)
    for begin in tl.static_range(0, TOP_K, BLOCK_P):
        # Rows of several places in one dimension.
        at = begin * ROWS + tl.arange(0, BLOCK_P * ROWS)
        expert = tl.load(ids_ptr + token * TOP_K + at // ROWS, mask=at < TOP_K * ROWS, other=0)
        row = tl.minimum(tl.program_id(0) * ROWS + at % ROWS, HIDDEN - 1)
        places = begin + tl.arange(0, BLOCK_P)
        chosen = places < TOP_K
        totals = multiply_rows(
            inner + places * FEATURES, weight_ptr, scales_ptr, zeros_ptr,
            expert.to(tl.int64) * HIDDEN + row, chosen,
            FEATURES, FP8, ZEROS, HEIGHT, GROUP, SPAN, PACKED, BLOCK_F, EARLY and begin == 0,
        )  # fmt: skip
        weights = tl.load(weights_ptr + token * stride + places, mask=chosen, other=0.0)
        total += tl.sum(totals * weights[:, None], axis=0)
    if PLACES > TOP_K:
        shared = multiply_row(
            inner + TOP_K * FEATURES, shared_ptr, shared_scales_ptr, shared_zeros_ptr, read,
            FEATURES, FP8, ZEROS, HEIGHT, GROUP, SPAN, PACKED, BLOCK_F, False,
        )  # fmt: skip
        total += shared * tl.load(weights_ptr + token * stride + TOP_K)
    to = out_ptr + token * HIDDEN + features
    tl.store(to, total.to(out_ptr.dtype.element_ty), mask=features < HIDDEN)


def run_scaled_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: ScaledWeight,
    down: ScaledWeight,
    shared: tuple[ScaledWeight, ScaledWeight] | None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, including the shared one if given, in fp32.

    Args:
        x: Contiguous `[num_tokens, hidden_size]`.
        weights: fp32 `[num_tokens, places]`, any stride between tokens: of the chosen experts, then
            of the shared one.
        ids: Contiguous `[num_tokens, top_k]`, any integer dtype.
        shared: The shared expert's weights, of the same kinds and features as the others'.

    Returns:
        `[num_tokens, hidden_size]` of the dtype of `x`.
    """
    num_tokens, hidden = x.shape
    top_k, places = ids.shape[1], ids.shape[1] + (shared is not None)
    features = down.shape[-1]
    assert x.is_contiguous() and weights.stride(1) == 1 and ids.is_contiguous()
    of_shared = shared or (gate_up, down)
    assert all(kind_of(a) == kind_of(b) for a, b in zip(of_shared, (gate_up, down), strict=True))
    inner = torch.empty((num_tokens, places, features), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    rows = _FEATURES if gate_up.is_fp8 else _FEATURES_OF_INT4
    block_h = inputs_at_once(hidden, kind_of(gate_up), 1024)
    _gate_up_kernel[(triton.cdiv(features, rows), num_tokens * places)](
        x, *_tensors(gate_up), *_tensors(of_shared[0]), ids, inner, num_tokens,
        HIDDEN=hidden, FEATURES=features, TOP_K=top_k, PLACES=places, **kind_of(gate_up),
        ROWS=rows, BLOCK_H=block_h, ONE=num_tokens == 1,
        BLOCK_I=triton.next_power_of_2(num_tokens * top_k),
        num_warps=max(1, block_h // 256), **early_start(x),
    )  # fmt: skip
    block_f = inputs_at_once(features, kind_of(down), 1024)
    block_p = max(1, min(_INPUTS // block_f, triton.next_power_of_2(top_k)))
    _down_kernel[(triton.cdiv(hidden, rows), num_tokens)](
        inner, *_tensors(down), *_tensors(of_shared[1]), weights, ids, out, weights.stride(0),
        HIDDEN=hidden, FEATURES=features, TOP_K=top_k, PLACES=places, **kind_of(down),
        ROWS=rows, BLOCK_P=block_p, BLOCK_F=block_f, num_warps=max(1, block_f // 256),
        **early_start(x),
    )  # fmt: skip
    return out


def _tensors(weight: ScaledWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return weight.elements, weight.scales, zeros_of(weight)
