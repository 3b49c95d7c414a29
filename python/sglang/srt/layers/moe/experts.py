"""The experts of one layer: gated feed-forward networks. Each token uses a few."""

from __future__ import annotations

from typing import Final

import torch

from sglang.srt.layers.activation import silu_and_mul
from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.linear import apply_linear
from sglang.srt.layers.placement import NamedSlots, TensorPlacement, WeightedLayer, WeightSlot

FEW: Final = 8
_USES_OF_AN_EXPERT: Final = 2
"""Limits of the kernels for few tokens: number of tokens, and average uses of an expert. Above
either limit, the kernels for many tokens are faster, which read the weights of an expert once: 16
tokens take them 0.9 of the time with Qwen3-Next's shape, and 0.55 with DeepSeek-V3.2's
(benchmark/results/2026-11-26-gpu-hybrid-compute.md)."""


class RoutedExperts(WeightedLayer):
    """Gate, up and down projections of all experts, stacked by expert.

    Each rank has some intermediate features of every expert, and computes a partial sum of the
    output, as in `RowParallelLinear`.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        placement: TensorPlacement,
    ) -> None:
        """Args:
        intermediate_size: Features between the projections of one expert.
        placement: The experts', which checkpoints name `{prefix}.{expert}.gate_proj.weight`.

        Raises:
            ValueError: The ranks do not divide the intermediate size.
        """
        super().__init__(placement)
        assert num_experts <= torch.iinfo(torch.int16).max
        self.num_experts = num_experts
        self.features = placement.share(intermediate_size, "features of an expert")
        self.gate_up = placement.empty(num_experts, 2 * self.features.size, hidden_size)
        self.down = placement.empty(num_experts, hidden_size, self.features.size)
        self._kernels = fused_kernels(placement.device)

    def takes_few(self, num_tokens: int, top_k: int) -> bool:
        """True if the kernels for few tokens, which read each token's experts, are faster."""
        is_rare = num_tokens * top_k <= _USES_OF_AN_EXPERT * self.num_experts
        return num_tokens <= FEW and is_rare

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts, summed in fp32.

        On an accelerator the launches do not depend on the values, so graphs can capture them.

        Args:
            x: `[num_tokens, hidden_size]`.
            weights: fp32 `[num_tokens, top_k]`.
            ids: `[num_tokens, top_k]`, any integer dtype; no token has an expert twice.

        Returns:
            `[num_tokens, hidden_size]` of the dtype of `x`.
        """
        if x.is_cpu:
            return self._one_by_one(x, weights, ids)
        if self._kernels is None:
            return self._dense(x, weights, ids)
        ids = ids.contiguous()
        return self._kernels.run_routed_experts(x, weights, ids, self.gate_up, self.down)

    def _one_by_one(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """One product for each expert that has tokens."""
        flat_ids = ids.flatten()
        order = flat_ids.argsort(stable=True)
        tokens = order.div(ids.shape[1], rounding_mode="floor")
        scales = weights.flatten()[order].unsqueeze(1)
        counts: list[int] = flat_ids.bincount(minlength=self.num_experts).tolist()
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        begin = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            end = begin + count
            inner = silu_and_mul(apply_linear(x[tokens[begin:end]], self.gate_up[expert]))
            result = apply_linear(inner, self.down[expert], out_dtype=torch.float32)
            out.index_add_(0, tokens[begin:end], result.mul_(scales[begin:end]))
            begin = end
        return out.to(x.dtype)

    def _dense(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """All experts for all tokens, for accelerators without fused kernels."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(self.num_experts):
            scales = weights.where(ids == expert, 0.0).sum(dim=1, keepdim=True)
            inner = silu_and_mul(apply_linear(x, self.gate_up[expert]))
            result = apply_linear(inner, self.down[expert], out_dtype=torch.float32)
            # An expert may overflow for a token that does not use it, and 0 times infinity is NaN.
            out += (result * scales).where(scales != 0.0, 0.0)
        return out.to(x.dtype)

    def weight_slots(self) -> NamedSlots:
        half = self.features.size
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            gate, up, last = self._names(expert)
            yield gate, WeightSlot.of(gate_up[:half], self.features)
            yield up, WeightSlot.of(gate_up[half:], self.features)
            yield last, WeightSlot.of(down, self.features, dim=1)

    def stacked_slots(self) -> NamedSlots:
        names = [self._names(expert) for expert in range(len(self.down))]
        yield (
            f"{self.prefix}.gate_up_proj",
            WeightSlot.of_runs(
                self.gate_up,
                (self.features, self.features),
                dim=1,
                parts=tuple(name for gate, up, _ in names for name in (gate, up)),
            ),
        )
        yield (
            f"{self.prefix}.down_proj",
            WeightSlot.of_runs(
                self.down,
                (self.features,),
                dim=2,
                parts=tuple(last for *_, last in names),
            ),
        )

    def _names(self, expert: int) -> tuple[str, str, str]:
        """Checkpoint tensors of one expert: gate, up, down."""
        first = f"{self.prefix}.{expert}"
        return f"{first}.gate_proj.weight", f"{first}.up_proj.weight", f"{first}.down_proj.weight"
