"""The norm of linear attention's output, head by head, with a gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.weight_slot import NamedSlots, WeightedLayer, WeightSlot


class GatedRMSNorm(WeightedLayer):
    """Root-mean-square norm times SiLU of a gate, in fp32. Heads share the weight."""

    def __init__(self, size: int, eps: float, *, placement: TensorPlacement) -> None:
        super().__init__(placement)
        self.eps = eps
        self.weight = placement.empty(size)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of `x`; `gate` has the same shape and the result's dtype."""
        normed = F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        return (normed * F.silu(gate.float())).to(gate.dtype)

    def weight_slots(self) -> NamedSlots:
        yield f"{self.prefix}.weight", WeightSlot.of(self.weight)
