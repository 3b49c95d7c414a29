"""Linear layers. Projections that read the same input are merged into one matmul at load.

The names say how tensor parallelism will split each of them; `TensorPlacement` admits one
rank for now.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.weight_slot import NamedSlots, WeightedLayer, WeightSlot


class MergedColumnParallelLinear(WeightedLayer):
    """Several projections of one input as a single matmul, outputs side by side."""

    def __init__(
        self,
        input_size: int,
        parts: Sequence[tuple[str, int]],
        *,
        bias: bool,
        placement: TensorPlacement,
        prefix: str,
    ) -> None:
        """Args:
        input_size: Features of the input.
        parts: Name in the checkpoint (under `prefix`) and output features of each projection.
        """
        super().__init__()
        self.parts = tuple(parts)
        self.prefix = prefix
        output_size = sum(size for _, size in parts)
        self.weight = placement.empty(output_size, input_size)
        self.bias = placement.empty(output_size) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, input_size]` to `[num_tokens, sum of the parts]`."""
        return F.linear(x, self.weight, self.bias)

    def weight_slots(self) -> NamedSlots:
        begin = 0
        for name, size in self.parts:
            weight = self.weight[begin : begin + size]
            yield f"{self.prefix}.{name}.weight", WeightSlot(weight, tuple(weight.shape))
            if self.bias is not None:
                bias = self.bias[begin : begin + size]
                yield f"{self.prefix}.{name}.bias", WeightSlot(bias, (size,))
            begin += size


class RowParallelLinear(WeightedLayer):
    """A plain projection, of features that a column-parallel layer may have split."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool,
        placement: TensorPlacement,
        prefix: str,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.weight = placement.empty(output_size, input_size)
        self.bias = placement.empty(output_size) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, input_size]` to `[num_tokens, output_size]`."""
        return F.linear(x, self.weight, self.bias)

    def weight_slots(self) -> NamedSlots:
        yield f"{self.prefix}.weight", WeightSlot(self.weight, tuple(self.weight.shape))
        if self.bias is not None:
            yield f"{self.prefix}.bias", WeightSlot(self.bias, tuple(self.bias.shape))
