"""Experts for few tokens: two products that read only the chosen weights.

Reading the weights is the bound, so no tensor cores are used. The shared expert has one more place,
after a token's chosen experts.
"""

from __future__ import annotations

from typing import Final, TypedDict

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import ExpertWeights
from sglang.srt.layers.triton_ops.early_start import (
    await_kernels_before,
    await_then_start_next,
    early_start,
)
from sglang.srt.layers.triton_ops.gating import clamped_gate, rule_of

_INPUTS: Final = 2048
"""Most inputs of a block."""
_FEATURES_OF_ONE: Final = 4
"""Features that a program of the first product computes for a single token whose inputs are one
block."""


class GateUpPlan(TypedDict):
    """Sizes of a program of the first product."""

    ROWS: int
    BLOCK_H: int
    num_warps: int


class DownPlan(TypedDict):
    """Sizes of a program of the second product."""

    BLOCK_F: int
    num_warps: int


def plan_gate_up(hidden: int, features: int, tokens: int) -> GateUpPlan:
    """Sizes for experts `[2 * features, hidden]`. Measured on an H200 with one and four tokens and
    hidden sizes from 2,048 to 7,168."""
    if hidden <= _INPUTS:
        rows = _FEATURES_OF_ONE if tokens == 1 and features % _FEATURES_OF_ONE == 0 else 1
        return {"ROWS": rows, "BLOCK_H": triton.next_power_of_2(hidden), "num_warps": 4}
    # At most an eighth of what a program reads lies beyond the inputs.
    sizes = (_INPUTS, _INPUTS // 2, _INPUTS // 4)
    block = next(
        (size for size in sizes if 8 * (-hidden % size) <= hidden + -hidden % size), sizes[-1]
    )
    return {"ROWS": 1, "BLOCK_H": block, "num_warps": max(1, block // 512)}


def plan_down(features: int) -> DownPlan:
    """Sizes for experts `[hidden, features]`. Measured on an H200 with one and four tokens and
    512 to 2,880 features."""
    if features <= 1024:
        return {"BLOCK_F": min(128, triton.next_power_of_2(features)), "num_warps": 1}
    return {"BLOCK_F": 256, "num_warps": 2 if features <= 2048 else 4}


@triton.jit(do_not_specialize=["tokens"])
def _gate_up_kernel(
    x_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    inner_ptr: tl.tensor,
    tokens: tl.tensor,
    bias_ptr: tl.tensor,
    HIDDEN: tl.constexpr,
    FEATURES: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
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
    features = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) // PLACES
    place = tl.program_id(1) % PLACES
    # `_down_kernel` begins to read weights once ids are known.
    await_then_start_next(EARLY)
    # Uses of a chosen expert are numbered like the ids, uses of the shared expert by token.
    numbers = tl.arange(0, BLOCK_I)
    used = numbers < tokens
    current = token
    per_token = 1
    weight_ptr = shared_ptr
    if place < TOP_K:
        current = token * TOP_K + place
        per_token = TOP_K
        expert = tl.load(ids_ptr + current)
        weight_ptr = gate_up_ptr + expert.to(tl.int64) * 2 * FEATURES * HIDDEN
        if BIAS:
            bias_ptr += expert.to(tl.int64) * 2 * FEATURES
        if not ONE:
            is_choice = numbers < tokens * TOP_K
            used = is_choice & (tl.load(ids_ptr + numbers, mask=is_choice, other=-1) == expert)
    if not ONE:  # noqa: SIM102 - known when this is compiled
        if tl.min(tl.where(used, numbers, BLOCK_I), axis=0) < current:
            return
    cols = tl.arange(0, BLOCK_H)
    gates = weight_ptr + features.to(tl.int64)[:, None] * HIDDEN + cols[None, :]
    while current < BLOCK_I:
        user = current // per_token
        row = x_ptr + user.to(tl.int64) * HIDDEN
        gate_sum = tl.zeros([ROWS, BLOCK_H], tl.float32)
        up_sum = tl.zeros([ROWS, BLOCK_H], tl.float32)
        for begin in range(0, HIDDEN, BLOCK_H):
            inside = begin + cols < HIDDEN
            gate = tl.load(gates + begin, mask=inside[None, :], other=0.0)
            up = tl.load(gates + FEATURES * HIDDEN + begin, mask=inside[None, :], other=0.0)
            x = tl.load(row + begin + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
            gate_sum += gate.to(tl.float32) * x
            up_sum += up.to(tl.float32) * x
        if LIMIT > 0:
            wide, ups = tl.sum(gate_sum, axis=1), tl.sum(up_sum, axis=1)
            if BIAS:
                wide += tl.load(bias_ptr + features).to(tl.float32)
                ups += tl.load(bias_ptr + FEATURES + features).to(tl.float32)
            inner = clamped_gate(wide, ups, LIMIT, ALPHA, SHIFT)
        else:
            wide = tl.sum(gate_sum, axis=1)
            inner = wide / (1.0 + tl.exp(-wide)) * tl.sum(up_sum, axis=1)
        nth = tl.where(place < TOP_K, current % per_token, TOP_K)
        to = inner_ptr + (user * PLACES + nth).to(tl.int64) * FEATURES + features
        tl.store(to, inner.to(inner_ptr.dtype.element_ty))
        if ONE:
            current += BLOCK_I
        else:
            current = tl.min(tl.where(used & (numbers > current), numbers, BLOCK_I), axis=0)


@triton.jit
def _down_kernel(
    inner_ptr: tl.tensor,
    down_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    out_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    HIDDEN: tl.constexpr,
    FEATURES: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_F: tl.constexpr,
    SHARED: tl.constexpr,
    BIAS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute one feature of a token: the weighted sum over its experts.

    The previous kernel is `_gate_up_kernel`, so ids and weights may be read before the wait; see
    `early_start`.
    """
    feature = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1).to(tl.int64)
    places = tl.arange(0, BLOCK_P)
    chosen = places < TOP_K
    ids = tl.load(ids_ptr + token * TOP_K + places, mask=chosen, other=0).to(tl.int64)
    weights = tl.load(weights_ptr + token * PLACES + places, mask=chosen, other=0.0)
    inner = inner_ptr + token * PLACES * FEATURES
    own = down_ptr + (ids * HIDDEN + feature)[:, None] * FEATURES
    own_shared = shared_ptr + feature * FEATURES
    at = tl.arange(0, BLOCK_F)
    inside = chosen[:, None] & (at < FEATURES)[None, :]
    first = tl.load(own + at[None, :], mask=inside, other=0.0)
    first_shared = tl.zeros([BLOCK_F], first.dtype)
    if SHARED:
        first_shared = tl.load(own_shared + at, mask=at < FEATURES, other=0.0)
    if BIAS:
        of_experts = tl.load(bias_ptr + ids * HIDDEN + feature, mask=chosen, other=0.0)
        bias = tl.sum(of_experts.to(tl.float32) * weights, axis=0)
    await_kernels_before(EARLY)
    x = tl.load(inner + places[:, None] * FEATURES + at[None, :], mask=inside, other=0.0)
    total = first.to(tl.float32) * x.to(tl.float32)
    shared = tl.zeros([BLOCK_F], tl.float32)
    if SHARED:
        x = tl.load(inner + TOP_K * FEATURES + at, mask=at < FEATURES, other=0.0)
        shared += first_shared.to(tl.float32) * x.to(tl.float32)
    for begin in range(BLOCK_F, FEATURES, BLOCK_F):
        at = begin + tl.arange(0, BLOCK_F)
        inside = chosen[:, None] & (at < FEATURES)[None, :]
        weight = tl.load(own + at[None, :], mask=inside, other=0.0)
        x = tl.load(inner + places[:, None] * FEATURES + at[None, :], mask=inside, other=0.0)
        total += weight.to(tl.float32) * x.to(tl.float32)
        if SHARED:
            weight = tl.load(own_shared + at, mask=at < FEATURES, other=0.0)
            x = tl.load(inner + TOP_K * FEATURES + at, mask=at < FEATURES, other=0.0)
            shared += weight.to(tl.float32) * x.to(tl.float32)
    summed = tl.sum(tl.sum(total, axis=1) * weights, axis=0)
    if SHARED:
        summed += tl.sum(shared, axis=0) * tl.load(weights_ptr + token * PLACES + TOP_K)
    if BIAS:
        summed += bias
    tl.store(out_ptr + token * HIDDEN + feature, summed.to(out_ptr.dtype.element_ty))


def run_experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """The weighted sum of each token's experts, including the shared one, summed in fp32.

    Args:
        x: Contiguous `[num_tokens, hidden_size]`.
        weights: From `choose_experts`; `ids` likewise, of any integer dtype.

    Returns:
        `[num_tokens, hidden_size]` of the dtype of `x`.
    """
    num_tokens, hidden = x.shape
    top_k, places = ids.shape[1], weights.shape[1]
    assert isinstance(experts.gate_up, torch.Tensor) and isinstance(experts.down, torch.Tensor)
    features = experts.down.shape[-1]
    assert x.is_contiguous() and weights.is_contiguous() and ids.is_contiguous()
    assert experts.gate_up.is_contiguous() and experts.down.is_contiguous()
    shared = experts.shared or (experts.gate_up, experts.down)
    assert (places > top_k) == (experts.shared is not None)
    biases, rule = experts.biases, rule_of(experts.activation)
    # Gates without limits come without biases.
    assert biases is None or rule["LIMIT"]
    assert experts.shared is None or biases is None
    first, last = (None, None) if biases is None else biases
    inner = torch.empty((num_tokens, places, features), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    up = plan_gate_up(hidden, features, num_tokens)
    _gate_up_kernel[(features // up["ROWS"], num_tokens * places)](
        x,
        experts.gate_up,
        shared[0],
        ids,
        inner,
        num_tokens,
        inner if first is None else first,
        HIDDEN=hidden,
        FEATURES=features,
        TOP_K=top_k,
        PLACES=places,
        BLOCK_I=triton.next_power_of_2(num_tokens * max(top_k, 1)),
        ONE=num_tokens == 1,
        BIAS=first is not None,
        **rule,
        **up,
        **early_start(x),
    )
    _down_kernel[(hidden, num_tokens)](
        inner,
        experts.down,
        shared[1],
        weights,
        ids,
        out,
        inner if last is None else last,
        HIDDEN=hidden,
        FEATURES=features,
        TOP_K=top_k,
        PLACES=places,
        BLOCK_P=triton.next_power_of_2(top_k),
        SHARED=places > top_k,
        BIAS=last is not None,
        **plan_down(features),
        **early_start(x),
    )
    return out
