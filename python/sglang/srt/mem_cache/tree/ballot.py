"""One ballot a tick: what the ranks agree has happened.

Copies and transfers progress at different moments on different ranks, yet every rank must make
the same decisions. So progress enters a decision only through one int64 vector of fixed size,
reduced by MIN over the ranks. Pure functions; the reduction is handed in.

Layout of the vector: the digest of the books and its negative, `available`, the two `rates`,
`reconnects`, `writes`, `loads`, `check`, `administration`; a verdict for each backup slot; for each
prefetch slot `hit`, `landed`, `ended`, `-expired` and `-handed`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

import torch

MAX_PREFETCHES: Final = 64
"""Prefetches that own host pages at most: the vector has a fixed size (unequal ones abort gloo)."""
MAX_SETTLED: Final = 256
"""Writes to L3 that one tick settles at most, for the same reason."""

_HEAD: Final = 10
_SLOT: Final = 5
_BACKUPS_END: Final = _HEAD + MAX_SETTLED
_VECTOR_SIZE: Final = _BACKUPS_END + _SLOT * MAX_PREFETCHES

Reduce: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""MIN over the ranks of an int64 `[n]` CPU tensor."""


class RanksDiverged(RuntimeError):
    """The ranks' books differ: going on would corrupt somebody's cache."""


class Verdict(IntEnum):
    """On one operation. The least over the ranks is what it came to."""

    UNDER_WAY = 0
    """On some rank, until which all wait."""
    FAILED = 1
    """On some rank, so that it counts for none."""
    LANDED = 2

    @classmethod
    def on(cls, *, is_good: bool) -> Verdict:
        """Of an operation that has ended."""
        return cls.LANDED if is_good else cls.FAILED


class Rates(NamedTuple):
    """Tokens per second, as the ranks agree on them; 0: too little is known."""

    reads: int = 0
    prefills: int = 0


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
    writes: int = 0
    """Copies from L1 to L2 that have ended, from the head of their queue on."""
    loads: int = 0
    """Copies from L2 to L1, the same."""
    check: Verdict = Verdict.UNDER_WAY
    """Whether L3 still has what it was asked about; `FAILED`: it has lost pages."""
    administration: Verdict = Verdict.UNDER_WAY
    """Whether the change of L3 that an operator has begun can be made."""
    backups: Sequence[Verdict] = ()
    """On the writes to L3 that have ended, from the head of their queue on; at most
    `MAX_SETTLED`."""
    prefetches: Sequence[PrefetchProgress] = ()
    """In the order of the board: those that are waited for, then those that were cut."""


def to_vector(progress: Progress) -> torch.Tensor:
    """int64 `[fixed]`, so that an element-wise MIN over ranks is the agreement."""
    assert len(progress.prefetches) <= MAX_PREFETCHES
    assert len(progress.backups) <= MAX_SETTLED
    values = [progress.books_digest, -progress.books_digest]
    values += [int(progress.available), *progress.rates, progress.reconnects]
    values += [progress.writes, progress.loads, progress.check]
    values += [progress.administration, *progress.backups]
    values += [Verdict.UNDER_WAY] * (_BACKUPS_END - len(values))
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
    ended = itertools.takewhile(bool, values[_HEAD:_BACKUPS_END])
    begins = range(_BACKUPS_END, _BACKUPS_END + _SLOT * num_prefetches, _SLOT)
    slots = [values[begin : begin + _SLOT] for begin in begins]
    prefetches = [
        PrefetchProgress(hit, landed, bool(ended), minus_expired < 0, -minus_handed)
        for hit, landed, ended, minus_expired, minus_handed in slots
    ]
    return Progress(
        books_digest=values[0],
        available=bool(values[2]),
        rates=Rates(values[3], values[4]),
        reconnects=values[5],
        writes=values[6],
        loads=values[7],
        check=Verdict(values[8]),
        administration=Verdict(values[9]),
        backups=[Verdict(value) for value in ended],
        prefetches=prefetches,
    )


def agree(progress: Progress, reduce: Reduce | None) -> Progress:
    """What all ranks agree on; with one rank (`reduce` is None) what it saw itself."""
    if reduce is None:
        return progress
    return from_vector(reduce(to_vector(progress)), len(progress.prefetches))
