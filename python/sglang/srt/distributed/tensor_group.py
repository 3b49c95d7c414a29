"""What layers ask of the ranks that share a model: sums and gathered parts of tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class PeerParts:
    """Where a kernel finds the parts of a sum, in memory of other devices.

    Attributes:
        memories: int64 `[size]` on the device: where each rank's memory begins.
        pads: int64 `[size]` on the device: where each rank's flags begin, int32, all 0.
        pad_bytes: Of one rank's flags.
        rank: This rank's place.
        size: How many ranks there are.
        offset: Bytes from the begin of a rank's memory to its part.
    """

    memories: torch.Tensor
    pads: torch.Tensor
    pad_bytes: int
    rank: int
    size: int
    offset: int


@dataclass(frozen=True, slots=True)
class PendingSum:
    """A sum over the ranks that what reads it has yet to make: see `TensorGroup.sum_later`.

    Attributes:
        part: This rank's.
        peers: Where all ranks' are.
    """

    group: TensorGroup
    part: torch.Tensor
    peers: PeerParts

    def sum(self) -> torch.Tensor:
        """The sum itself, where nothing adds the parts on its way."""
        return self.group.all_reduce(self.part)


ToAdd: TypeAlias = torch.Tensor | PendingSum | None
"""What a norm has yet to add to a residual; None: nothing."""


class TensorGroup(ABC):
    """Ranks that split layers among them. One thread of each rank, in the same order on all."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank's place in the group, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many ranks there are."""

    def empty_part(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Memory for this rank's part of a sum: `sum_later` need not copy what is computed there.

        At most one is in use: the next call gives the same memory, until `sum_later` took it.

        Args:
            like: Has the part's dtype and device.
        """
        return like.new_empty(shape)

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks: the same bits on all of them.

        Args:
            x: Of the same shape and dtype on all ranks. Its memory may hold the sum.
        """

    def sum_later(self, x: torch.Tensor) -> torch.Tensor | PendingSum:
        """The sum over the ranks, or what a norm makes it of in its own kernel.

        Args:
            x: `[num_tokens, size]`, of the same shape and dtype on all ranks.
        """
        return self.all_reduce(x)

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`, `[size, *x.shape]`, in the order of ranks.

        Args:
            x: Of the same shape and dtype on all ranks.
        """


class SingleTensorGroup(TensorGroup):
    """One rank, which has everything."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)
