"""The choice of experts for few tokens, by one kernel.

The shared expert has one more place, after a token's chosen experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import ExpertChoice
from sglang.srt.layers.triton_ops.early_start import (
    await_kernels_before,
    early_start,
)
from sglang.srt.layers.triton_ops.ordered import ordered

_TAG = tl.constexpr(0x1FFF)
"""The bits of fp32 that 16-bit numbers never use; they hold an expert's id."""
_LEAST = tl.constexpr(-2147483648)
"""The least integer, which no score, tagged or not, has."""


@triton.jit
def _scored(logit: tl.tensor, SCORING: tl.constexpr) -> tl.tensor:
    """The score of a logit by itself: its sigmoid, or the square root of its softplus."""
    if SCORING == "sqrt_softplus":
        grown = tl.exp(tl.minimum(logit, 20.0))
        # The series of log(1 + x), where 1 + x would lose bits of x. The root would show it.
        ratio = grown / (2.0 + grown)
        square = ratio * ratio
        series = 1.0 + square * (1.0 / 3 + square * (1.0 / 5 + square * (1.0 / 7 + square / 9)))
        log = tl.where(grown < 0.25, 2.0 * ratio * series, tl.log(1.0 + grown))
        score = tl.sqrt(tl.where(logit > 20.0, logit, log))
    else:
        score = 1.0 / (1.0 + tl.exp(-logit))
    return score


@triton.jit
def _ranking(
    logits: tl.tensor,
    bias_ptr: tl.tensor,
    experts: tl.tensor,
    inside: tl.tensor,
    peak: tl.tensor,
    mass: tl.tensor,
    SCORING: tl.constexpr,
    BIAS: tl.constexpr,
) -> tl.tensor:
    """Scores plus bias, by which experts are chosen."""
    score = tl.load(logits + experts, mask=inside, other=float("-inf")).to(tl.float32)
    if SCORING == "softmax":
        score = tl.exp(score - peak) / mass
    else:
        score = _scored(score, SCORING)
    if BIAS:
        score += tl.load(bias_ptr + experts, mask=inside, other=0.0)
    return score


