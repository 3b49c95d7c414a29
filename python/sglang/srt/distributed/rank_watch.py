"""Ends the server when a rank is gone, stuck or out of reach, instead of waiting for it for ever.

Each rank counts in a key of the store through which they met, and looks at the others' counts. The
kernel tells of processes that die on this machine sooner than that; this is for those that are
stopped, for other machines, and for networks. The store is in rank 0's process, and its calls wait
for an answer without a limit, so that a second thread watches how long a look takes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

logger = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
LIMIT_S: Final = 8.0
"""Seconds without a sign of life: what stands still so long will not come back soon."""
_LATE_S: Final = 2.0
"""A rank that looks this late was stopped itself, perhaps with the whole machine."""


class Counts(Protocol):
    """The part of the store that the watch uses; every call may raise RuntimeError, or never
    return."""

    def set(self, key: str, value: str, /) -> object: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...


class RankWatch:
    """Watches the ranks of a server. Owns two daemon threads: `rank-watch` looks, and
    `rank-watch-guard` notices a look that does not end.

    Args:
        counts: A connection to the store for this watch alone.
        rank: This rank.
        size: Number of ranks.
        on_lost: Called once, from one of the threads, with one line that names the rank.
        limit_s: Seconds without a sign of life after which a rank counts as lost.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        counts: Counts,
        rank: int,
        size: int,
        on_lost: Callable[[str], None],
        *,
        limit_s: float = LIMIT_S,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counts = counts
        self._rank = rank
        self._on_lost = on_lost
        self._limit_s = limit_s
        self._period_s = period_s
        self._clock = clock
        self._beats = 0
        self._last_look = clock()
        self._seen = {other: (b"", self._last_look) for other in range(size) if other != rank}
        self._num_looks = 0
        """Those that have ended."""
        self._num_guarded = (-1, 0)
        """How many of them there were when the guard last came, and how often in a row."""
        self._closed = threading.Event()
        self._told = threading.Lock()
        self._threads = (
            threading.Thread(target=self._run, args=(self.look,), name="rank-watch", daemon=True),
            threading.Thread(
                target=self._run, args=(self.guard,), name="rank-watch-guard", daemon=True
            ),
        )
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Watch no more: the server ends in order. Idempotent; does not wait for the threads."""
        self._closed.set()

    def guard(self) -> str | None:
        """Whether looks end, asked once a period: what is wrong, in one line; None: nothing.

        It counts its own calls instead of seconds: a process that was stopped makes none.
        """
        known, times = self._num_guarded
        times = times + 1 if known == self._num_looks else 0
        self._num_guarded = self._num_looks, times
        # A period may pass before the next look, and one before the guard comes.
        if times * self._period_s > self._limit_s - 2 * self._period_s:
            silent_s = times * self._period_s
            return f"rank 0 is stuck or out of reach: no answer from it for {silent_s:.0f} s"
        return None

    def look(self) -> str | None:
        """Count, and look at the others: what is wrong, in one line; None: nothing."""
        try:
            self._beats += 1
            self._counts.set(_key(self._rank), str(self._beats))
            beats = {other: self._beats_of(other) for other in self._seen}
        except RuntimeError as error:
            return f"rank 0 is gone or out of reach: {_first_line(error)}"
        self._num_looks += 1
        now = self._clock()
        was_late = now - self._last_look > self._period_s + _LATE_S
        self._last_look = now
        for other, count in beats.items():
            known, since = self._seen[other]
            if count != known or was_late:
                self._seen[other] = count, now
            elif now - since > self._limit_s:
                return f"rank {other} has given no sign of life for {self._limit_s:.0f} s"
        return None

    def _beats_of(self, rank: int) -> bytes:
        key = _key(rank)
        return self._counts.get(key) if self._counts.check([key]) else b""

    def _run(self, find: Callable[[], str | None]) -> None:
        while not self._closed.wait(self._period_s):
            wrong = find()
            if wrong is None or self._closed.is_set():
                continue
            if self._told.acquire(blocking=False):
                self._on_lost(wrong)
            return


def _key(rank: int) -> str:
    return f"alive/{rank}"


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().partition("\n")[0]
