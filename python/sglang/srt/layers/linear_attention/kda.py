"""The layer of Kimi Delta Attention (KDA): projections, three convolutions, rule, gated norm.

Queries, keys and values have as many heads, of the same size. Decay and output gate come from
projections of small rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang.srt.layers.layernorm import GatedRMSNorm
from sglang.srt.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.linear_attention.delta_layer import (
    DeltaGates,
    DeltaLayer,
    DeltaNetHeads,
    DeltaNetOptions,
    MergedProjections,
    Projected,
)
from sglang.srt.layers.linear_attention.kimi_delta_rule import KimiDeltaRule
from sglang.srt.layers.placement import NamedSlots, Share, TensorPlacement, WeightSlot
from sglang.srt.layers.triton_ops.arguments import (
    DeltaChunks,
    DeltaLayout,
    DeltaStates,
    KdaProjected,
)


class KimiProjections(MergedProjections):
    """All projections of a layer's input.

    Args:
        options: Options of the rank.
    """

    def __init__(
        self, options: DeltaNetOptions, heads: DeltaNetHeads, placement: TensorPlacement
    ) -> None:
        size = options.key_dim
        small, each = Share(0, size, size), heads.keys.times(size)
        parts: dict[str, tuple[Share, ...]] = {
            "q_proj": (each,),
            "k_proj": (each,),
            "v_proj": (each,),
            "f_a_proj": (small,),
            "g_a_proj": (small,),
            "b_proj": (heads.keys,),
        }
        super().__init__(options.hidden_size, parts, placement)
        self.f_b, self.g_b = (
            MergedColumnParallelLinear(size, [(name, each)], bias=False, placement=placement)
            for name in ("f_b_proj", "g_b_proj")
        )
        channels = each.size
        self.layout = DeltaLayout(
            q=0, k=channels, v=2 * channels, z=0, b=3 * channels + 2 * size, a=0,
            qk_step=size, v_step=size, ba_step=1,
            key_heads=options.num_heads, repeats=1, key_dim=size, value_dim=size,
            kernel=options.kernel,
        )  # fmt: skip
        """Of `columns`; the gate `z` and the decay `a` are tensors of their own."""

    def all(self, x: torch.Tensor) -> KdaProjected:
        """Project `[num_tokens, hidden_size]`, as kernels take the result."""
        columns = self.columns(x)
        size = self.layout.key_dim
        begin = self.layout.b - 2 * size
        # Kernels of products take dense rows.
        f, g = (columns[:, at : at + size].contiguous() for at in (begin, begin + size))
        return KdaProjected(columns, self.f_b.forward(f), self.g_b.forward(g))

    def forward(self, x: torch.Tensor) -> Projected:
        """Project `[num_tokens, hidden_size]`."""
        columns, decay, gate = self.all(x)
        shape = (len(x), self.layout.key_heads, self.layout.value_dim)
        qkv, b = columns[:, : 3 * decay.shape[1]], columns[:, self.layout.b :]
        return Projected(qkv, gate.view(shape), b, decay)


class KimiGates(DeltaGates):
    """A rate of decay for each head, and a time step for each key channel."""

    def __init__(
        self, options: DeltaNetOptions, heads: DeltaNetHeads, placement: TensorPlacement
    ) -> None:
        channels = heads.keys.times(options.key_dim)
        super().__init__(options, placement, num_steps=channels.size)
        self._heads, self._channels = heads.keys, channels

    def decay(self, a: torch.Tensor) -> torch.Tensor:
        steps = F.softplus(a.float() + self.dt_bias).view(len(a), self._heads.size, -1)
        return -self.a_log.exp().unsqueeze(-1) * steps

    def weight_slots(self) -> NamedSlots:
        share = self._channels
        parts = torch.split(self.conv, share.size)
        for name, part in zip(("q_conv1d", "k_conv1d", "v_conv1d"), parts, strict=True):
            yield f"{self.prefix}.{name}.weight", WeightSlot.of(part, share)
        yield f"{self.prefix}.A_log", self._rates()
        yield f"{self.prefix}.dt_bias", WeightSlot.of(self.dt_bias, share)

    def _rates(self) -> WeightSlot:
        return WeightSlot.of(self.a_log.view(1, 1, -1, 1), self._heads, 2)


class BoundedKimiGates(KimiGates):
    """Gates whose decay has a bound: `bound` times a sigmoid (GLM-5.3-Flash)."""

    def __init__(
        self,
        options: DeltaNetOptions,
        heads: DeltaNetHeads,
        placement: TensorPlacement,
        bound: float,
    ) -> None:
        """Args:
        bound: Least log of the decay of one token, negative.
        """
        super().__init__(options, heads, placement)
        self.bound = bound

    def decay(self, a: torch.Tensor) -> torch.Tensor:
        steps = (a.float() + self.dt_bias).view(len(a), self._heads.size, -1)
        return self.bound * torch.sigmoid(self.a_log.exp().unsqueeze(-1) * steps)

    def _rates(self) -> WeightSlot:
        return WeightSlot.of(self.a_log, self._heads)


class KimiDeltaAttention(DeltaLayer):
    """Linear attention whose states decay channel by channel; see `DeltaLayer`."""

    def __init__(
        self,
        options: DeltaNetOptions,
        placement: TensorPlacement,
        layer_id: int,
        *,
        decay_bound: float | None = None,
    ) -> None:
        """Args:
            decay_bound: See `BoundedKimiGates`; None: `KimiGates`.

        Raises:
            ValueError: The ranks do not divide the heads.
        """
        heads = DeltaNetHeads.of(options, placement)
        own = options.on_rank(heads)
        super().__init__(own, placement, layer_id, KimiDeltaRule())
        self.in_proj = KimiProjections(own, heads, placement)
        self.gates = KimiGates(own, heads, placement)
        if decay_bound is not None:
            self.gates = BoundedKimiGates(own, heads, placement, decay_bound)
        self._decay_bound = decay_bound
        self.norm = GatedRMSNorm(
            own.value_dim, own.eps, placement=placement.at("o_norm"), by_sigmoid=True
        )
        self.out_proj = RowParallelLinear(
            heads.values.times(own.value_dim),
            own.hidden_size,
            bias=False,
            placement=placement.at("o_proj"),
        )

    def _project(self, x: torch.Tensor) -> Projected:
        return self.in_proj.forward(x)

    def _run_kernels(
        self, x: torch.Tensor, states: DeltaStates, chunks: DeltaChunks | None
    ) -> torch.Tensor:
        assert self._kernels is not None
        norm = self.norm.weight, self.norm.eps
        fixed = self.in_proj.all(x), self.in_proj.layout, self.gates.all(), norm, states
        bound = self._decay_bound
        if chunks is not None:
            return self._kernels.attend_kda_in_chunks(*fixed, chunks, decay_bound=bound)
        return self._kernels.attend_kda(*fixed, decay_bound=bound)