@triton.jit
def _first_best(key: tl.tensor, ids: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The lowest id among those with the highest key. A maximum and a minimum of a warp's 32-bit
    numbers take one instruction each; a maximum of 64 bits, which could hold both, takes ten."""
    return tl.min(tl.where(key == tl.max(key, axis=0), ids, BLOCK), axis=0)


@triton.jit
def _tagged(logit: tl.tensor, experts: tl.tensor) -> tl.tensor:
    """Keys in the order of the logits (16-bit numbers in fp32); among equals the lower id has the
    greater key."""
    return (ordered(logit) | _TAG) - experts


@triton.jit
def _logit_of(key: tl.tensor) -> tl.tensor:
    """The logit of a tagged key, in fp32."""
    bits = tl.where(key < 0, (key | _TAG) ^ 0x7FFFFFFF, (key | _TAG) - _TAG)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _weigh_shared(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    to: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Store the weight of a token's shared expert: the sigmoid of a product."""
    cols = tl.arange(0, BLOCK_H)
    gate = tl.load(gate_ptr + cols, mask=cols < HIDDEN, other=0.0).to(tl.float32)
    await_kernels_before(EARLY)
    x = tl.load(x_ptr + cols, mask=cols < HIDDEN, other=0.0)
    acc = x.to(tl.float32) * gate
    for begin in range(BLOCK_H, HIDDEN, BLOCK_H):
        at = begin + cols
        x = tl.load(x_ptr + at, mask=at < HIDDEN, other=0.0)
        more = tl.load(gate_ptr + at, mask=at < HIDDEN, other=0.0)
        acc += x.to(tl.float32) * more.to(tl.float32)
    tl.store(to, 1.0 / (1.0 + tl.exp(-tl.sum(acc, axis=0))))


@triton.jit(do_not_specialize_on_alignment=["tokens_ptr"])
def _choose_kernel(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    table_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    factor: tl.tensor,
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    HIDDEN: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SCORING: tl.constexpr,
    BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TWO_OF_GROUP: tl.constexpr,
    GATE: tl.constexpr,
    TAGS: tl.constexpr,
    TABLE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(num_tokens, 1 + GATE)`: one program chooses the experts of a token; another computes
    the weight of its shared expert."""
    token = tl.program_id(0).to(tl.int64)
    if GATE:  # noqa: SIM102 - known when this is compiled
        if tl.program_id(1) == 1:
            x_ptr += token * HIDDEN
            to = weights_ptr + token * PLACES + TOP_K
            _weigh_shared(x_ptr, gate_ptr, to, HIDDEN, BLOCK_H, EARLY)
            return
    choose_of_token(
        logits_ptr, bias_ptr, table_ptr, tokens_ptr, weights_ptr, ids_ptr, factor, token,
        EXPERTS, TOP_K, PLACES, GROUPS, TOP_GROUPS, BLOCK_E, BLOCK_P, BLOCK_G, BLOCK_S, SCORING,
        BIAS, RENORMALIZE, TWO_OF_GROUP, GATE, TAGS, TABLE, EARLY,
    )  # fmt: skip


@triton.jit
def choose_of_token(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    table_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    factor: tl.tensor,
    token: tl.tensor,
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
    EARLY: tl.constexpr,
) -> None:
    """Choose the experts of a token. TAGS: only the logits, of 16 bits, decide the choice. TABLE:
    the token decides it. GATE: another program stores the weight of the shared expert."""
    weights_ptr += token * PLACES
    experts = tl.arange(0, BLOCK_E)
    inside = experts < EXPERTS
    places = tl.arange(0, BLOCK_P)
    chosen = places < TOP_K
    await_kernels_before(EARLY)
    logits = logits_ptr + token * EXPERTS
    peak = 0.0
    mass = 1.0
    if SCORING == "softmax":
        logit = tl.load(logits + experts, mask=inside, other=float("-inf")).to(tl.float32)
        # If weights are renormalised, their common divisor is not needed.
        if not (TAGS and RENORMALIZE):
            peak = tl.max(logit, axis=0)
            mass = tl.sum(tl.exp(logit - peak), axis=0)
    if TAGS:
        tagged = tl.where(inside, _tagged(logit, experts), _LEAST)
        bests = tl.zeros([BLOCK_P], tl.int32)
        for place in range(TOP_K):
            best = tl.max(tagged, axis=0)
            bests = tl.where(places == place, best, bests)
            tagged = tl.where(tagged == best, _LEAST, tagged)
        ids = _TAG - (bests & _TAG)
        weights = tl.where(chosen, _logit_of(bests), float("-inf"))
        if RENORMALIZE:
            peak = tl.max(weights, axis=0)
    else:
        if TABLE:
            of_token = table_ptr + tl.load(tokens_ptr + token) * TOP_K
            ids = tl.load(of_token + places, mask=chosen, other=0).to(tl.int32)
        else:
            ids = _best_of_all(
                logits, bias_ptr, experts, inside, peak, mass, places,
                EXPERTS, TOP_K, GROUPS, TOP_GROUPS, BLOCK_E, BLOCK_P, BLOCK_G, BLOCK_S,
                SCORING, BIAS, TWO_OF_GROUP,
            )  # fmt: skip
        weights = tl.load(logits + ids, mask=chosen, other=float("-inf")).to(tl.float32)
    if SCORING == "softmax":
        weights = tl.exp(weights - peak) / mass
    else:
        weights = _scored(weights, SCORING)
    weights = tl.where(chosen, weights, 0.0)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    weights *= factor
    stored = chosen
    if PLACES > TOP_K and not GATE:
        weights = tl.where(places == TOP_K, 1.0, weights)
        stored = places < PLACES
    tl.store(weights_ptr + places, weights, mask=stored)
    tl.store(ids_ptr + token * TOP_K + places, ids, mask=chosen)


@triton.jit
def _best_of_all(
    logits: tl.tensor,
    bias_ptr: tl.tensor,
    experts: tl.tensor,
    inside: tl.tensor,
    peak: tl.tensor,
    mass: tl.tensor,
    places: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SCORING: tl.constexpr,
    BIAS: tl.constexpr,
    TWO_OF_GROUP: tl.constexpr,
) -> tl.tensor:
    """Ids of the experts with the highest scores, by place, within the best groups if there are
    groups."""
    score = _ranking(logits, bias_ptr, experts, inside, peak, mass, SCORING, BIAS)
    allowed = inside
    if TOP_GROUPS < GROUPS:
        SIZE: tl.constexpr = EXPERTS // GROUPS
        groups = tl.arange(0, BLOCK_G)
        nth = tl.arange(0, BLOCK_S)[None, :]
        member = (groups < GROUPS)[:, None] & (nth < SIZE)
        of_group = groups[:, None] * SIZE + nth
        ranks = _ranking(logits, bias_ptr, of_group, member, peak, mass, SCORING, BIAS)
        ranks = tl.where(member, ranks, float("-inf"))
        group_score = tl.max(ranks, axis=1)
        if TWO_OF_GROUP:
            best = tl.where(ranks == group_score[:, None], nth, BLOCK_S)
            is_first = nth == tl.min(best, axis=1)[:, None]
            group_score += tl.max(tl.where(is_first, float("-inf"), ranks), axis=1)
        group_key = tl.where(groups < GROUPS, ordered(group_score), _LEAST)
        allowed = experts < 0
        for _ in range(TOP_GROUPS):
            group = _first_best(group_key, groups, BLOCK_G)
            allowed |= experts // SIZE == group
            group_key = tl.where(groups == group, _LEAST, group_key)
    key = tl.where(allowed, ordered(score), _LEAST)
    ids = tl.zeros([BLOCK_P], tl.int32)
    for place in range(TOP_K):
        expert = _first_best(key, experts, BLOCK_E)
        ids = tl.where(places == place, expert, ids)
        key = tl.where(experts == expert, _LEAST, key)
    return ids


@dataclass(frozen=True, slots=True)
class ChoiceLaunch:
    """Arguments of kernels that choose experts, and what they write."""

    weights: torch.Tensor
    """fp32 `[num_tokens, places]`: weights of the chosen experts, then that of the shared one, if
    any."""
    ids: torch.Tensor
    """int32 `[num_tokens, top_k]`."""
    arguments: tuple[torch.Tensor | float, ...]
    """The first of `choose_of_token`, in their order."""
    constants: dict[str, Any]

    @classmethod
    def of(
        cls, logits: torch.Tensor, choice: ExpertChoice, tokens: torch.Tensor | None
    ) -> ChoiceLaunch:
        """Args: see `choose_experts`."""
        num_tokens, num_experts = logits.shape
        places = choice.top_k + choice.has_shared
        assert logits.is_contiguous()
        weights = logits.new_empty((num_tokens, places), dtype=torch.float32)
        ids = logits.new_empty((num_tokens, choice.top_k), dtype=torch.int32)
        bias, table = choice.correction_bias, choice.table
        assert table is None or (tokens is not None and table.is_contiguous())
        is_softmax = choice.scoring == "softmax" and table is None
        by_logits = is_softmax and bias is None and choice.groups == choice.top_groups
        arguments = (
            logits, logits if bias is None else bias, ids if table is None else table,
            ids if tokens is None else tokens, weights, ids, choice.factor,
        )  # fmt: skip
        constants = {
            "EXPERTS": num_experts,
            "TOP_K": choice.top_k,
            "PLACES": places,
            "GROUPS": choice.groups,
            "TOP_GROUPS": choice.top_groups,
            "BLOCK_E": triton.next_power_of_2(num_experts),
            "BLOCK_P": triton.next_power_of_2(places),
            "BLOCK_G": triton.next_power_of_2(choice.groups),
            "BLOCK_S": triton.next_power_of_2(num_experts // choice.groups),
            "SCORING": choice.scoring,
            "BIAS": bias is not None,
            "RENORMALIZE": choice.renormalize,
            "TWO_OF_GROUP": choice.two_of_group,
            "GATE": choice.shared_gate is not None,
            "TAGS": by_logits and logits.element_size() == 2 and num_experts <= _TAG.value,
            "TABLE": table is not None,
        }
        return cls(weights, ids, arguments, constants)


def choose_experts(
    logits: torch.Tensor,
    choice: ExpertChoice,
    x: torch.Tensor,
    tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token, best first, like `select_experts`.

    Args:
        logits: Contiguous `[num_tokens, num_experts]`, any float dtype.
        x: Contiguous `[num_tokens, hidden_size]`, for the gate of the shared expert.
        tokens: int64 `[num_tokens]`, for a choice by table.

    Returns:
        fp32 `[num_tokens, places]`: weights of the chosen experts, then that of the shared one, if
        any; and int32 `[num_tokens, top_k]`: ids.
    """
    assert x.is_contiguous()
    launch, gate = ChoiceLaunch.of(logits, choice, tokens), choice.shared_gate
    _choose_kernel[(len(x), 1 + (gate is not None))](
        *launch.arguments,
        x,
        x if gate is None else gate,
        HIDDEN=x.shape[1],
        BLOCK_H=min(2048, triton.next_power_of_2(x.shape[1])),
        **launch.constants,
        num_warps=1,
        **early_start(x),
    )
    return launch.weights, launch.ids
