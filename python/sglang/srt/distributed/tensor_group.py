"""Collectives of layers over the ranks that share a model: sums and gathers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from sglang.srt.constants import KIB


@dataclass(frozen=True, slots=True)
class PeerParts:
    """Addresses of all ranks' partial sums, which a kernel reads in other devices' memory.

    Attributes:
        memories: Address of each rank's memory in this process.
        flags: Offset of a rank's flags in its memory, in bytes; int32 `[MOST_PROGRAMS, size]`; see
            `layers/triton_ops/barrier.py`.
        offset: Offset of a rank's partial sum in its memory, in bytes.
        low_latency: Offset of a rank's low-latency buffer, in bytes; see `low_latency_bytes`.
    """

    memories: tuple[int, ...]
    flags: int
    rank: int
    size: int
    offset: int
    low_latency: int


MOST_PROGRAMS: Final = 256
"""Most programs of a kernel with a barrier between ranks, so that all run at the same time."""
LOW_LATENCY_ROWS: Final = 64
"""Most tokens whose partial sums ranks write to each other's low-latency buffers."""
LOW_LATENCY_ROW_BYTES: Final = 32 * KIB


def low_latency_bytes(num_ranks: int) -> int:
    """Bytes of a low-latency buffer, to which the other ranks write rows.

    It is int64 `[2, num_ranks, LOW_LATENCY_ROWS, LOW_LATENCY_ROW_BYTES / 8]`, then the last
    sequence number of each row, int32 `[LOW_LATENCY_ROWS]`, all zero at the start; see
    `layers/triton_ops/peers.py`.
    """
    return 2 * num_ranks * LOW_LATENCY_ROWS * LOW_LATENCY_ROW_BYTES + LOW_LATENCY_ROWS * 4


@dataclass(frozen=True, slots=True)
class PendingSum:
    """A sum over the ranks that its reader must compute; see `TensorGroup.sum_later`."""

    group: TensorGroup
    part: torch.Tensor
    peers: PeerParts

    def sum(self) -> torch.Tensor:
        """Compute the sum, if no norm does it."""
        return self.group.all_reduce(self.part)


ToAdd: TypeAlias = torch.Tensor | PendingSum | None
"""Term that the next norm adds to the residual; None: nothing to add."""


class TensorGroup(ABC):
    """Ranks that split layers. One thread of each rank makes the calls, in the same order on all
    ranks."""

    rank: int
    """Number of this rank in the group, from 0."""
    size: int
    """Number of ranks."""

    def empty_part(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Memory for this rank's partial sum, which saves `sum_later` a copy.

        Only one partial sum is in use at a time: further calls return the same memory until
        `sum_later` has taken it.

        Args:
            like: Tensor with the wanted dtype and device.
        """
        return like.new_empty(shape)

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, with the same bits on all of them.

        Args:
            x: A tensor of the same shape and dtype on all ranks; may be overwritten with the sum.
        """

    def sum_later(self, x: torch.Tensor) -> torch.Tensor | PendingSum:
        """The sum over the ranks, or the partial sums for a norm to add in its kernel.

        Args:
            x: `[num_tokens, size]`, of the same shape and dtype on all ranks.
        """
        return self.all_reduce(x)

    def shared_keys(self, count: int) -> tuple[torch.Tensor, PeerParts] | None:
        """Memory for int64 `[count]` that kernels of all ranks can read after this rank wrote it,
        and the addresses of all ranks' memory; None if there is no shared memory.

        The call after the next returns the same memory, so a kernel of this rank must pass a
        barrier with the other ranks before that call. Not for captures.
        """
        return None

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`, `[size, *x.shape]`, in the order of ranks.

        Args:
            x: A tensor of the same shape and dtype on all ranks.
        """

    @abstractmethod
    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of this rank's part, `[...]`.

        Args:
            x: Contiguous `[size, ...]`, of the same shape and dtype on all ranks: a part for each
                rank, in their order.
        """


class SingleTensorGroup(TensorGroup):
    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return x[0]
