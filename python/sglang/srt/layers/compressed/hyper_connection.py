"""Hyper-connections: several residual streams, mixed around each block.

A block reads a weighted sum of a token's streams. Its output is added to each stream with a weight,
and the streams are mixed by a matrix whose rows and columns sum to 1 ("mHC: Manifold-Constrained
Hyper-Connections", DeepSeek, 2025). All weights depend on the streams. Every rank computes them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from sglang.srt.distributed.tensor_group import PendingSum, ToAdd
from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.layernorm import RMSNorm, WideRMSNorm
from sglang.srt.layers.placement import (
    NamedSlots,
    TensorPlacement,
    WeightedLayer,
    WeightSlot,
)
from sglang.srt.layers.triton_ops.arguments import StreamsJoin, StreamsSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperOptions:
    """Settings of all hyper-connections of a model."""

    hidden_size: int
    streams: int
    iterations: int
    """Sinkhorn's steps towards sums of 1."""
    eps: float
    """Added to weights and sums, so that no divisor is 0."""
    norm_eps: float
    """Epsilon of the norm of a token's streams."""


class Streams(NamedTuple):
    """The residual streams of tokens between two blocks. The output of the block before is added
    when the next one is entered, in the same launch."""

    values: torch.Tensor
    """`[num_tokens, streams, hidden_size]`; before the first block `[num_tokens, hidden_size]`:
    the streams of a token are equal."""
    weights: torch.Tensor | None = None
    """fp32 `[num_tokens, streams + streams^2]`: weight of the output in each stream, then of each
    stream (rows) in each new one. None: there is no block before."""
    out: torch.Tensor | None = None
    """`[num_tokens, hidden_size]`: the block's output."""
    rest: torch.Tensor | None = None
    """As `out`, added to it; None: nothing is."""

    def of(self, rows: torch.Tensor) -> Streams:
        """The streams of some tokens, int64 `[n]`, before the output is known."""
        assert self.weights is not None and self.out is None
        return Streams(self.values.index_select(0, rows), self.weights.index_select(0, rows))

    def behind(self, added: ToAdd, rest: torch.Tensor | None) -> Streams:
        """The streams behind a block that was given zeros as the residual, from what it returned;
        see `RowParallelLinear.forward`."""
        if isinstance(added, PendingSum):
            added = added.sum()
        out, rest = (rest, None) if added is None else (added, rest)
        assert out is not None
        return self._replace(out=out, rest=rest)

    def to_join(self) -> StreamsJoin | None:
        """The output of the block before; None: there is none."""
        if self.weights is None:
            return None
        assert self.out is not None, "the block before has run"
        return StreamsJoin(self.out, self.rest, self.weights)

    def joined(self) -> torch.Tensor:
        """`values` with the block's output."""
        join = self.to_join()
        if join is None:
            return self.values
        kernels = fused_kernels(self.values.device)
        if kernels is not None:
            return kernels.join_streams(self.values, join)
        out = join.out if join.rest is None else join.rest.add_(join.out)
        values, (dtype, count) = self.values, (self.values.dtype, self.values.shape[1])
        weights = join.weights.to(dtype)
        mix = weights[:, count:].view(-1, count, count).transpose(1, 2)
        return torch.bmm(mix, values).addcmul_(weights[:, :count, None], out.unsqueeze(1))


