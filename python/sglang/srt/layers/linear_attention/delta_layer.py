"""Shared part of layers of linear attention with a delta rule.

Convolution and rule in torch's operations; the layers themselves have projections and kernels.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from sglang.srt.distributed.tensor_group import ToAdd
from sglang.srt.layers.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.layernorm import GatedRMSNorm
from sglang.srt.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.linear_attention.causal_conv import convolve_decode, convolve_extend
from sglang.srt.layers.linear_attention.extend_plan import (
    SHORT,
    ChunkPlan,
    ExtendPlan,
    extend_plan_of,
    kernel_plan_of,
)
from sglang.srt.layers.linear_attention.gated_delta_rule import DeltaRuleInputs, TorchDeltaRule
from sglang.srt.layers.linear_attention.layer_states import states_of_layer
from sglang.srt.layers.placement import Share, TensorPlacement, WeightedLayer
from sglang.srt.layers.radix_attention import LayerStep
from sglang.srt.layers.triton_ops.arguments import (
    MOST_TAPS,
    TILE_DIMS,
    DeltaChunks,
    DeltaInputs,
    DeltaStates,
    RoundedRows,
)
from sglang.srt.layers.weight_format import WeightFormat
from sglang.srt.mem_cache.device.state_pool import MambaSpec
from sglang.srt.mem_cache.device.state_spec import RankSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetOptions:
    """Shape of a delta-net layer.

    Raises:
        ValueError: The number of value heads is no multiple of that of key heads, or a size is too
            small.
    """

    hidden_size: int
    num_key_heads: int
    num_heads: int
    """Value heads; each key head serves the same number of them."""
    key_dim: int
    value_dim: int
    kernel: int
    """Width of the convolution, in tokens."""
    eps: float
    is_grouped: bool
    """If true, checkpoints interleave the projections, key head by key head (Qwen3-Next); else they
    have a tensor for each projection (Qwen3.5)."""

    def __post_init__(self) -> None:
        if min(self.num_key_heads, self.key_dim, self.value_dim) < 1 or self.kernel < 2:
            raise ValueError(f"config.json: sizes of linear attention are too small: {self}")
        if self.num_heads < 1 or self.num_heads % self.num_key_heads:
            raise ValueError(
                f"config.json: linear_num_value_heads={self.num_heads} must be a multiple of "
                f"linear_num_key_heads={self.num_key_heads}"
            )

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    def on_rank(self, heads: DeltaNetHeads) -> DeltaNetOptions:
        """A copy of the options with the heads of one rank."""
        return replace(self, num_key_heads=heads.keys.size, num_heads=heads.values.size)


@dataclass(frozen=True, slots=True)
class DeltaNetHeads:
    """The heads of one rank: whole groups of a key head with its value heads."""

    keys: Share
    values: Share

    @classmethod
    def of(cls, options: DeltaNetOptions, placement: TensorPlacement) -> DeltaNetHeads:
        """Raises ValueError: the ranks do not divide the key heads."""
        keys = placement.share(options.num_key_heads, "key heads of linear attention")
        return cls(keys, keys.times(options.num_heads // options.num_key_heads))

    def runs(self, options: DeltaNetOptions) -> tuple[Share, Share, Share]:
        """This rank's channels of queries, keys and values."""
        keys = self.keys.times(options.key_dim)
        return keys, keys, self.values.times(options.value_dim)


def state_spec(
    options: DeltaNetOptions,
    heads: DeltaNetHeads,
    layers: tuple[int, ...],
    ssm_dtype: torch.dtype,
    conv_dtype: torch.dtype,
) -> MambaSpec:
    """The spec of the states of `layers`.

    Args:
        options: Options of all ranks together.
        heads: The heads of this rank.
    """
    own = options.on_rank(heads)
    return MambaSpec.of_shapes(
        layers,
        (own.num_heads, own.key_dim, own.value_dim),
        (own.num_channels, own.kernel - 1),
        ssm_dtype=ssm_dtype,
        conv_dtype=conv_dtype,
        share=heads.values.of_state(RankSplit.HEADS),
    )


class Projected(NamedTuple):
    """Projections of a layer's input."""

    qkv: torch.Tensor
    """`[num_tokens, num_channels]`: all queries, all keys, all values."""
    gate: torch.Tensor
    """`[num_tokens, num_heads, value_dim]`."""
    b: torch.Tensor
    """`[num_tokens, num_heads]`: `beta` before the sigmoid."""
    a: torch.Tensor
    """The time step of each head, `[num_tokens, num_heads]`, or of each key channel,
    `[num_tokens, num_heads * key_dim]`; before bias and softplus."""


