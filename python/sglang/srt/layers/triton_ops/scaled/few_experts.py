"""Experts with scales for few tokens: `fused_experts` for weights of fewer bits."""

from __future__ import annotations

from typing import Final, TypedDict

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import (
    ExpertActivation,
    ExpertBiases,
    ScaledWeight,
)
from sglang.srt.layers.triton_ops.early_start import (
    await_kernels_before,
    await_then_start_next,
    early_start,
)
from sglang.srt.layers.triton_ops.gating import clamped_gate, rule_of
from sglang.srt.layers.triton_ops.rounding import gate
from sglang.srt.layers.triton_ops.scaled.tiles import (
    add_tile_,
    fewest_steps,
    inputs_at_once,
    is_aligned,
    kind_of,
    load_tile,
    multiply_row,
    no_sums,
    rows_at,
    rows_left,
    whole_scales,
    zeros_of,
)

_FEATURES: Final = 4
_FEATURES_OF_INT4: Final = 8
_FEATURES_OF_FP4: Final = 4
_FEATURES_OF_DOWN: Final = 8
"""Features that a program computes: of the first product for fp8 weights, for 4-bit integers and
for 4-bit floats, and of the second."""
_PLACES_OF_FP4: Final = 4
"""Most experts of a tile of the second product of 4-bit floats."""
_INPUTS: Final = 2048
"""Inputs, of several experts of a token, of a tile of the second product."""


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
    bias_ptr: tl.tensor,
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
    BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute ROWS features of an expert for all its tokens, in the program of its first token.

    BIAS: no expert is shared.
    """
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
    begin = tl.program_id(0) * ROWS
    features = begin + tl.arange(0, ROWS)
    while current < BLOCK_I:
        user = current // per_token
        totals = multiply_row(
            x_ptr + user.to(tl.int64) * HIDDEN, weights, scales, zeros,
            expert * 2 * FEATURES + begin, rows_left(FEATURES, begin, ROWS), ROWS, FEATURES,
            HIDDEN, FP8, ZEROS, HEIGHT, GROUP, SPAN, PACKED, BLOCK_H, False,
        )  # fmt: skip
        if BIAS:
            # Gate and up alternate, as in the totals.
            nth = tl.arange(0, 2 * ROWS)
            of_both = tl.minimum(begin + nth // 2, FEATURES - 1) + nth % 2 * FEATURES
            totals += tl.load(bias_ptr + expert * 2 * FEATURES + of_both).to(tl.float32)
        # Rounded at the same points as for many tokens.
        dtype = inner_ptr.dtype.element_ty
        gates, ups = tl.split(tl.reshape(totals.to(dtype).to(tl.float32), [ROWS, 2]))
        if LIMIT > 0:
            inner = clamped_gate(gates, ups, LIMIT, ALPHA, SHIFT)
        else:
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
    bias_ptr: tl.tensor,
    added_ptr: tl.tensor,
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
    AHEAD: tl.constexpr,
    BIAS: tl.constexpr,
    ADDED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute ROWS features of a token: the weighted sum over its experts. ADDED: a term with the
    weight after those of the chosen experts.

    Weights are read in tiles: BLOCK_F inputs of the experts of BLOCK_P places, AHEAD tiles before
    they are used. The previous kernel is `_gate_up_kernel`, so ids, and weights of experts, may be
    read before the wait; see `early_start`.
    """
    token = tl.program_id(1).to(tl.int64)
    STEPS: tl.constexpr = (FEATURES + BLOCK_F - 1) // BLOCK_F
    TILES: tl.constexpr = (PLACES + BLOCK_P - 1) // BLOCK_P * STEPS
    first = tl.program_id(0) * ROWS
    left = rows_left(HIDDEN, first, ROWS)
    inner = inner_ptr + token * PLACES * FEATURES
    rows_of: tl.tuple = ()
    for begin in tl.static_range(0, PLACES, BLOCK_P):
        place = begin + tl.arange(0, BLOCK_P)
        is_chosen = place < TOP_K
        expert = tl.load(ids_ptr + token * TOP_K + place, mask=is_chosen, other=0).to(tl.int64)
        at = rows_at(
            weight_ptr, scales_ptr, zeros_ptr, expert * HIDDEN + first, left, ROWS, 0,
            FEATURES, FP8, HEIGHT, GROUP,
        )  # fmt: skip
        if PLACES > TOP_K and begin + BLOCK_P > TOP_K:
            of_shared = rows_at(
                shared_ptr, shared_scales_ptr, shared_zeros_ptr, expert * 0 + first, left, ROWS, 0,
                FEATURES, FP8, HEIGHT, GROUP,
            )  # fmt: skip
            at = (
                tl.where(is_chosen[None, :], at[0], of_shared[0]),
                tl.where(is_chosen[None, :], at[1], of_shared[1]),
                tl.where(is_chosen[None, :], at[2], of_shared[2]),
            )
        rows_of += ((at, place < PLACES),)
    tiles: tl.tuple = ()
    for n in tl.static_range(AHEAD):
        at, own = rows_of[n // STEPS]
        tile = load_tile(at, own, n % STEPS, FEATURES, FP8, ZEROS, GROUP, SPAN, BLOCK_F)
        tiles += (tile,)
    if BIAS:
        biased = tl.minimum(first + tl.arange(0, ROWS), HIDDEN - 1)
        biases = tl.zeros([ROWS], tl.float32)
        for n in tl.static_range(TOP_K):
            expert = tl.load(ids_ptr + token * TOP_K + n).to(tl.int64)
            of_expert = tl.load(bias_ptr + expert * HIDDEN + biased)
            biases += of_expert.to(tl.float32) * tl.load(weights_ptr + token * stride + n)
    await_kernels_before(EARLY)
    features = first + tl.arange(0, ROWS)
    if ADDED:
        added = tl.load(added_ptr + token * HIDDEN + features, mask=features < HIDDEN, other=0.0)
        added_weight = tl.load(weights_ptr + token * stride + TOP_K)
    acc = no_sums(BLOCK_P, ROWS, FP8, SPAN, BLOCK_F)
    for n in tl.static_range(TILES):
        if n + AHEAD < TILES:
            at, own = rows_of[(n + AHEAD) // STEPS]
            step = (n + AHEAD) % STEPS
            tile = load_tile(at, own, step, FEATURES, FP8, ZEROS, GROUP, SPAN, BLOCK_F)
            tiles += (tile,)
        places = n // STEPS * BLOCK_P + tl.arange(0, BLOCK_P)
        used = places < PLACES
        x = inner + places * FEATURES
        if n % STEPS == 0:
            x_scales = whole_scales(x, used, FEATURES, FP8, GROUP, BLOCK_F)
            weights = tl.load(weights_ptr + token * stride + places, mask=used, other=0.0)
        acc = add_tile_(
            acc, tiles[n], x, x_scales, weights, used, n % STEPS,
            FEATURES, FP8, ZEROS, GROUP, PACKED, BLOCK_F,
        )  # fmt: skip
    total = tl.sum(tl.sum(tl.sum(acc, axis=3), axis=2), axis=1)
    if BIAS:
        total += biases
    if ADDED:
        total += added.to(tl.float32) * added_weight
    to = out_ptr + token * HIDDEN + features
    tl.store(to, total.to(out_ptr.dtype.element_ty), mask=features < HIDDEN)


class GateUpPlan(TypedDict):
    """Sizes of a program of the first product."""

    ROWS: int
    BLOCK_H: int
    num_warps: int


class DownPlan(TypedDict):
    """Sizes of a program of the second product."""

    ROWS: int
    BLOCK_P: int
    BLOCK_F: int
    AHEAD: int
    num_warps: int


def plan_gate_up(weight: ScaledWeight, tokens: int) -> GateUpPlan:
    """Sizes for a stack of weights `[experts, 2 * features, hidden_size]`."""
    if weight.is_fp4:
        block_h = fewest_steps(weight.shape[-1], 1024)
        return {"ROWS": _FEATURES_OF_FP4, "BLOCK_H": block_h, "num_warps": 1}
    block_h = inputs_at_once(weight.shape[-1], kind_of(weight), 1024)
    warps = max(1, block_h // 256)
    if not weight.is_fp8:
        return {"ROWS": _FEATURES_OF_INT4, "BLOCK_H": block_h, "num_warps": warps}
    if tokens == 1:
        # More programs have room on a multiprocessor, so fewer wait for others to end.
        return {"ROWS": _FEATURES // 2, "BLOCK_H": block_h, "num_warps": max(1, warps // 2)}
    return {"ROWS": _FEATURES, "BLOCK_H": block_h, "num_warps": warps}


def plan_down(weight: ScaledWeight, places: int) -> DownPlan:
    """Sizes for a stack of weights `[experts, hidden_size, features]`."""
    features = weight.shape[-1]
    if weight.is_fp4:
        return _plan_down_fp4(features, places)
    block_f = inputs_at_once(features, kind_of(weight), _INPUTS if weight.is_fp8 else 1024)
    block_p = max(1, min(_INPUTS // block_f, triton.next_power_of_2(places)))
    tiles = triton.cdiv(places, block_p) * triton.cdiv(features, block_f)
    # More tiles of 4-bit integers, or fewer warps, would need more registers than there are.
    ahead, of_warp = (2, 256 // block_p) if weight.is_fp8 else (1, 128)
    return {
        "ROWS": _FEATURES_OF_DOWN,
        "BLOCK_P": block_p,
        "BLOCK_F": block_f,
        "AHEAD": min(tiles, ahead),
        "num_warps": max(1, block_f // of_warp),
    }


def _plan_down_fp4(features: int, places: int) -> DownPlan:
    """Sizes with which each thread has a word's place in a row for itself; see `add_tile_`. The
    best of 31 on an H200 for gpt-oss-120b's shape, and of 48 for DeepSeek-V4-Flash's, which has
    6 places: a block of 4 would be half empty."""
    block_f = fewest_steps(features, 1024)
    rows, block_p = _FEATURES_OF_DOWN, min(_PLACES_OF_FP4, triton.next_power_of_2(places))
    if places % _PLACES_OF_FP4 == _PLACES_OF_FP4 // 2:
        rows, block_p = rows // 2, _PLACES_OF_FP4 // 2
    return {
        "ROWS": rows,
        "BLOCK_P": block_p,
        "BLOCK_F": block_f,
        "AHEAD": 1,
        "num_warps": max(1, block_p * block_f // 1024),
    }


def run_scaled_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: ScaledWeight,
    down: ScaledWeight,
    shared: tuple[ScaledWeight, ScaledWeight] | None,
    *,
    activation: ExpertActivation = "silu",
    biases: ExpertBiases | None = None,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, including the shared one if given, in fp32.

    Args:
        x: Contiguous `[num_tokens, hidden_size]`.
        weights: fp32 `[num_tokens, places]`, any stride between tokens: of the chosen experts, then
            of the shared one.
        ids: Contiguous `[num_tokens, top_k]`, any integer dtype.
        shared: The shared expert's weights, of the same kinds and features as the others'.
        activation: With a gate, of all experts.
        biases: Without `shared`.
        added: Contiguous `[num_tokens, hidden_size]`: the shared expert's output, without `shared`.

    Returns:
        `[num_tokens, hidden_size]` of the dtype of `x`.
    """
    num_tokens, hidden = x.shape
    top_k, places = ids.shape[1], ids.shape[1] + (shared is not None)
    features = down.shape[-1]
    assert x.is_contiguous() and weights.stride(1) == 1 and ids.is_contiguous()
    of_shared = shared or (gate_up, down)
    assert all(kind_of(a) == kind_of(b) for a, b in zip(of_shared, (gate_up, down), strict=True))
    # The second product reads several matrices so, of any kind.
    assert is_aligned(down.elements, of_shared[1].elements)
    assert not gate_up.is_fp4 or is_aligned(x, gate_up.elements, of_shared[0].elements)
    rule = rule_of(activation)
    assert shared is None or (biases is None and added is None)
    assert added is None or (added.is_contiguous() and weights.shape[1] > top_k)
    first, second = (None, None) if biases is None else biases
    inner = torch.empty((num_tokens, places, features), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    up, last = plan_gate_up(gate_up, num_tokens), plan_down(down, places)
    _gate_up_kernel[(triton.cdiv(features, up["ROWS"]), num_tokens * places)](
        x, *_tensors(gate_up), *_tensors(of_shared[0]), ids, inner, num_tokens,
        inner if first is None else first,
        HIDDEN=hidden, FEATURES=features, TOP_K=top_k, PLACES=places, **kind_of(gate_up),
        ONE=num_tokens == 1, BLOCK_I=triton.next_power_of_2(num_tokens * top_k),
        BIAS=first is not None, **rule, **up, **early_start(x),
    )  # fmt: skip
    _down_kernel[(triton.cdiv(hidden, last["ROWS"]), num_tokens)](
        inner, *_tensors(down), *_tensors(of_shared[1]), weights, ids, out, weights.stride(0),
        inner if second is None else second, inner if added is None else added,
        HIDDEN=hidden, FEATURES=features, TOP_K=top_k, PLACES=places, **kind_of(down),
        BIAS=second is not None, ADDED=added is not None, **last, **early_start(x),
    )  # fmt: skip
    return out


def _tensors(weight: ScaledWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return weight.elements, weight.scales, zeros_of(weight)
