"""The experts of one layer: feed-forward networks, gated or of squared ReLU. Each token uses a
few."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, TypeAlias

import torch

from sglang.srt.layers.activation import silu_and_mul, squared_relu
from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.layer_weight import (
    kept_format,
    matrices_of,
    new_weight,
    rows_of,
    slots_of,
)
from sglang.srt.layers.linear import apply_linear
from sglang.srt.layers.placement import NamedSlots, Share, TensorPlacement, WeightedLayer

ExpertNames: TypeAlias = tuple[str, str, str]
EXPERT_NAMES: Final[ExpertNames] = ("gate_proj", "up_proj", "down_proj")
"""Names of an expert's projections in most checkpoints."""

FEW: Final = 8
_USES_OF_AN_EXPERT: Final = 2
"""Limits of the kernels for few tokens: number of tokens, and average uses of an expert. Above
either limit, the kernels for many tokens are faster, which read the weights of an expert once: 16
tokens take them 0.9 of the time with Qwen3-Next's shape, and 0.55 with DeepSeek-V3.2's
(benchmark/results/2026-11-26-gpu-hybrid-compute.md)."""


class RoutedExperts(WeightedLayer):
    """Gate, up and down projections of all experts, stacked by expert; experts of squared ReLU have
    no gate.

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
        names: ExpertNames = EXPERT_NAMES,
        is_gated: bool = True,
    ) -> None:
        """Args:
        intermediate_size: Features between the projections of one expert.
        placement: The experts', which checkpoints name `{prefix}.{expert}.{name}.weight`.
        names: Names of the projections: gate, up, down.
        is_gated: False: the experts are `down(squared_relu(up(x)))`.

        Raises:
            ValueError: The ranks do not divide the intermediate size.
        """
        super().__init__(placement)
        assert num_experts <= torch.iinfo(torch.int16).max
        self.num_experts, self.is_gated = num_experts, is_gated
        *firsts, self._last = names
        self._firsts = firsts if is_gated else firsts[1:]
        self._activate = silu_and_mul if is_gated else squared_relu
        if not is_gated:
            # No kernel takes their weights with scales.
            placement = replace(placement, formats=None)
        self.features = placement.share(intermediate_size, "features of an expert")
        hidden, lead = Share(0, hidden_size, hidden_size), (num_experts,)
        # Kernels take both weights in the same format.
        quantized = self._quantized_names(placement)
        format_ = kept_format(placement, quantized, hidden, self.features)
        inner = [self.features for _ in self._firsts]
        self.gate_up = new_weight(self, "gate_up", placement, format_, inner, hidden, lead=lead)
        self.down = new_weight(self, "down", placement, format_, [hidden], self.features, lead=lead)
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
        if self._kernels is not None:
            ids = ids.contiguous()
            return self._kernels.run_routed_experts(
                x, weights, ids, self.gate_up, self.down, is_gated=self.is_gated
            )
        run = self._one_by_one if x.is_cpu else self._dense
        return run(x, weights, ids)

    def plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`gate_up` and `down` of a layer whose weights have no scales."""
        assert isinstance(self.gate_up, torch.Tensor) and isinstance(self.down, torch.Tensor)
        return self.gate_up, self.down

    def _one_by_one(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """One product for each expert that has tokens."""
        gate_up, down = self.plain()
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
            inner = self._activate(apply_linear(x[tokens[begin:end]], gate_up[expert]))
            result = apply_linear(inner, down[expert], out_dtype=torch.float32)
            out.index_add_(0, tokens[begin:end], result.mul_(scales[begin:end]))
            begin = end
        return out.to(x.dtype)

    def _dense(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """All experts for all tokens, for accelerators without fused kernels."""
        gate_up, down = self.plain()
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(self.num_experts):
            scales = weights.where(ids == expert, 0.0).sum(dim=1, keepdim=True)
            inner = self._activate(apply_linear(x, gate_up[expert]))
            result = apply_linear(inner, down[expert], out_dtype=torch.float32)
            # An expert may overflow for a token that does not use it, and 0 times infinity is NaN.
            out += (result * scales).where(scales != 0.0, 0.0)
        return out.to(x.dtype)

    def weight_slots(self) -> NamedSlots:
        size, own = self.features.size, (self.features,)
        pairs = zip(matrices_of(self.gate_up), matrices_of(self.down), strict=True)
        for expert, (gate_up, down) in enumerate(pairs):
            *firsts, last = self._names(expert)
            for nth, name in enumerate(firsts):
                yield from slots_of(name, rows_of(gate_up, nth * size, (nth + 1) * size), own)
            yield from slots_of(last, down, inputs=self.features)

    def stacked_slots(self) -> NamedSlots:
        names = [self._names(expert) for expert in range(self.num_experts)]
        first, last = self._stacks()
        yield from slots_of(
            first,
            self.gate_up,
            tuple(self.features for _ in self._firsts),
            parts=tuple(name for *firsts, _ in names for name in firsts),
        )
        yield from slots_of(
            last,
            self.down,
            inputs=self.features,
            parts=tuple(last for *_, last in names),
        )

    def _quantized_names(self, placement: TensorPlacement) -> list[str]:
        """Names of the weights to ask for their format: stacks, where the checkpoint has quantized
        stacks."""
        stacks = self._stacks()
        formats = placement.formats
        if formats is not None and any(formats.of(name) is not None for name in stacks):
            return list(stacks)
        return [name for expert in range(self.num_experts) for name in self._names(expert)]

    def _stacks(self) -> tuple[str, str]:
        """Names of stacked tensors: those of the input's projections, and the others."""
        first = "gate_up_proj" if self.is_gated else "up_proj"
        return f"{self.prefix}.{first}", f"{self.prefix}.down_proj"

    def _names(self, expert: int) -> tuple[str, ...]:
        """Checkpoint tensors of one expert: projections of the input, down."""
        names = (*self._firsts, self._last)
        return tuple(f"{self.prefix}.{expert}.{name}.weight" for name in names)
