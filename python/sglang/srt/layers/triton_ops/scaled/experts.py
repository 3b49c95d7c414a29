"""Experts whose weights are plain or have scales."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from sglang.srt.layers.triton_ops import fused_experts, gemv, routed_experts
from sglang.srt.layers.triton_ops.arguments import (
    ExpertActivation,
    ExpertBiases,
    ExpertWeights,
    ScaledWeight,
    Weight,
)
from sglang.srt.layers.triton_ops.gating import silu_and_mul
from sglang.srt.layers.triton_ops.scaled.few_experts import run_scaled_experts
from sglang.srt.layers.triton_ops.scaled.gemv import scaled_gated_gemv
from sglang.srt.layers.triton_ops.scaled.linear import multiply_scaled
from sglang.srt.layers.triton_ops.scaled.routed_experts import run_scaled_routed_experts
from sglang.srt.layers.triton_ops.scaled.shared_expert import shared_apart


def run_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: ExpertWeights,
    part: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, including the shared one, for few tokens.

    A shared expert of another kind than the routed ones is computed by itself, before them.

    Args:
        x: Contiguous `[num_tokens, hidden_size]`.
        weights: From `choose_experts`; `ids` likewise, of any integer dtype.
        part: From `choose_beside_shared`; None: the shared expert is not computed yet.

    Returns:
        `[num_tokens, hidden_size]` of the dtype of `x`.
    """
    gate_up, down, shared = experts.gate_up, experts.down, experts.shared
    apart = shared_apart(experts)
    if apart is not None:
        shared = None
        if part is None:
            part = _multiply(_gated(x, apart[0], experts.activation), apart[1])
    if isinstance(gate_up, ScaledWeight) and isinstance(down, ScaledWeight):
        scaled: tuple[ScaledWeight, ScaledWeight] | None = None
        if shared is not None:
            assert isinstance(shared[0], ScaledWeight) and isinstance(shared[1], ScaledWeight)
            scaled = shared[0], shared[1]
        return run_scaled_experts(
            x, weights, ids, gate_up, down, scaled,
            activation=experts.activation, biases=experts.biases, added=part,
        )  # fmt: skip
    if part is None:
        return fused_experts.run_experts(x, weights, ids, experts)
    top_k, routed = ids.shape[1], replace(experts, shared=None)
    out = fused_experts.run_experts(x, weights[:, :top_k].contiguous(), ids, routed)
    return out.add_(part * weights[:, top_k:])


def run_routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    *,
    activation: ExpertActivation = "silu",
    biases: ExpertBiases | None = None,
    num_experts: int | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, summed in fp32; bits are the same in each run.

    Args:
        x: Contiguous `[num_tokens, hidden_size]`.
        weights: fp32 `[num_tokens, top_k]`, of any stride between tokens.
        ids: Contiguous `[num_tokens, top_k]`, any integer dtype.
        gate_up: See `ExpertWeights`; `down` is of the same kind.
        activation: Of weights with scales one with a gate.
        num_experts: See `routed_experts.run_routed_experts`.

    Returns:
        `[num_tokens, hidden_size]` of the dtype of `x`.
    """
    if isinstance(gate_up, ScaledWeight):
        assert isinstance(down, ScaledWeight) and activation != "squared_relu"
        return run_scaled_routed_experts(
            x, weights, ids, gate_up, down,
            activation=activation, biases=biases, num_experts=num_experts,
        )  # fmt: skip
    assert isinstance(down, torch.Tensor)
    return routed_experts.run_routed_experts(
        x, weights, ids, gate_up, down,
        activation=activation, biases=biases, num_experts=num_experts,
    )  # fmt: skip


def _gated(x: torch.Tensor, weight: Weight, activation: ExpertActivation) -> torch.Tensor:
    """The features between an expert's projections; `weight` has gate, then up."""
    config = None
    if len(x) == 1:
        out = x.new_empty((1, weight.shape[0] // 2))
        if isinstance(weight, ScaledWeight):
            scaled_gated_gemv(x, weight, out, activation=activation)
            return out
        config = gemv.plan(*weight.shape)
    if config is None:
        return silu_and_mul(_multiply(x, weight), activation)
    assert isinstance(weight, torch.Tensor)
    gemv.gated_gemv(x, weight, out, config, activation=activation)
    return out


def _multiply(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """`x @ weight.T` of the dtype of `x`."""
    if isinstance(weight, ScaledWeight):
        return multiply_scaled(x, weight)
    config = gemv.plan(*weight.shape) if len(x) == 1 else None
    if config is None:
        return F.linear(x, weight)
    out = x.new_empty((1, len(weight)))
    gemv.gemv(x, weight, None, out, config)
    return out
