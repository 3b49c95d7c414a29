"""Activation functions, and the feed-forward networks: gated, or of squared ReLU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from sglang.srt.distributed.tensor_group import ToAdd
from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.triton_ops.arguments import (
    ClampedGate,
    ExpertActivation,
    RoundedRows,
    ScaledWeight,
    Weight,
    takes_rounded,
)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[..., 2 * size]`, gate and up side by side, to silu(gate) * up, `[..., size]`."""
    kernels = fused_kernels(gate_up.device)
    if kernels is not None:
        return kernels.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2, in a new tensor."""
    return F.relu(x).square_()


def clamped_gate(gate_up: torch.Tensor, rule: ClampedGate) -> torch.Tensor:
    """`[..., 2 * size]`, gate and up side by side, to `[..., size]`; see `ClampedGate`."""
    kernels = fused_kernels(gate_up.device)
    if kernels is not None:
        return kernels.silu_and_mul(gate_up, rule)
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=rule.limit)
    weight = (gate * rule.alpha).sigmoid_().mul_(gate)
    return up.clamp(-rule.limit, rule.limit).add_(rule.shift).mul_(weight)


def activate_by(activation: ExpertActivation) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function of an activation, from the output of an expert's first projections."""
    if isinstance(activation, ClampedGate):
        return partial(clamped_gate, rule=activation)
    return silu_and_mul if activation == "silu" else squared_relu


def scale_by_gates_(
    x: torch.Tensor, gates: torch.Tensor, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply attention's output by the sigmoid of each head's gate, in place.

    Args:
        x: Contiguous `[n, num_heads * head_dim]`.
        gates: `[num_tokens, num_heads, head_dim]`, the last dimension dense.
        rows: int64 `[n]`: the token of each row of `x`; None: row i is token i.

    Returns:
        `x`.
    """
    kernels = fused_kernels(x.device)
    if kernels is not None:
        kernels.scale_by_gates_(x, gates, rows)
        return x
    own = gates if rows is None else gates.index_select(0, rows)
    return x.mul_(own.flatten(1).sigmoid())


class GatedMLP(torch.nn.Module):
    """`down(silu(gate(x)) * up(x))`; each rank has some of the intermediate features."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        placement: TensorPlacement,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        activation: ExpertActivation = "silu",
    ) -> None:
        """Args:
        names: Names of gate, up and down projection in a checkpoint.
        activation: What is computed between them, with a gate.

        Raises:
            ValueError: The ranks do not divide the intermediate size.
        """
        super().__init__()
        gate, up, down = names
        size = placement.share(intermediate_size, "features of the feed-forward layers")
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size,
            [(gate, size), (up, size)],
            bias=bias,
            placement=placement,
        )
        self.down_proj = RowParallelLinear(
            size, hidden_size, bias=bias, placement=placement.at(down)
        )
        self._activation = activation
        self._kernels = fused_kernels(placement.device)

    @property
    def first_weight(self) -> Weight:
        """The only weight that multiplies the input."""
        return self.gate_up_proj.weight

    def forward(
        self, x: torch.Tensor | RoundedRows, residual: torch.Tensor
    ) -> tuple[ToAdd, torch.Tensor]:
        """Apply to `x` `[num_tokens, hidden_size]`, which may be rounded for `first_weight`; the
        rest as in `RowParallelLinear.forward`."""
        return self.down_proj.forward(self._gated(x), residual)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, hidden_size]` to this rank's partial sum of the output, same shape."""
        return self.down_proj.part(self._gated(x))

    def _gated(self, x: torch.Tensor | RoundedRows) -> torch.Tensor | RoundedRows:
        """`[num_tokens, hidden_size]` to this rank's features."""
        weight, kernels = self.gate_up_proj.weight, self._kernels
        is_one = len(x) == 1 and self.gate_up_proj.bias is None
        if kernels is not None and is_one and isinstance(x, torch.Tensor):
            out = x.new_empty((1, weight.shape[0] // 2))
            if isinstance(weight, ScaledWeight):
                kernels.scaled_gated_gemv(x, weight, out, activation=self._activation)
                return out
            config = kernels.plan_gemv(*weight.shape)
            if config is not None:
                kernels.gated_gemv(x, weight, out, config, activation=self._activation)
                return out
        both = self.gate_up_proj.forward(x)
        if kernels is not None and self._activation == "silu":
            down = takes_rounded(self.down_proj.weight, len(x))
            if down is not None:
                return kernels.round_rows(both, down, is_gated=True)
        return activate_by(self._activation)(both)


class SquaredReluMLP(torch.nn.Module):
    """`down(squared_relu(up(x)))`; each rank has some of the intermediate features."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, bias: bool, placement: TensorPlacement
    ) -> None:
        """Raises ValueError: the ranks do not divide the intermediate size."""
        super().__init__()
        size = placement.share(intermediate_size, "features of the feed-forward layers")
        self.up_proj = MergedColumnParallelLinear(
            hidden_size, [("up_proj", size)], bias=bias, placement=placement
        )
        self.down_proj = RowParallelLinear(
            size, hidden_size, bias=bias, placement=placement.at("down_proj")
        )

    @property
    def first_weight(self) -> Weight:
        """The only weight that multiplies the input."""
        return self.up_proj.weight

    def forward(
        self, x: torch.Tensor | RoundedRows, residual: torch.Tensor
    ) -> tuple[ToAdd, torch.Tensor]:
        """See `GatedMLP.forward`."""
        return self.down_proj.forward(squared_relu(self.up_proj.forward(x)), residual)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """See `GatedMLP.part`."""
        return self.down_proj.part(squared_relu(self.up_proj.forward(x)))
