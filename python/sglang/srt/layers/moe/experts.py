"""The experts of one layer: feed-forward networks with one of several activations. Each token uses
a few."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, TypeAlias

import torch

from sglang.srt.layers.activation import activate_by
from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.layer_weight import (
    alternating_slots_of,
    empty_slots_of,
    kept_format,
    matrices_of,
    new_weight,
    rows_of,
    share_for,
    slots_of,
    stacked_slots_of,
)
from sglang.srt.layers.linear import apply_linear
from sglang.srt.layers.placement import (
    NamedSlots,
    Share,
    TensorPlacement,
    WeightedLayer,
    WeightSlot,
)
from sglang.srt.layers.triton_ops.arguments import ExpertActivation, ExpertBiases

ExpertNames: TypeAlias = tuple[str, str, str]
EXPERT_NAMES: Final[ExpertNames] = ("gate_proj", "up_proj", "down_proj")
"""Names of an expert's projections in most checkpoints."""

BLOCKS: Final = "_blocks"
"""End of the names of stacks of 4-bit floats, as files have them."""
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
    output, as in `RowParallelLinear`; or it has some experts whole, if the placement says so.

    Attributes:
        own: The experts of which this rank has some features.
        features: The features that it has of them.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        placement: TensorPlacement,
        names: ExpertNames = EXPERT_NAMES,
        activation: ExpertActivation = "silu",
        has_bias: bool = False,
        has_alternating_stacks: bool = False,
    ) -> None:
        """Args:
        intermediate_size: Features between the projections of one expert.
        placement: The experts', which checkpoints name `{prefix}.{expert}.{name}.weight`.
        names: Names of the projections: gate, up, down.
        activation: What is computed between the projections; "squared_relu" knows no gate.
        has_bias: True if all projections have biases.
        has_alternating_stacks: True if the outputs of gate and up alternate in stacked tensors of
            a checkpoint, and plain ones have the inputs before the outputs.

        Raises:
            ValueError: The ranks do not divide the intermediate size, or the experts.
        """
        super().__init__(placement)
        ranks = placement.experts
        is_whole = ranks is not None and ranks.is_whole
        if ranks is not None:
            placement = replace(placement, tp_group=ranks.group)
        assert num_experts <= torch.iinfo(torch.int16).max
        self.num_experts, self.activation = num_experts, activation
        self.has_bias, self._has_alternating_stacks = has_bias, has_alternating_stacks
        *firsts, self._last = names
        self._firsts = firsts if self.is_gated else firsts[1:]
        self._activate = activate_by(activation)
        if not self.is_gated:
            # No kernel takes their weights with scales.
            placement = replace(placement, formats=None)
        hidden = Share(0, hidden_size, hidden_size)
        # Kernels take both weights in the same format.
        quantized = self._quantized_names(placement)
        if is_whole:
            self.own = placement.share(num_experts, "experts")
            self.features = Share(0, intermediate_size, intermediate_size)
        else:
            self.own = Share(0, num_experts, num_experts)
            self.features = placement.share(intermediate_size, "features of an expert")
            self.features = share_for(placement, quantized, self.features)
        count, lead = self.own.size, (self.own.size,)
        format_ = kept_format(placement, quantized, hidden, self.features)
        inner = [self.features for _ in self._firsts]
        self.gate_up = new_weight(self, "gate_up", placement, format_, inner, hidden, lead=lead)
        self.down = new_weight(self, "down", placement, format_, [hidden], self.features, lead=lead)
        self.gate_up_bias: torch.nn.Parameter | None = None
        self.down_bias: torch.nn.Parameter | None = None
        """`[own.size, hidden_size]` on the rank that adds it: the first one, if ranks split
        features; else without columns."""
        if has_bias:
            self.gate_up_bias = placement.empty(count, len(inner) * self.features.size)
            columns = hidden_size if is_whole or placement.tp_rank == 0 else 0
            self.down_bias = placement.empty(count, columns)
        self._hidden = hidden
        self._kernels = fused_kernels(placement.device)

    @property
    def is_gated(self) -> bool:
        """True if experts have a gate."""
        return self.activation != "squared_relu"

    @property
    def biases(self) -> ExpertBiases | None:
        """The biases that this rank adds; None: the experts have none."""
        if self.gate_up_bias is None or self.down_bias is None:
            return None
        down = self.down_bias if self.down_bias.shape[1] else None
        return ExpertBiases(self.gate_up_bias, down)

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
            ids: `[num_tokens, top_k]`, any integer dtype; no token has an expert twice. They count
                from this rank's first expert; from `own.size` on they are other ranks'.

        Returns:
            `[num_tokens, hidden_size]` of the dtype of `x`.
        """
        if self._kernels is not None:
            ids = ids.contiguous()
            return self._kernels.run_routed_experts(
                x,
                weights,
                ids,
                self.gate_up,
                self.down,
                activation=self.activation,
                biases=self.biases,
                num_experts=self.num_experts,
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
        flat_ids = ids.flatten()
        order = flat_ids.argsort(stable=True)
        tokens = order.div(ids.shape[1], rounding_mode="floor")
        scales = weights.flatten()[order].unsqueeze(1)
        counts: list[int] = flat_ids.bincount(minlength=self.own.size).tolist()
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        begin = 0
        for expert, count in enumerate(counts[: self.own.size]):
            if not count:
                continue
            end = begin + count
            result = self._run(expert, x[tokens[begin:end]])
            out.index_add_(0, tokens[begin:end], result.mul_(scales[begin:end]))
            begin = end
        return out.to(x.dtype)

    def _dense(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """All experts for all tokens, for accelerators without fused kernels."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(self.own.size):
            scales = weights.where(ids == expert, 0.0).sum(dim=1, keepdim=True)
            result = self._run(expert, x)
            # An expert may overflow for a token that does not use it, and 0 times infinity is NaN.
            out += (result * scales).where(scales != 0.0, 0.0)
        return out.to(x.dtype)

    def _run(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """One expert for all of `x` `[n, hidden_size]`, in fp32."""
        gate_up, down = self.plain()
        first, last = None, None
        if self.biases is not None:
            first = self.biases.gate_up[expert]
            last = None if self.biases.down is None else self.biases.down[expert]
        inner = self._activate(apply_linear(x, gate_up[expert], first))
        return apply_linear(inner, down[expert], last, out_dtype=torch.float32)

    def weight_slots(self) -> NamedSlots:
        size, own = self.features.size, (self.features,)
        pairs = zip(matrices_of(self.gate_up), matrices_of(self.down), strict=True)
        for expert, (gate_up, down) in enumerate(pairs, self.own.begin):
            *firsts, last = self._names(expert)
            for nth, name in enumerate(firsts):
                yield from slots_of(name, rows_of(gate_up, nth * size, (nth + 1) * size), own)
            yield from slots_of(last, down, inputs=self.features)
            if self.gate_up_bias is not None and self.down_bias is not None:
                *firsts, last = self._names(expert, "bias")
                place = expert - self.own.begin
                runs = self.gate_up_bias[place].chunk(len(firsts))
                for name, bias in zip(firsts, runs, strict=True):
                    yield name, WeightSlot.of_runs(bias, own)
                yield last, self._slot_of_down_bias(self.down_bias[place])
        yield from self._empty_slots()

    def _empty_slots(self) -> NamedSlots:
        """Slots of the experts that other ranks have whole, which take nothing."""
        if self.own.size == self.num_experts:
            return
        first, down = next(matrices_of(self.gate_up)), next(matrices_of(self.down))
        first = rows_of(first, 0, self.features.size)
        for expert in (*range(self.own.begin), *range(self.own.end, self.num_experts)):
            *firsts, last = self._names(expert)
            for name in firsts:
                yield from empty_slots_of(name, first)
            yield from empty_slots_of(last, down)
            if self.gate_up_bias is not None and self.down_bias is not None:
                *firsts, last = self._names(expert, "bias")
                for name in firsts:
                    yield from empty_slots_of(name, self.gate_up_bias[0, : self.features.size])
                yield from empty_slots_of(last, self.down_bias[0])

    def stacked_slots(self) -> NamedSlots:
        if self._has_alternating_stacks:
            yield from self._alternating_slots()
            return
        first, last = self._stacks()
        firsts, lasts = self._parts("weight")
        if self.own.size < self.num_experts:
            yield from stacked_slots_of(first, self.gate_up, self.own, firsts)
            yield from stacked_slots_of(last, self.down, self.own, lasts)
            return
        shares = tuple(self.features for _ in self._firsts)
        yield from slots_of(first, self.gate_up, shares, parts=firsts)
        yield from slots_of(last, self.down, inputs=self.features, parts=lasts)

    def _alternating_slots(self) -> NamedSlots:
        """`stacked_slots` of outputs that alternate: `[num_experts, hidden_size, 2 * features]` and
        `[num_experts, features, hidden_size]`, or blocks with the outputs before the inputs; biases
        without the inputs."""
        count = len(self._firsts)
        own = None if self.own.size == self.num_experts else self.own
        first, last = self._stacks()
        firsts, lasts = self._parts("weight")
        yield from alternating_slots_of(
            f"{first}{BLOCKS}", self.gate_up, self.features, firsts, own
        )
        blocks = f"{last}{BLOCKS}"
        if own is None:
            yield from slots_of(blocks, self.down, inputs=self.features, parts=lasts)
        else:
            yield from stacked_slots_of(blocks, self.down, own, lasts)
        if isinstance(self.gate_up, torch.Tensor) and isinstance(self.down, torch.Tensor):
            # `[own.size, hidden_size, features, count]`
            by_feature = torch.unflatten(self.gate_up, 1, (count, -1)).permute(0, 3, 2, 1)
            yield first, WeightSlot.of_alternating(by_feature, self.features, 2, firsts, own)
            down = self.down.transpose(1, 2)
            share, dim = (self.features, 1) if own is None else (own, 0)
            yield last, WeightSlot.of_runs(down, (share,), dim, lasts)
        if self.gate_up_bias is not None and self.down_bias is not None:
            firsts, lasts = self._parts("bias")
            by_feature = torch.unflatten(self.gate_up_bias, 1, (count, -1)).transpose(1, 2)
            slot = WeightSlot.of_alternating(by_feature, self.features, 1, firsts, own)
            yield f"{first}_bias", slot
            slot = self._slot_of_down_bias(self.down_bias, lasts)
            if own is not None:
                slot = WeightSlot.of_runs(self.down_bias, (own,), 0, lasts)
            yield f"{last}_bias", slot

    def _slot_of_down_bias(self, bias: torch.Tensor, parts: tuple[str, ...] = ()) -> WeightSlot:
        """The slot of a part of `down_bias`. Only the first rank has columns of it."""
        share = Share(0, bias.shape[-1], self._hidden.size)
        return WeightSlot.of_runs(bias, (share,), bias.dim() - 1, parts)

    def _parts(self, kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of all experts' projections: of the input, and the others."""
        names = [self._names(expert, kind) for expert in range(self.num_experts)]
        firsts = tuple(name for *some, _ in names for name in some)
        return firsts, tuple(last for *_, last in names)

    def _quantized_names(self, placement: TensorPlacement) -> list[str]:
        """Names of the weights to ask for their format: stacks, where the checkpoint has quantized
        stacks."""
        formats, stacks = placement.formats, self._stacks()
        if formats is not None:
            for marker in ("", BLOCKS):
                names = [f"{stack}{marker}" for stack in stacks]
                if any(formats.of(name) is not None for name in names):
                    return names
        return [name for expert in range(self.num_experts) for name in self._names(expert)]

    def _stacks(self) -> tuple[str, str]:
        """Names of stacked tensors: those of the input's projections, and the others."""
        first = "gate_up_proj" if self.is_gated else "up_proj"
        return f"{self.prefix}.{first}", f"{self.prefix}.down_proj"

    def _names(self, expert: int, kind: str = "weight") -> tuple[str, ...]:
        """Checkpoint tensors of one expert: projections of the input, down."""
        names = (*self._firsts, self._last)
        return tuple(f"{self.prefix}.{expert}.{name}.{kind}" for name in names)