class _StreamWeights(WeightedLayer):
    """Weights of a projection from a token's streams, in fp32."""

    def __init__(
        self, options: HyperOptions, placement: TensorPlacement, outputs: int, scales: int
    ) -> None:
        """Args:
        placement: Its prefix, with an underscore and a name, is the name of each tensor.
        """
        super().__init__(placement)
        self.options = options
        exact = replace(placement, dtype=torch.float32)
        self._kernels = fused_kernels(placement.device)
        self.fn = exact.empty(outputs, options.streams * options.hidden_size)
        self.base, self.scale = exact.empty(outputs), exact.empty(scales)

    def project(self, streams: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, streams, hidden_size]` to fp32 `[num_tokens, outputs]`."""
        flat = streams.flatten(1).float()
        return F.linear(F.rms_norm(flat, flat.shape[1:], None, self.options.norm_eps), self.fn)

    def _plan(self, norm: RMSNorm) -> StreamsSplit:
        """Argument of the kernels; `norm` is that of the sum of the streams."""
        options = self.options
        return StreamsSplit(
            self.fn,
            self.base,
            self.scale,
            options.iterations,
            options.eps,
            options.norm_eps,
            norm.weight,
            norm.eps,
            isinstance(norm, WideRMSNorm),
        )

    def weight_slots(self) -> NamedSlots:
        for name, weight in (("fn", self.fn), ("base", self.base), ("scale", self.scale)):
            yield f"{self.prefix}_{name}", WeightSlot.of(weight)


class HyperConnection(_StreamWeights):
    """The streams around one block, and the norm of the block's input."""

    def __init__(self, options: HyperOptions, norm: RMSNorm, placement: TensorPlacement) -> None:
        """See `_StreamWeights`."""
        count = options.streams
        super().__init__(options, placement, (2 + count) * count, 3)
        self.norm = norm

    def enter(self, streams: Streams) -> tuple[torch.Tensor, torch.Tensor, Streams]:
        """Join the streams before the block, and split them.

        Returns:
            The block's normalised input, `[num_tokens, hidden_size]`; zeros of the same shape, as a
            residual for the block; and the streams with the weights of the block.
        """
        if self._kernels is None:
            values = streams.joined()
            if values.dim() == 2:
                values = values.unsqueeze(1).repeat(1, self.options.streams, 1)
            x, weights = self._split(values)
            x = self.norm.forward(x)
            return x, torch.zeros_like(x), Streams(values, weights)
        plan = self._plan(self.norm)
        entered = self._kernels.join_and_split(streams.values, streams.to_join(), plan)
        return entered.x, entered.zeros, Streams(entered.streams, entered.weights)

    def _split(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's input, and `Streams.weights`, for `[num_tokens, streams, hidden_size]`."""
        count, eps = self.options.streams, self.options.eps
        sizes = [count, count, count * count]
        found = torch.split(self.project(streams), sizes, dim=-1)
        bases = torch.split(self.base, sizes)
        into, out, mix = (
            torch.addcmul(base, one, scale)
            for one, base, scale in zip(found, bases, self.scale, strict=True)
        )
        x = (streams.float() * (into.sigmoid() + eps).unsqueeze(-1)).sum(dim=1)
        mix = mix.view(-1, count, count).softmax(dim=-1) + eps
        mix = mix / (mix.sum(dim=1, keepdim=True) + eps)
        for _ in range(self.options.iterations - 1):
            mix = mix / (mix.sum(dim=2, keepdim=True) + eps)
            mix = mix / (mix.sum(dim=1, keepdim=True) + eps)
        return x.to(streams.dtype), torch.cat([2.0 * out.sigmoid(), mix.flatten(1)], dim=1)


class HyperHead(_StreamWeights):
    """Joins the streams after the last layer: a sum, weighted by sigmoids, and the final norm."""

    def __init__(self, options: HyperOptions, placement: TensorPlacement) -> None:
        """See `_StreamWeights`."""
        super().__init__(options, placement, options.streams, 1)

    def forward(self, streams: Streams, norm: RMSNorm) -> torch.Tensor:
        """The input of the output head, `[n, hidden_size]`, normalised."""
        if self._kernels is not None:
            plan = self._plan(norm)
            return self._kernels.join_into_one(streams.values, streams.to_join(), plan)
        values, eps = streams.joined(), self.options.eps
        weights = torch.sigmoid(self.project(values) * self.scale + self.base) + eps
        return norm.forward((values.float() * weights.unsqueeze(-1)).sum(dim=1).to(values.dtype))
