"""Choice of the gated delta rule's implementation for chunked prefills, by device."""

from __future__ import annotations

import functools
import importlib.util
from typing import Protocol

import torch

from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.linear_attention.extend_plan import ExtendPlan
from sglang.srt.layers.linear_attention.fla_delta_rule import FlaDeltaRule
from sglang.srt.layers.linear_attention.gated_delta_rule import DeltaRuleInputs, TorchDeltaRule


class DeltaRule(Protocol):
    """An implementation of the gated delta rule; see `TorchDeltaRule`."""

    def extend(
        self,
        inputs: DeltaRuleInputs,
        state: torch.Tensor,
        plan: ExtendPlan,
        state_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@functools.cache
def delta_rule(device: str, dtype: torch.dtype) -> DeltaRule:
    """The best implementation for activations of `dtype` on `device`.

    The kernels multiply in the dtype of the activations, or in tf32, so torch computes fp32.
    """
    kernels = fused_kernels(device)
    may_run = kernels is not None and kernels.runs_fla and dtype != torch.float32
    if may_run and importlib.util.find_spec("fla") is not None:
        return FlaDeltaRule.load()
    return TorchDeltaRule()
