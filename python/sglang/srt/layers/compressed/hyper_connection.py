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
from sglang.srt.layers.placement import (
    NamedSlots,
    TensorPlacement,
    WeightedLayer,
    WeightSlot,
)


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


class Split(NamedTuple):
    """The streams of tokens before a block."""

    x: torch.Tensor
    """`[num_tokens, hidden_size]`: input of the block."""
    out: torch.Tensor
    """fp32 `[num_tokens, streams]`: weight of the block's output in each stream."""
    mix: torch.Tensor
    """fp32 `[num_tokens, streams, streams]`: weight of each stream (rows) in each new one."""


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
        self.fn = exact.empty(outputs, options.streams * options.hidden_size)
        self.base, self.scale = exact.empty(outputs), exact.empty(scales)

    def project(self, streams: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, streams, hidden_size]` to fp32 `[num_tokens, outputs]`."""
        flat = streams.flatten(1).float()
        return F.linear(F.rms_norm(flat, flat.shape[1:], None, self.options.norm_eps), self.fn)

    def weight_slots(self) -> NamedSlots:
        for name, weight in (("fn", self.fn), ("base", self.base), ("scale", self.scale)):
            yield f"{self.prefix}_{name}", WeightSlot.of(weight)


class HyperConnection(_StreamWeights):
    """The streams around one block."""

    def __init__(self, options: HyperOptions, placement: TensorPlacement) -> None:
        """See `_StreamWeights`."""
        count = options.streams
        super().__init__(options, placement, (2 + count) * count, 3)

    def split(self, streams: torch.Tensor) -> Split:
        """Weights of a block around `[num_tokens, streams, hidden_size]`, and its input."""
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
        return Split(x.to(streams.dtype), 2.0 * out.sigmoid(), mix)

    @staticmethod
    def join(streams: torch.Tensor, split: Split, out: torch.Tensor) -> torch.Tensor:
        """The streams after a block with the output `[num_tokens, hidden_size]`."""
        dtype = streams.dtype
        mixed = torch.bmm(split.mix.to(dtype).transpose(1, 2), streams)
        return mixed.addcmul_(split.out.to(dtype).unsqueeze(-1), out.unsqueeze(1))


def plain(added: ToAdd, rest: torch.Tensor) -> torch.Tensor:
    """The output of a block that was given zeros as the residual, `[num_tokens, hidden_size]`."""
    if isinstance(added, PendingSum):
        added = added.sum()
    return rest if added is None else rest.add_(added)


class HyperHead(_StreamWeights):
    """Joins the streams after the last layer: a sum, weighted by sigmoids."""

    def __init__(self, options: HyperOptions, placement: TensorPlacement) -> None:
        """See `_StreamWeights`."""
        super().__init__(options, placement, options.streams, 1)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """`[n, streams, hidden_size]` to `[n, hidden_size]`."""
        weights = torch.sigmoid(self.project(streams) * self.scale + self.base) + self.options.eps
        return (streams.float() * weights.unsqueeze(-1)).sum(dim=1).to(streams.dtype)
