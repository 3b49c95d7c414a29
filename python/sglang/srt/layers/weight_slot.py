"""Which checkpoint tensor goes where in a model: said by the layers, used by the loader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sglang.srt.layers.placement import TensorPlacement


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The place of one checkpoint tensor.

    `dest` is a view into a parameter; merged layers give one view for each tensor they merge.
    `shape` is the whole tensor's shape in the checkpoint; it broadcasts to `dest`.
    """

    dest: torch.Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, dest: torch.Tensor) -> WeightSlot:
        """For a tensor that fills `dest` as it is."""
        return cls(dest, tuple(dest.shape))

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy a checkpoint tensor of `shape`, any dtype, any device."""
        assert tuple(tensor.shape) == self.shape
        self.dest.copy_(tensor.expand(self.dest.shape))


NamedSlots = Iterator[tuple[str, WeightSlot]]


class WeightedLayer(torch.nn.Module, ABC):
    """A layer that takes tensors of a checkpoint, whose names begin with `prefix`."""

    def __init__(self, placement: TensorPlacement) -> None:
        super().__init__()
        self.prefix = placement.prefix

    @abstractmethod
    def weight_slots(self) -> NamedSlots:
        """Yield each checkpoint tensor's full name and its place."""
