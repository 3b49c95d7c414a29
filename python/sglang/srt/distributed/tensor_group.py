"""Collectives of layers over the ranks that share a model: sums and gathered parts of tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class PeerParts:
    """Addresses at which a kernel reads the parts of all ranks, in memory of other devices.

    Attributes:
        memories: Address in this process of each rank's memory.
        flags: Offset in it of the rank's flags, in bytes; int32 `[MOST_PROGRAMS, size]`; see
            `layers/triton_ops/meeting.py`.
        rank: This rank's place.
        size: Number of ranks.
        offset: Offset in it of the rank's part, in bytes.
    """

    memories: tuple[int, ...]
    flags: int
    rank: int
    size: int
    offset: int


MOST_PROGRAMS: Final = 256
"""Most programs of a kernel in which ranks meet, so that all run on a GPU at the same time."""


@dataclass(frozen=True, slots=True)
class PendingSum:
    """A sum over the ranks that its reader has to make: see `TensorGroup.sum_later`.

    Attributes:
        part: This rank's addend.
        peers: Addresses of all ranks' addends.
    """

    group: TensorGroup
    part: torch.Tensor
    peers: PeerParts

    def sum(self) -> torch.Tensor:
        """The sum itself, where nothing adds the parts on its way."""
        return self.group.all_reduce(self.part)


ToAdd: TypeAlias = torch.Tensor | PendingSum | None
"""Addend of a residual that the next norm adds; None: nothing."""


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
            x: A tensor of the same shape and dtype on all ranks. Its memory may take the sum.
        """

    def sum_later(self, x: torch.Tensor) -> torch.Tensor | PendingSum:
        """The sum over the ranks, or its parts, which a norm sums in its own kernel.

        Args:
            x: `[num_tokens, size]`, of the same shape and dtype on all ranks.
        """
        return self.all_reduce(x)

    def shared_keys(self, count: int) -> tuple[torch.Tensor, PeerParts] | None:
        """Memory for int64 `[count]` that kernels of all ranks can read once this rank has written
        it, and the addresses of all ranks' memory; None: there is none.

        The next call but one gives the same memory. By then a kernel of this rank has to have met
        those of the others. Not in captures.
        """
        return None

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`, `[size, *x.shape]`, in the order of ranks.

        Args:
            x: A tensor of the same shape and dtype on all ranks.
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
