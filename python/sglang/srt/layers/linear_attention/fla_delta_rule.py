"""The gated delta rule by flash-linear-attention, an optional package.

Its function `chunk_gated_delta_rule` computes with Triton kernels what `gated_delta_rule.py`
defines. It takes and returns states in fp32.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang.srt.layers.linear_attention.extend_plan import ExtendPass, ExtendPlan
from sglang.srt.layers.linear_attention.gated_delta_rule import DeltaRuleInputs


@dataclass(frozen=True, slots=True)
class FlaDeltaRule:
    """The `DeltaRule` of the package's kernels."""

    chunks: Callable[..., tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def load(cls) -> FlaDeltaRule:
        """Import the package's function. Raises ImportError if it is not installed."""
        ops: Any = importlib.import_module("fla.ops.gated_delta_rule")
        return cls(ops.chunk_gated_delta_rule)

    def extend(
        self,
        inputs: DeltaRuleInputs,
        state: torch.Tensor,
        plan: ExtendPlan,
        state_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `TorchDeltaRule.extend`."""
        arguments = _arguments(inputs)
        first, rest = plan.passes
        out = torch.empty(inputs.v.shape, dtype=torch.float32, device=state.device)
        state = state.clone()
        self._run(arguments, state, first, out)
        snapshots = state.index_select(0, plan.tracked).to(state_dtype).float()
        state.index_copy_(0, plan.tracked, snapshots)
        if len(rest.tokens):
            self._run(arguments, state, rest, out)
        return out, state, snapshots

    def _run(
        self,
        arguments: dict[str, torch.Tensor],
        state: torch.Tensor,
        part: ExtendPass,
        out: torch.Tensor,
    ) -> None:
        """Update the states of a pass's requests, and write the outputs of its tokens."""
        tokens = {name: x.index_select(0, part.tokens)[None] for name, x in arguments.items()}
        computed, after = self.chunks(
            **tokens,
            initial_state=state.index_select(0, part.requests),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=part.bounds,
        )
        out.index_copy_(0, part.tokens, computed.squeeze(0).float())
        state.index_copy_(0, part.requests, after)


def _arguments(inputs: DeltaRuleInputs) -> dict[str, torch.Tensor]:
    """Inputs under the package's names; queries and keys are repeated for each value head."""
    repeats = inputs.v.shape[1] // inputs.k.shape[1]
    return {
        "q": inputs.q.repeat_interleave(repeats, dim=1),
        "k": inputs.k.repeat_interleave(repeats, dim=1),
        "v": inputs.v.contiguous(),
        "g": inputs.g,
        "beta": inputs.beta,
    }
