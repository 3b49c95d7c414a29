"""The tick sync: once a tick the ranks agree on the progress of copies and transfers.

Copies and transfers progress at different moments on different ranks, yet every rank must make the
same decisions. Decisions therefore see progress only through one int64 vector of fixed size, which
the ranks reduce by MIN. The vector also has a digest of the rank's state, which must be equal on
all ranks.

Layout of the vector:

- the digest and its negative
- `available`, `-silence_ms`, the two `rates`, `-has_reconnected`
- `writes`, `loads`, `check`, `administration`
- the time that the rank waited in the last sync, with its number, and the negative of that time
- a status for each backup slot
- for each prefetch slot `hit`, `landed`, `ended`, `-expired`, `-handed` and `whole`
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import torch

from sglang.srt.distributed.rank_group import RankGroup, RanksDiverged
from sglang.srt.mem_cache.tree.replicated_state import ReplicatedState, explain_difference
from sglang.srt.utils.metrics import Counter

MAX_PREFETCHES: Final = 64
"""Most prefetches that own host pages: the vector has a fixed size (unequal ones abort gloo)."""
MAX_SETTLED: Final = 256
"""Most writes to L3 that one tick settles, for the same reason."""

_HEAD: Final = 13
_SLOT: Final = 6
_BACKUPS_END: Final = _HEAD + MAX_SETTLED
_VECTOR_SIZE: Final = _BACKUPS_END + _SLOT * MAX_PREFETCHES
_ALL: Final = 1 << 62
_RANK_BITS: Final = 16


class Status(IntEnum):
    """Outcome of one operation. The least over the ranks counts."""

    UNDER_WAY = 0
    """All ranks wait, because the operation is under way on at least one rank."""
    FAILED = 1
    """The operation counts on no rank, because it failed on at least one."""
    LANDED = 2

    @classmethod
    def on(cls, *, is_good: bool) -> Status:
        """The status of an operation that has ended."""
        return cls.LANDED if is_good else cls.FAILED


class Rates(NamedTuple):
    """Tokens per second on which the ranks agreed; 0: not measured yet."""

    reads: int = 0
    prefills: int = 0


class Wait(NamedTuple):
    """How long a rank waited for others in a sync. The rank that waited least came last."""

    microseconds: int
    rank: int


class Lag(NamedTuple):
    """The last rank to reach the previous sync, and the seconds that another rank waited for it."""

    rank: int
    seconds: float


class PrefetchProgress(NamedTuple):
    """Progress of one prefetch, in pages."""

    hit: int = -1
    """Pages that the store reported; -1 while unknown."""
    landed: int = 0
    """Number of leading pages whose bytes are in host memory."""
    ended: bool = False
    """True if the transfer no longer touches host memory."""
    expired: bool = False
    """True if its time is up."""
    handed: int = 0
    """Number of leading pages that the store may have written to, or may be writing to."""
    whole: int = _ALL
    """Number of leading pages before one that the store was found to lack, or to have damaged."""


_NO_RATES: Final = Rates()
_NO_WAIT: Final = Wait(0, 0)
_NO_LAG: Final = Lag(0, 0.0)


@dataclasses.dataclass(slots=True)
class Progress:
    """Observations of one rank, or the agreement of all. Made at every tick."""

    digest: int = 0
    """Digest of tree, free counts and queues (`ReplicatedState`); must be equal on all ranks."""
    available: bool = True
    """True if no call to L3 is stuck."""
    silence_ms: int = 0
    """Milliseconds for which L3 has not answered a call that requests wait for, the longest of all
    ranks; 0 if that is not long. See `StoreCalls.silence_s`."""
    rates: Rates = _NO_RATES
    """Speeds of reading from L3 and of computing, on the slowest rank; 0 if a rank has none."""
    has_reconnected: bool = False
    """True if L3 came back after a failure, perhaps without its objects, since the ranks last
    agreed on such a return."""
    writes: int = 0
    """Number of copies from L1 to L2 that have ended, from the head of their queue on."""
    loads: int = 0
    """Number of copies from L2 to L1 that have ended, likewise."""
    check: int = 0
    """0 while the check of L3's pages is under way, then 1 and the number of leading pages that L3
    still has."""
    administration: Status = Status.UNDER_WAY
    """Status of the preparation of an operator's change of L3."""
    wait: Wait = _NO_WAIT
    """Set in one rank's vector alone: its wait in the last sync."""
    lag: Lag = _NO_LAG
    """Set in the agreement alone: difference of the waits. For metrics; decisions ignore it."""
    backups: Sequence[Status] = ()
    """Statuses of the writes to L3 that have ended, from the head of their queue on; at most
    `MAX_SETTLED`."""
    prefetches: Sequence[PrefetchProgress] = ()
    """Progress of the reads in the order of the prefetch table: first those that requests wait for,
    then the terminated ones."""

    @property
    def may_free_host(self) -> bool:
        """True if something has ended that held or pinned host pages."""
        has_ended = self.writes or self.loads or self.backups
        return bool(has_ended or any(one.ended for one in self.prefetches))


