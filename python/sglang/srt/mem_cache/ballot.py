"""One ballot a tick: what the ranks agree has happened.

Copies and transfers progress at different moments on different ranks, yet every rank must make
the same decisions. So progress enters a decision only through one int64 vector of fixed size,
reduced by MIN over the ranks. Pure functions; the reduction is handed in.

Layout of the vector: the digest of the books and its negative, `available`, the two `rates`,
`reconnects`; for each FIFO queue `done` and `first_failed`; for each prefetch slot `hit`,
`landed`, `ended`, `-expired` and `-handed`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import torch

from sglang.srt.mem_cache.fetch_worth import Rates

NONE_FAILED: Final = 2**62
"""`first_failed` of a queue in which nothing failed."""
MAX_PREFETCHES: Final = 64
"""Prefetches that own host pages at most: the vector has a fixed size (unequal ones abort gloo)."""
QUEUES: Final = ("write", "load", "backup", "check")

_HEAD: Final = 6
_VECTOR_SIZE: Final = _HEAD + 2 * len(QUEUES) + 5 * MAX_PREFETCHES

Reduce: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""MIN over the ranks of an int64 `[n]` CPU tensor."""


class RanksDiverged(RuntimeError):
    """The ranks' books differ: going on would corrupt somebody's cache."""


class QueueProgress(NamedTuple):
    """Of a FIFO queue of operations, counted from its head."""

    done: int = 0
    """Operations that have ended."""
    first_failed: int = NONE_FAILED
    """Position of the first that ended in failure."""

    @property
    def successes(self) -> int:
        """Operations to acknowledge as successful now."""
        return min(self.done, self.first_failed)

    @property
    def failure_follows(self) -> bool:
        """The operation after `successes` is to be acknowledged as failed."""
        return self.first_failed < self.done


class PrefetchProgress(NamedTuple):
    """Of one prefetch, in pages."""

    hit: int = -1
    """Pages that the store reported; -1 while unknown."""
    landed: int = 0
    """Pages whose bytes are in host memory, from the first on."""
    ended: bool = False
    """The transfer touches host memory no more."""
    expired: bool = False
    """Its time is up."""
    handed: int = 0
    """Pages that the store may have written to, or may be writing to, from the first on."""


_NO_PROGRESS: Final = QueueProgress()
_NO_RATES: Final = Rates()


@dataclasses.dataclass(slots=True)
class Progress:
    """What one rank has seen, or what all agree on. Made at every tick."""

    books_digest: int = 0
    """Of free counts and tree; must be equal on all ranks. At most 62 bits."""
    available: bool = True
    """No call to L3 is stuck."""
    rates: Rates = _NO_RATES
    """Of reading from L3 and of computing; those of the slowest rank, 0 where any knows none."""
    reconnects: int = 0
    """How often L3 came back after a failure, perhaps without what it held."""
    queues: dict[str, QueueProgress] = dataclasses.field(default_factory=dict)
    """By name of `QUEUES`; absent: nothing happened."""
    prefetches: Sequence[PrefetchProgress] = ()
    """In the order of the board: those that are waited for, then those that were cut."""

    def of_queue(self, name: str) -> QueueProgress:
        """That of one of `QUEUES`."""
        return self.queues.get(name, _NO_PROGRESS)


def to_vector(progress: Progress) -> torch.Tensor:
    """int64 `[fixed]`, so that an element-wise MIN over ranks is the agreement."""
    assert len(progress.prefetches) <= MAX_PREFETCHES
    values = [progress.books_digest, -progress.books_digest]
    values += [int(progress.available), *progress.rates, progress.reconnects]
    for name in QUEUES:
        values += progress.of_queue(name)
    for one in progress.prefetches:
        values += [one.hit, one.landed, int(one.ended), -int(one.expired), -one.handed]
    values += [0] * (_VECTOR_SIZE - len(values))
    return torch.tensor(values, dtype=torch.int64)


def from_vector(vector: torch.Tensor, num_prefetches: int) -> Progress:
    """The agreement in a reduced vector.

    Raises:
        RanksDiverged: The digests of the books differ.
    """
    values = vector.tolist()
    if values[0] != -values[1]:
        raise RanksDiverged("the ranks' cache books differ: stop and report the last requests")
    queues = {
        name: QueueProgress(values[_HEAD + 2 * i], values[_HEAD + 2 * i + 1])
        for i, name in enumerate(QUEUES)
    }
    begin = _HEAD + 2 * len(QUEUES)
    slots = [values[begin + 5 * i : begin + 5 * i + 5] for i in range(num_prefetches)]
    prefetches = [
        PrefetchProgress(hit, landed, bool(ended), minus_expired < 0, -minus_handed)
        for hit, landed, ended, minus_expired, minus_handed in slots
    ]
    return Progress(
        books_digest=values[0],
        available=bool(values[2]),
        rates=Rates(values[3], values[4]),
        reconnects=values[5],
        queues=queues,
        prefetches=prefetches,
    )


def agree(progress: Progress, reduce: Reduce | None) -> Progress:
    """What all ranks agree on; with one rank (`reduce` is None) what it saw itself."""
    if reduce is None:
        return progress
    return from_vector(reduce(to_vector(progress)), len(progress.prefetches))
