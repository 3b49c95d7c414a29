"""The engine's interface to the ranks of one server: a broadcast from rank 0, and a MIN.

Every rank has its own scheduler. A `RankGroup` is made once, where the scheduler is built, and
handed down to all parts that must agree. Its calls are collectives: all ranks make the same calls
in the same order, each on its scheduler's thread, never on a thread of copies or storage.

The `size` ranks form `attn_cp_size` sets of `attn_tp_size` ranks. The ranks of a set split the
heads of attention. Ranks at the same index of different sets hold the same keys and values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

import numpy as np
import torch

_WORD: Final = np.dtype("<i8")
_ABSENT: Final = torch.iinfo(torch.int64).max
"""Placeholder in the slots of other ranks, where MIN takes their values."""


class RanksDiverged(RuntimeError):
    """The ranks have diverged, and going on would corrupt a cache."""


class RankLost(RuntimeError):
    """Another rank is lost. This rank cannot go on, but is not the cause."""


class RankGroup(ABC):
    """The ranks that must make the same decisions. Scheduler thread only."""

    rank: int
    """Number of this rank, from 0."""
    size: int
    """Number of ranks."""
    first_rank: int = 0
    """Number of rank 0 among all ranks of the server, which may have several DP groups."""
    attn_cp_size: int = 1
    """Number of ranks over which the tokens of a prefill are split (context parallelism); divides
    `size`."""

    @property
    def attn_tp_size(self) -> int:
        """Number of ranks over which the heads of attention are split."""
        return self.size // self.attn_cp_size

    @property
    def attn_tp_rank(self) -> int:
        """Index of this rank's share of the heads."""
        return self.rank % self.attn_tp_size

    @property
    def attn_cp_rank(self) -> int:
        """Index of this rank among the ranks with the same share of the heads."""
        return self.rank // self.attn_tp_size

    @abstractmethod
    def broadcast(self, payload: bytes | None) -> bytes:
        """Rank 0's `payload`, on every rank. Blocks until rank 0 has called.

        Args:
            payload: Bytes of any length on rank 0; None on other ranks.

        Raises:
            RanksDiverged: Another rank made another call.
        """

    @abstractmethod
    def reduce_min(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise MIN over the ranks, as a new tensor. Blocks until all have called.

        Args:
            values: int64 `[n]` on the CPU, n the same on all ranks.

        Raises:
            RanksDiverged: Another rank made another call, or passed another length.
        """

    def open_min(self) -> RankGroup:
        """The same ranks, with connections of its own for `reduce_min`, so that its messages never
        wait behind others. A collective. A group without such connections returns itself."""
        return self

    def close(self) -> None:
        """End the connections of `open_min`. Idempotent, and no collective."""


class SingleRank(RankGroup):
    rank = 0
    size = 1

    def broadcast(self, payload: bytes | None) -> bytes:
        assert payload is not None, "rank 0 broadcasts"
        return payload

    def reduce_min(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()


def gather_texts(group: RankGroup, text: str, max_bytes: int) -> list[str]:
    """The texts of all ranks, each cut at `max_bytes` of UTF-8; see `gather_bytes`."""
    raws = gather_bytes(group, text.encode()[:max_bytes])
    return [raw.decode(errors="ignore") for raw in raws]


def gather_bytes(group: RankGroup, raw: bytes) -> list[bytes]:
    """The bytes of all ranks, of any length, in order, on every rank. A collective."""
    lengths = torch.full((group.size,), _ABSENT, dtype=torch.int64)
    lengths[group.rank] = len(raw)
    sizes = group.reduce_min(lengths).tolist()
    words = -(-max(sizes) // _WORD.itemsize)
    if not words:
        return [b""] * group.size
    table = torch.full((group.size, words), _ABSENT, dtype=torch.int64)
    padded = raw.ljust(words * _WORD.itemsize, b"\0")
    table[group.rank] = torch.from_numpy(np.frombuffer(padded, dtype=_WORD).astype(np.int64))
    rows = group.reduce_min(table.flatten()).view(group.size, words).numpy()
    return [row.astype(_WORD).tobytes()[:size] for row, size in zip(rows, sizes, strict=True)]