def to_vector(progress: Progress) -> torch.Tensor:
    """int64 `[fixed]`, so that an element-wise MIN over ranks is the agreement."""
    assert len(progress.prefetches) <= MAX_PREFETCHES
    assert len(progress.backups) <= MAX_SETTLED
    values = [progress.digest, -progress.digest]
    values += [int(progress.available), -progress.silence_ms]
    values += [*progress.rates, -int(progress.has_reconnected)]
    values += [progress.writes, progress.loads, progress.check]
    waited, rank = progress.wait
    values += [progress.administration, waited << _RANK_BITS | rank, -waited, *progress.backups]
    slots: list[int] = []
    for one in progress.prefetches:
        slots += [one.hit, one.landed, int(one.ended), -int(one.expired), -one.handed, one.whole]
    # Most elements are 0 (such as `UNDER_WAY`): numpy takes 3 us, a list 33 us.
    vector = np.zeros(_VECTOR_SIZE, dtype=np.int64)
    vector[: len(values)] = values
    vector[_BACKUPS_END : _BACKUPS_END + len(slots)] = slots
    return torch.from_numpy(vector)


def from_vector(vector: torch.Tensor, num_prefetches: int) -> Progress:
    """The agreement in a reduced vector of ranks with equal states."""
    values = vector.tolist()
    least, minus_most = values[11:_HEAD]
    ended = itertools.takewhile(bool, values[_HEAD:_BACKUPS_END])
    begins = range(_BACKUPS_END, _BACKUPS_END + _SLOT * num_prefetches, _SLOT)
    slots = [values[begin : begin + _SLOT] for begin in begins]
    prefetches = [
        PrefetchProgress(hit, landed, bool(ended), minus_expired < 0, -minus_handed, whole)
        for hit, landed, ended, minus_expired, minus_handed, whole in slots
    ]
    return Progress(
        digest=values[0],
        available=bool(values[2]),
        silence_ms=-values[3],
        rates=Rates(values[4], values[5]),
        has_reconnected=values[6] < 0,
        writes=values[7],
        loads=values[8],
        check=values[9],
        administration=Status(values[10]),
        lag=Lag(least & (1 << _RANK_BITS) - 1, (-minus_most - (least >> _RANK_BITS)) / 1e6),
        backups=[Status(value) for value in ended],
        prefetches=prefetches,
    )


class TickSync:
    """The agreement of all ranks on progress.

    Args:
        group: All ranks.
        state: State of this rank, which must be equal on all.
        reduce_min: Element-wise MIN over these ranks.
        lag: Counter of the seconds for which others waited, by rank.
    """

    def __init__(
        self,
        group: RankGroup,
        state: ReplicatedState,
        reduce_min: Callable[[torch.Tensor], torch.Tensor],
        lag: Counter,
    ) -> None:
        self._group = group
        self._state = state
        self._reduce_min = reduce_min
        self._lag = lag
        self._wait = Wait(0, group.rank)
        for rank in range(group.size):
            lag.labels(rank)

    def agree(self, progress: Progress) -> Progress:
        """Agree with all ranks on progress; a single rank's own progress counts. A collective.

        Args:
            progress: Observations of this rank. `digest` and `wait` are filled in here.

        Raises:
            RanksDiverged: The ranks' states differ. Names the ranks, and the first difference of
                each.
        """
        if self._group.size == 1:
            return progress
        progress.digest, progress.wait = self._state.digest, self._wait
        vector, began = to_vector(progress), time.monotonic()
        vector = self._reduce_min(vector)
        self._wait = Wait(int((time.monotonic() - began) * 1e6), self._group.rank)
        least, minus_most = vector[:2].tolist()
        if least != -minus_most:
            difference = explain_difference(self._group, self._state)
            raise RanksDiverged(f"the ranks' states differ: {difference}")
        agreed = from_vector(vector, len(progress.prefetches))
        self._lag.labels(agreed.lag.rank).inc(agreed.lag.seconds)
        return agreed