class MergedProjections(torch.nn.Module):
    """Projections of one input side by side, in one product. There is one product for each run of
    projections with the same weight format, because checkpoints leave the small ones plain.

    Args:
        parts: For each projection, its name in the checkpoint and this rank's outputs: a share of
            each of its runs.
    """

    def __init__(
        self, input_size: int, parts: dict[str, tuple[Share, ...]], placement: TensorPlacement
    ) -> None:
        super().__init__()
        formats = placement.formats

        def format_of(part: tuple[str, object]) -> WeightFormat | None:
            return None if formats is None else formats.of(f"{placement.prefix}.{part[0]}.weight")

        self._products = [
            MergedColumnParallelLinear(input_size, list(run), bias=False, placement=placement)
            for _, run in itertools.groupby(parts.items(), format_of)
        ]
        self.products = torch.nn.ModuleList(self._products)

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        """Project `[num_tokens, input_size]`; all projections lie side by side."""
        if len(self._products) == 1:
            return self._products[0].forward(x)
        if len(x) > 1:
            return torch.cat([product.forward(x) for product in self._products], dim=-1)
        widths = [product.weight.shape[0] for product in self._products]
        out = x.new_empty((1, sum(widths)))
        for product, part in zip(self._products, torch.split(out, widths, dim=1), strict=True):
            product.forward(x, part)
        return out


