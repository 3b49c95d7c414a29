"""The delta-net layer: projections, convolution, gated delta rule, gated norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang.srt.layers.layernorm import GatedRMSNorm
from sglang.srt.layers.linear import RowParallelLinear
from sglang.srt.layers.linear_attention.delta_layer import (
    DeltaGates,
    DeltaLayer,
    DeltaNetHeads,
    DeltaNetOptions,
    MergedProjections,
    Projected,
)
from sglang.srt.layers.linear_attention.gated_delta_rule import TorchDeltaRule
from sglang.srt.layers.placement import NamedSlots, Share, TensorPlacement, WeightSlot
from sglang.srt.layers.triton_ops.arguments import DeltaChunks, DeltaLayout, DeltaStates


class DeltaNetProjections(MergedProjections):
    """All projections of a layer's input, for either form of checkpoint.

    Args:
        options: Options of the rank.
    """

    def __init__(
        self, options: DeltaNetOptions, heads: DeltaNetHeads, placement: TensorPlacement
    ) -> None:
        values = heads.values.times(options.value_dim)
        runs = heads.runs(options)
        repeats = options.num_heads // options.num_key_heads
        # If key heads are interleaved, a rank's part is one run.
        group = 2 * options.key_dim + 2 * repeats * options.value_dim
        parts: dict[str, tuple[Share, ...]] = (
            {
                "in_proj_qkvz": (heads.keys.times(group),),
                "in_proj_ba": (heads.keys.times(2 * repeats),),
            }
            if options.is_grouped
            else {
                "in_proj_qkv": runs,
                "in_proj_z": (values,),
                "in_proj_b": (heads.values,),
                "in_proj_a": (heads.values,),
            }
        )
        super().__init__(options.hidden_size, parts, placement)
        self.options = options
        self.sizes = [sum(share.size for share in shares) for shares in parts.values()]

    def layout(self) -> DeltaLayout:
        """Columns of each projection in the output of `columns`."""
        options = self.options
        keys, repeats = options.num_key_heads, options.num_heads // options.num_key_heads
        key_dim, values = options.key_dim, repeats * options.value_dim
        if options.is_grouped:
            group, all_groups = 2 * key_dim + 2 * values, self.sizes[0]
            starts = 0, key_dim, 2 * key_dim, 2 * key_dim + values, all_groups, all_groups + repeats
            steps = group, group, 2 * repeats
        else:
            channels, heads = options.num_channels, options.num_heads
            after = channels + heads * options.value_dim
            starts = 0, keys * key_dim, 2 * keys * key_dim, channels, after, after + heads
            steps = key_dim, values, repeats
        q, k, v, z, b, a = starts
        return DeltaLayout(
            q=q, k=k, v=v, z=z, b=b, a=a,
            qk_step=steps[0], v_step=steps[1], ba_step=steps[2],
            key_heads=keys, repeats=repeats, key_dim=key_dim, value_dim=options.value_dim,
            kernel=options.kernel,
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> Projected:
        """Project `[num_tokens, hidden_size]`."""
        shape = (len(x), self.options.num_heads, self.options.value_dim)
        parts = torch.split(self.columns(x), self.sizes, dim=-1)
        if not self.options.is_grouped:
            qkv, gate, b, a = parts
            return Projected(qkv, gate.reshape(shape), b, a)
        options = self.options
        heads, repeats = options.num_key_heads, options.num_heads // options.num_key_heads
        values = repeats * options.value_dim
        sizes = [options.key_dim, options.key_dim, values, values]
        q, k, v, gate = torch.split(parts[0].view(len(x), heads, -1), sizes, dim=-1)
        b, a = torch.split(parts[1].view(len(x), heads, -1), repeats, dim=-1)
        qkv = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=-1)
        return Projected(qkv, gate.reshape(shape), b.flatten(1), a.flatten(1))


class DeltaNetGates(DeltaGates):
    """A decay and a time step for each head."""

    def __init__(
        self, options: DeltaNetOptions, heads: DeltaNetHeads, placement: TensorPlacement
    ) -> None:
        super().__init__(options, placement, num_steps=options.num_heads)
        self._heads, self._runs = heads, heads.runs(options)

    def decay(self, a: torch.Tensor) -> torch.Tensor:
        return -self.a_log.exp() * F.softplus(a.float() + self.dt_bias)

    def weight_slots(self) -> NamedSlots:
        yield f"{self.prefix}.conv1d.weight", WeightSlot.of_runs(self.conv, self._runs)
        yield f"{self.prefix}.A_log", WeightSlot.of(self.a_log, self._heads.values)
        yield f"{self.prefix}.dt_bias", WeightSlot.of(self.dt_bias, self._heads.values)


class GatedDeltaNet(DeltaLayer):
    """Linear attention whose states decay head by head; see `DeltaLayer`."""

    def __init__(self, options: DeltaNetOptions, placement: TensorPlacement, layer_id: int) -> None:
        """Raises ValueError: the ranks do not divide the key heads."""
        heads = DeltaNetHeads.of(options, placement)
        own = options.on_rank(heads)
        super().__init__(own, placement, layer_id, TorchDeltaRule())
        self.in_proj = DeltaNetProjections(own, heads, placement)
        self._layout = self.in_proj.layout()
        self.gates = DeltaNetGates(own, heads, placement)
        self.norm = GatedRMSNorm(own.value_dim, own.eps, placement=placement.at("norm"))
        self.out_proj = RowParallelLinear(
            heads.values.times(own.value_dim),
            own.hidden_size,
            bias=False,
            placement=placement.at("out_proj"),
        )

    def _project(self, x: torch.Tensor) -> Projected:
        return self.in_proj.forward(x)

    def _run_kernels(
        self, x: torch.Tensor, states: DeltaStates, chunks: DeltaChunks | None
    ) -> torch.Tensor:
        assert self._kernels is not None
        projected = self.in_proj.columns(x)
        norm = self.norm.weight, self.norm.eps
        fixed = projected, self._layout, self.gates.all(), norm, states
        if chunks is not None:
            return self._kernels.attend_in_chunks(*fixed, chunks)
        return self._kernels.attend_linearly(*fixed)
