"""Which checkpoint tensor goes where in a model: said by the layers, used by the loader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.layers.placement import Share, TensorPlacement


class Sliceable(Protocol):
    """A whole checkpoint tensor: in memory, or in a file that is read where it is indexed."""

    def __getitem__(self, index: tuple[slice, ...], /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The place of one checkpoint tensor, or of this rank's part of it.

    `dest` is a view into a parameter; merged layers give one view for each tensor they merge.
    The part broadcasts to `dest`.
    """

    dest: torch.Tensor
    shape: tuple[int, ...]
    """Of the whole tensor in the checkpoint."""
    dim: int = 0
    """The dimension that is split."""
    share: Share | None = None
    """This rank's part of that dimension; None: ranks have the whole tensor each."""
    runs: int = 1
    """Runs of `share.total` that follow one another in that dimension; each is split alike."""
    parts: tuple[str, ...] = ()
    """For a tensor that holds several others, the names of those; see `stacked_slots`."""

    @classmethod
    def of(cls, dest: torch.Tensor, share: Share | None = None, dim: int = 0) -> WeightSlot:
        """For a tensor of which this rank's part fills `dest` as it is."""
        shape = list(dest.shape)
        if share is not None:
            assert shape[dim] == share.size, (shape, dim, share)
            shape[dim] = share.total
        return cls(dest, tuple(shape), dim, share)

    @property
    def is_split(self) -> bool:
        """Whether this rank takes less than the whole tensor."""
        return self.share is not None and self.share.size < self.share.total

    def fill(self, whole: Sliceable) -> None:
        """Copy this rank's part of a checkpoint tensor of `shape`, any dtype, any device.

        Reads nothing else of it.
        """
        if self.share is not None and not self.share.size:
            return
        index = [slice(None)] * len(self.shape)
        if self.share is None:
            self.dest.copy_(whole[tuple(index)].expand(self.dest.shape))
            return
        for run, dest in enumerate(self.dest.chunk(self.runs, self.dim)):
            first = run * self.share.total
            index[self.dim] = slice(first + self.share.begin, first + self.share.end)
            dest.copy_(whole[tuple(index)].expand(dest.shape))


NamedSlots = Iterator[tuple[str, WeightSlot]]


class WeightedLayer(torch.nn.Module, ABC):
    """A layer that takes tensors of a checkpoint, whose names begin with `prefix`."""

    def __init__(self, placement: TensorPlacement) -> None:
        super().__init__()
        self.prefix = placement.prefix

    @abstractmethod
    def weight_slots(self) -> NamedSlots:
        """Yield each checkpoint tensor's full name and its place."""

    def stacked_slots(self) -> NamedSlots:
        """Yield the tensors, with `parts`, that a checkpoint may have in place of their parts.

        The parts are among `weight_slots`.
        """
        return iter(())
