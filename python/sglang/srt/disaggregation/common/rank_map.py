"""Map of decode ranks to the prefill ranks that they read from. Plain numbers, any thread.

Both servers split the heads of attention into equal runs, in the order of their ranks. So a rank
has a span of the heads, as a fraction, and it needs data of exactly those ranks of the other server
whose spans overlap with its own. It talks to all of them, even if several have the same bytes, so
that each prefill rank knows its readers, and when all of them have read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_SOURCES: Final = 64
"""Most ranks that a rank reads from: each costs a thread and a connection a prompt."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank of a server.

    Attributes:
        rank: Number of the rank, from 0.
        num_ranks: Ranks of the server; a multiple of `attn_tp_size`.
        attn_tp_size: Number of ranks over which heads are split; see `RankGroup`.
    """

    rank: int = 0
    num_ranks: int = 1
    attn_tp_size: int = 1

    def others(self) -> list[RankPlace]:
        """All ranks of the same server, this one included, in their order."""
        return [
            RankPlace(rank, self.num_ranks, self.attn_tp_size) for rank in range(self.num_ranks)
        ]

    def overlaps(self, other: RankPlace) -> bool:
        """Whether the two have heads in common, for any number of heads."""
        own, their = self.rank % self.attn_tp_size, other.rank % other.attn_tp_size
        return (
            own * other.attn_tp_size < (their + 1) * self.attn_tp_size
            and their * self.attn_tp_size < (own + 1) * other.attn_tp_size
        )

    def sources(self, prefill: RankPlace) -> list[RankPlace]:
        """The ranks of the server of `prefill` that this rank reads from."""
        return [one for one in prefill.others() if self.overlaps(one)]

    def readers(self, decode: RankPlace) -> list[int]:
        """The ranks of the server of `decode` that read from this rank."""
        return [one.rank for one in decode.others() if one.overlaps(self)]