class DeltaGates(WeightedLayer, ABC):
    """The other weights of a layer: convolution, decay, time step. They are kept in fp32, in which
    they are used.

    Args:
        num_steps: Elements of the time step's bias on this rank.
    """

    def __init__(
        self, options: DeltaNetOptions, placement: TensorPlacement, *, num_steps: int
    ) -> None:
        super().__init__(placement)
        exact = replace(placement, dtype=torch.float32)
        self.conv = exact.empty(options.num_channels, 1, options.kernel)
        self.a_log = exact.empty(options.num_heads)
        self.dt_bias = exact.empty(num_steps)

    @property
    def taps(self) -> torch.Tensor:
        """Weight of the convolution, fp32 `[channels, kernel]`."""
        return self.conv.squeeze(1)

    def all(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The weights as kernels take them: `taps`, `a_log`, `dt_bias`."""
        return self.taps, self.a_log, self.dt_bias

    @abstractmethod
    def decay(self, a: torch.Tensor) -> torch.Tensor:
        """Log of the decay, at most 0, as `DeltaRuleInputs.g`, for `Projected.a`."""


class DeltaLayer(torch.nn.Module, ABC):
    """Linear attention, which reads and overwrites each request's running state. A verification
    only reads it, and keeps what `commit_verified` needs."""

    first_weight = None
    """The input is multiplied by several weights."""
    gates: DeltaGates
    norm: GatedRMSNorm
    out_proj: RowParallelLinear

    def __init__(
        self,
        options: DeltaNetOptions,
        placement: TensorPlacement,
        layer_id: int,
        rule: TorchDeltaRule,
    ) -> None:
        """Args:
        options: Options of the rank.
        rule: The rule for devices without kernels, and for shapes that these do not take.
        """
        super().__init__()
        self.options = options
        self.layer_id = layer_id
        self._rule = rule
        self._kernels = fused_kernels(placement.device) if options.kernel <= MOST_TAPS else None
        self._takes_chunks = TILE_DIMS.issuperset({options.key_dim, options.value_dim})

    @abstractmethod
    def _project(self, x: torch.Tensor) -> Projected:
        """Projections of the layer's input `[num_tokens, hidden_size]`."""

    @abstractmethod
    def _run_kernels(
        self, x: torch.Tensor, states: DeltaStates, chunks: DeltaChunks | None
    ) -> torch.Tensor:
        """Input of the output projection, `[num_tokens, num_heads * value_dim]`, for the layer's
        input `x`; `chunks` None: token by token."""

    def forward(
        self, x: torch.Tensor | RoundedRows, residual: torch.Tensor, step: LayerStep
    ) -> tuple[ToAdd, torch.Tensor]:
        """Update the states, then project like `RowParallelLinear.forward`.

        Args:
            x: `[num_tokens, hidden_size]`.
            residual: `[num_tokens, hidden_size]`, or `[bs, hidden_size]` with `LayerStep.rows`.
            step: Its rotation is unused: the states carry positions.
        """
        assert isinstance(x, torch.Tensor), "there is no first weight"
        _, forward_batch, rows = step
        forward_batch.begin_layer(self.layer_id)
        is_few = forward_batch.forward_mode is not ForwardMode.EXTEND or len(x) <= SHORT
        if self._kernels is not None and (is_few or self._takes_chunks):
            attended = self._attend_fused(x, forward_batch)
            if rows is not None:
                attended = attended.index_select(0, rows)
            return self.out_proj.forward(attended, residual)
        projected = self._project(x)
        states = states_of_layer(forward_batch, self.layer_id)
        if states.kept is not None:
            attended = self._verify(projected, states, states.kept)
        elif (plan := extend_plan_of(forward_batch, self.options.kernel)) is not None:
            attended = self._extend(projected, states, plan)
        else:
            attended = self._decode(projected, states)
        gate = projected.gate
        if rows is not None:
            attended, gate = attended.index_select(0, rows), gate.index_select(0, rows)
        return self.out_proj.forward(self.norm.forward(attended, gate).flatten(1), residual)

    def _attend_fused(self, x: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        states, chunks = states_of_layer(forward_batch, self.layer_id), None
        if forward_batch.forward_mode is ForwardMode.EXTEND:
            plan = kernel_plan_of(forward_batch)
            states = replace(states, bounds=plan.bounds, track_lens=plan.track_lens)
            if isinstance(plan, ChunkPlan) and self._takes_chunks:
                chunks = plan.chunks
        return self._run_kernels(x, states, chunks)

    def _decode(self, projected: Projected, states: DeltaStates) -> torch.Tensor:
        temporal, conv = states.temporal, states.conv
        slots, first, weight = states.slots, states.read_slots, self.gates.taps
        qkv, conv_after = convolve_decode(projected.qkv, conv.index_select(0, first), weight)
        out, after = self._rule.decode(
            self._inputs(qkv, projected), temporal.index_select(0, first).float()
        )
        # Padding rows all write to the padding slot, in any order.
        conv.index_copy_(0, slots, conv_after)
        temporal.index_copy_(0, slots, after.to(temporal.dtype))
        return out

    def _verify(self, projected: Projected, states: DeltaStates, kept: DeltaInputs) -> torch.Tensor:
        """Compute what decode steps for each token in turn would. No state is written: `kept` takes
        the inputs."""
        first, weight = states.read_slots, self.gates.taps
        by_request = projected.qkv.view(len(first), -1, projected.qkv.shape[1])
        conv, convolved = states.conv.index_select(0, first), []
        for x in by_request.unbind(1):
            out, conv = convolve_decode(x, conv, weight)
            convolved.append(out)
        inputs = self._inputs(torch.stack(convolved, dim=1).flatten(0, 1), projected)
        for buffer, values in zip(kept, (projected.qkv, *inputs[1:]), strict=True):
            buffer[: len(values)].copy_(values)
        state, outputs = states.temporal.index_select(0, first).float(), []
        for token in range(by_request.shape[1]):
            of_token = DeltaRuleInputs(*(part[token :: by_request.shape[1]] for part in inputs))
            out, state = self._rule.decode(of_token, state)
            # The next decode step would read the state as stored.
            state = state.to(states.temporal.dtype).float()
            outputs.append(out)
        return torch.stack(outputs, dim=1).flatten(0, 1)

    def _extend(self, projected: Projected, states: DeltaStates, plan: ExtendPlan) -> torch.Tensor:
        temporal, conv = states.temporal, states.conv
        slots, first, weight = states.slots, states.read_slots, self.gates.taps
        qkv, conv_after, conv_tracked = convolve_extend(
            projected.qkv, conv.index_select(0, first), weight, plan
        )
        out, after, tracked = self._rule.extend(
            self._inputs(qkv, projected),
            temporal.index_select(0, first).float(),
            plan,
            temporal.dtype,
        )
        conv.index_copy_(0, slots, conv_after)
        temporal.index_copy_(0, slots, after.to(temporal.dtype))
        if states.track_slots is not None:
            targets = states.track_slots.index_select(0, plan.tracked)
            conv.index_copy_(0, targets, conv_tracked)
            temporal.index_copy_(0, targets, tracked.to(temporal.dtype))
        return out

    def _inputs(self, qkv: torch.Tensor, projected: Projected) -> DeltaRuleInputs:
        options = self.options
        keys = options.num_key_heads * options.key_dim
        sizes = [keys, keys, options.num_heads * options.value_dim]
        q, k, v = torch.split(qkv, sizes, dim=-1)
        return DeltaRuleInputs(
            q.view(len(q), -1, options.key_dim),
            k.view(len(k), -1, options.key_dim),
            v.view(len(v), -1, options.value_dim),
            self.gates.decay(projected.a),
            projected.b.float().sigmoid(),
        )
