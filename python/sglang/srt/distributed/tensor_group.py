"""What layers ask of the ranks that share a model: sums and gathered parts of tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class PeerParts:
    """Where a kernel finds the parts of all ranks, in memory of other devices.

    Attributes:
        memories: Addresses in this process: where each rank's memory begins.
        flags: Bytes from there to the rank's flags, int32 `[MOST_PROGRAMS, size]`; see
            `layers/triton_ops/meeting.py`.
        rank: This rank's place.
        size: How many ranks there are.
        offset: Bytes from the begin of a rank's memory to its part.
    """

    memories: tuple[int, ...]
    flags: int
    rank: int
    size: int
    offset: int


MOST_PROGRAMS: Final = 256
"""Of a kernel in which ranks meet: all of them are on a GPU at the same time."""


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

    def shared_keys(self, count: int) -> tuple[torch.Tensor, PeerParts] | None:
        """Memory for int64 `[count]` that kernels of all ranks can read once this rank has
        written it, and where they find everybody's; None: there is none.

        The next call but one gives the same memory. By then a kernel of this rank has to have met
        those of the others. Not in captures.
        """
        return None

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
