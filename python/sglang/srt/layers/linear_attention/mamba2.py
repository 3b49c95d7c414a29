"""The Mamba-2 layer: projection, convolution, state space, gated norm of groups."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from sglang.srt.distributed.tensor_group import ToAdd
from sglang.srt.layers.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.linear_attention.causal_conv import convolve_decode, convolve_extend
from sglang.srt.layers.linear_attention.extend_plan import (
    SHORT,
    ChunkPlan,
    extend_plan_of,
    kernel_plan_of,
)
from sglang.srt.layers.linear_attention.layer_states import states_of_layer
from sglang.srt.layers.linear_attention.state_space import StateSpaceInputs, TorchStateSpace
from sglang.srt.layers.placement import (
    NamedSlots,
    Share,
    TensorPlacement,
    WeightedLayer,
    WeightSlot,
)
from sglang.srt.layers.radix_attention import LayerStep
from sglang.srt.layers.triton_ops.arguments import (
    MOST_TAPS,
    DeltaStates,
    RoundedRows,
    StateSpaceLayout,
    StateSpaceWeights,
    Weight,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Options:
    """Shape of a Mamba-2 layer. The names in errors are those of config.json.

    Raises:
        ValueError: The number of heads is no multiple of that of groups, or a size is too small.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    """Groups of consecutive heads, which share B and C, and are normalised together."""
    state_size: int
    kernel: int
    """Width of the convolution, in tokens."""
    chunk: int
    """Tokens that a prefill computes at once."""
    eps: float

    def __post_init__(self) -> None:
        if self.kernel < 2:
            raise ValueError(f"config.json: conv_kernel={self.kernel} must be at least 2")
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"config.json: mamba_num_heads={self.num_heads} must be a multiple of "
                f"n_groups={self.num_groups}"
            )

    @property
    def num_values(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.head_dim

    @property
    def runs(self) -> tuple[int, int, int]:
        """Channels of the convolution: x, B and C."""
        shared = self.num_groups * self.state_size
        return self.num_values, shared, shared

    def on_rank(self, heads: Mamba2Heads) -> Mamba2Options:
        """A copy of the options with the heads of one rank."""
        return replace(self, num_groups=heads.groups.size, num_heads=heads.heads.size)


@dataclass(frozen=True, slots=True)
class Mamba2Heads:
    """The heads of one rank: whole groups."""

    groups: Share
    heads: Share

    @classmethod
    def of(cls, options: Mamba2Options, placement: TensorPlacement) -> Mamba2Heads:
        """Raises ValueError: the ranks do not divide the groups."""
        groups = placement.share(options.num_groups, "groups of Mamba-2 heads (n_groups)")
        return cls(groups, groups.times(options.num_heads // options.num_groups))

    def runs(self, options: Mamba2Options) -> tuple[Share, Share, Share]:
        """This rank's part of each of `Mamba2Options.runs`."""
        shared = self.groups.times(options.state_size)
        return self.heads.times(options.head_dim), shared, shared


class _Weights(WeightedLayer):
    """The weights of a layer besides its projections: convolution, time step, decay, skip, norm."""

    def __init__(
        self, options: Mamba2Options, heads: Mamba2Heads, placement: TensorPlacement
    ) -> None:
        super().__init__(placement)
        self._heads, self._runs = heads.heads, heads.runs(options)
        # Weights that are used in fp32 stay in fp32.
        exact = replace(placement, dtype=torch.float32)
        channels = sum(options.runs)
        self.conv = exact.empty(channels, 1, options.kernel)
        self.conv_bias = exact.empty(channels)
        self.a_log = exact.empty(options.num_heads)
        self.dt_bias = exact.empty(options.num_heads)
        self.skip = exact.empty(options.num_heads)
        self.norm = placement.empty(options.num_values)

    def for_kernels(self) -> StateSpaceWeights:
        """The weights as the kernels take them."""
        return StateSpaceWeights(
            self.conv.squeeze(1), self.conv_bias, self.a_log, self.dt_bias, self.skip, self.norm
        )

    def weight_slots(self) -> NamedSlots:
        yield f"{self.prefix}.conv1d.weight", WeightSlot.of_runs(self.conv, self._runs)
        yield f"{self.prefix}.conv1d.bias", WeightSlot.of_runs(self.conv_bias, self._runs)
        yield f"{self.prefix}.A_log", WeightSlot.of(self.a_log, self._heads)
        yield f"{self.prefix}.dt_bias", WeightSlot.of(self.dt_bias, self._heads)
        yield f"{self.prefix}.D", WeightSlot.of(self.skip, self._heads)
        yield f"{self.prefix}.norm.weight", WeightSlot.of(self.norm, self._runs[0])


class Mamba2(torch.nn.Module):
    """A layer of Mamba-2, which reads and overwrites each request's running state."""

    def __init__(self, options: Mamba2Options, placement: TensorPlacement, layer_id: int) -> None:
        """Raises ValueError: the ranks do not divide the groups."""
        super().__init__()
        heads = Mamba2Heads.of(options, placement)
        self.options = options = options.on_rank(heads)
        self.layer_id = layer_id
        self._rule = TorchStateSpace()
        self._kernels = fused_kernels(placement.device) if options.kernel <= MOST_TAPS else None
        self._layout = StateSpaceLayout(
            heads=options.num_heads,
            groups=options.num_groups,
            head_dim=options.head_dim,
            state_size=options.state_size,
            kernel=options.kernel,
        )
        values, *_ = runs = heads.runs(options)
        self.in_proj = MergedColumnParallelLinear(
            options.hidden_size,
            [("in_proj", (values, *runs, heads.heads))],
            bias=False,
            placement=placement,
        )
        self.weights = _Weights(options, heads, placement)
        self.out_proj = RowParallelLinear(
            values, options.hidden_size, bias=False, placement=placement.at("out_proj")
        )

    @property
    def first_weight(self) -> Weight:
        """See `SelfAttention.first_weight`."""
        return self.in_proj.weight

    def forward(
        self, x: torch.Tensor | RoundedRows, residual: torch.Tensor, step: LayerStep
    ) -> tuple[ToAdd, torch.Tensor]:
        """Update the states, then project like `RowParallelLinear.forward`.

        Args:
            x: `[num_tokens, hidden_size]`, perhaps rounded for `first_weight`.
            residual: `[num_tokens, hidden_size]`, or `[bs, hidden_size]` with `LayerStep.rows`.
            step: Its rotation is unused: the states carry positions.
        """
        _, forward_batch, rows = step
        forward_batch.begin_layer(self.layer_id)
        states = states_of_layer(forward_batch, self.layer_id)
        assert states.kept is None, "the family has no layer that drafts tokens"
        is_few = forward_batch.forward_mode is not ForwardMode.EXTEND or len(x) <= SHORT
        projected = self.in_proj.forward(x)
        if self._kernels is not None and (is_few or self._layout.takes_chunks):
            normed = self._run_kernels(projected, states, forward_batch)
            if rows is not None:
                normed = normed.index_select(0, rows)
            return self.out_proj.forward(normed, residual)
        values = self.options.num_values
        sizes = [values, sum(self.options.runs), self.options.num_heads]
        gate, channels, dt = torch.split(projected, sizes, dim=-1)
        out = self._run_rule(channels, dt, states, forward_batch)
        if rows is not None:
            out, gate = out.index_select(0, rows), gate.index_select(0, rows)
        return self.out_proj.forward(self._normed(out, gate), residual)

    def _run_kernels(
        self, projected: torch.Tensor, states: DeltaStates, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Input of the output projection, `[num_tokens, num_values]`."""
        assert self._kernels is not None
        weights, eps = self.weights.for_kernels(), self.options.eps
        if forward_batch.forward_mode is ForwardMode.EXTEND:
            plan = kernel_plan_of(forward_batch, self.options.chunk)
            states = replace(states, bounds=plan.bounds, track_lens=plan.track_lens)
            if isinstance(plan, ChunkPlan) and self._layout.takes_chunks:
                return self._kernels.scan_in_chunks(
                    projected, self._layout, weights, eps, states, plan.chunks
                )
        return self._kernels.scan_tokens(projected, self._layout, weights, eps, states)

    def _run_rule(
        self,
        channels: torch.Tensor,
        dt: torch.Tensor,
        states: DeltaStates,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """Convolution and rule in torch: `[num_tokens, channels]` and `[num_tokens, num_heads]`, as
        projected, to fp32 `[num_tokens, num_heads, head_dim]`. The states are overwritten."""
        temporal, conv = states.temporal, states.conv
        weight, bias = self.weights.conv.squeeze(1), self.weights.conv_bias
        conv_before = conv.index_select(0, states.read_slots)
        before = temporal.index_select(0, states.read_slots).float()
        plan = extend_plan_of(forward_batch, self.options.kernel, self.options.chunk)
        if plan is None:
            convolved, conv_after = convolve_decode(channels, conv_before, weight, bias)
            inputs = self._inputs(convolved, dt)
            out = self._rule.decode(inputs, before)
            after = before
        else:
            convolved, conv_after, conv_tracked = convolve_extend(
                channels, conv_before, weight, plan, bias
            )
            inputs = self._inputs(convolved, dt)
            out, after, tracked = self._rule.extend(inputs, before, plan, temporal.dtype)
            if states.track_slots is not None:
                targets = states.track_slots.index_select(0, plan.tracked)
                conv.index_copy_(0, targets, conv_tracked)
                temporal.index_copy_(0, targets, tracked.to(temporal.dtype))
        # Padding rows all write to the padding slot, in any order.
        conv.index_copy_(0, states.slots, conv_after)
        temporal.index_copy_(0, states.slots, after.to(temporal.dtype))
        return out.addcmul_(inputs.x.float(), self.weights.skip.unsqueeze(-1))

    def _inputs(self, convolved: torch.Tensor, dt: torch.Tensor) -> StateSpaceInputs:
        options = self.options
        x, b, c = torch.split(convolved, list(options.runs), dim=-1)
        step = F.softplus(dt.float() + self.weights.dt_bias)
        return StateSpaceInputs(
            x.view(len(x), -1, options.head_dim),
            b.view(len(b), -1, options.state_size),
            c.view(len(c), -1, options.state_size),
            step,
            -self.weights.a_log.exp() * step,
        )

    def _normed(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Gate fp32 `[n, num_heads, head_dim]` by `[n, num_values]`, then normalise each group; in
        fp32, rounded once to the gate's dtype."""
        gated = out.flatten(1) * F.silu(gate.float())
        groups = gated.view(len(gated), self.options.num_groups, -1)
        normed = F.rms_norm(groups, groups.shape[-1:], None, self.options.eps).view_as(gated)
        return (normed * self.weights.norm.float()).to(gate.dtype)
