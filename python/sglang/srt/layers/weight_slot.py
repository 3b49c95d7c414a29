"""Slots for checkpoint tensors in a model: layers declare them, the loader fills them."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.layers.placement import Share, TensorPlacement


class Sliceable(Protocol):
    """A whole checkpoint tensor: in memory, or in a file of which only indexed parts are read."""

    def __getitem__(self, index: tuple[slice, ...], /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The destination of one checkpoint tensor, or of this rank's part of it.

    `dest` is a view of a parameter; a merged layer has one view for each tensor that it merges. The
    part broadcasts to `dest`.
    """

    dest: torch.Tensor
    shape: tuple[int, ...]
    """Shape of the whole tensor in the checkpoint."""
    dim: int = 0
    """The dimension that is split."""
    shares: tuple[Share, ...] = ()
    """This rank's part of each run of that dimension; the runs are consecutive. Empty: each rank
    has the whole tensor."""
    parts: tuple[str, ...] = ()
    """Names of the tensors that a stacked tensor holds; see `stacked_slots`."""

    @classmethod
    def of(cls, dest: torch.Tensor, share: Share | None = None, dim: int = 0) -> WeightSlot:
        """A slot whose `dest` takes this rank's part of the tensor."""
        return cls.of_runs(dest, () if share is None else (share,), dim)

    @classmethod
    def of_runs(
        cls,
        dest: torch.Tensor,
        shares: tuple[Share, ...],
        dim: int = 0,
        parts: tuple[str, ...] = (),
    ) -> WeightSlot:
        """A slot whose `dest` takes this rank's parts of several runs, in order."""
        shape = list(dest.shape)
        if shares:
            assert shape[dim] == sum(share.size for share in shares), (shape, dim, shares)
            shape[dim] = sum(share.total for share in shares)
        return cls(dest, tuple(shape), dim, shares, parts)

    @property
    def is_split(self) -> bool:
        """True if this rank takes less than the whole tensor."""
        return any(share.size < share.total for share in self.shares)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Begin and end of each of this rank's parts, in the whole tensor's `dim`."""
        ends = itertools.accumulate(share.total for share in self.shares)
        firsts = [end - share.total for end, share in zip(ends, self.shares, strict=True)]
        return [
            (first + share.begin, first + share.end)
            for first, share in zip(firsts, self.shares, strict=True)
        ]

    @property
    def runs(self) -> list[int]:
        """Lengths of the runs of `dim`; empty: each rank has the whole tensor."""
        return [share.total for share in self.shares]

    @property
    def copies(self) -> torch.Tensor:
        """`dest` as `[copies, *part]`, one entry for each time that `dest` repeats the part."""
        part = list(self.shape)
        if self.shares:
            part[self.dim] = sum(share.size for share in self.shares)
        if list(self.dest.shape) == part:
            return self.dest.unsqueeze(0)
        assert list(self.dest.shape[1:]) == part, (self.dest.shape, part)
        return self.dest

    def fill(self, whole: Sliceable) -> None:
        """Copy this rank's part of a checkpoint tensor of `shape`, any dtype, any device. Nothing
        else of it is read."""
        index = [slice(None)] * len(self.shape)
        if not self.shares:
            self.dest.copy_(whole[tuple(index)].expand(self.dest.shape))
            return
        dests = torch.split(self.dest, [share.size for share in self.shares], self.dim)
        for (begin, end), dest in zip(self.ranges, dests, strict=True):
            if begin < end:
                index[self.dim] = slice(begin, end)
                dest.copy_(whole[tuple(index)].expand(dest.shape))


NamedSlots = Iterator[tuple[str, WeightSlot]]


class WeightedLayer(torch.nn.Module, ABC):
    """A layer with weights from a checkpoint; the names of its tensors begin with `prefix`."""

    def __init__(self, placement: TensorPlacement) -> None:
        super().__init__()
        self.prefix = placement.prefix

    @abstractmethod
    def weight_slots(self) -> NamedSlots:
        """Yield the full name of each checkpoint tensor, and its slot."""

    def stacked_slots(self) -> NamedSlots:
        """Yield the stacked tensors that a checkpoint may have instead of some of `weight_slots`,
        which their `parts` name."""
        return iter(())
