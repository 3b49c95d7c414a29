"""Ends the server when a rank is gone, stuck or out of reach.

Each rank counts up in a key of the store through which the ranks met, and reads the others' counts.
A process that dies on this machine is noticed sooner, by its parent; the watch is for stopped
processes, other machines and networks. The store is in rank 0's process, and its calls wait for an
answer without a limit, so a second thread watches the duration of a look.
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
"""Seconds without progress after which a rank counts as lost."""
_LATE_S: Final = 2.0
"""Seconds of delay of a look that show that this rank was stopped itself, perhaps with the whole
machine."""


class Counts(Protocol):
    """The part of the store that the watch uses. Every call may raise RuntimeError, or never
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
        limit_s: Seconds without progress after which a rank counts as lost.
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
        """Number of looks that have ended."""
        self._num_guarded = (-1, 0)
        """`_num_looks` at the last call of `guard`, and the number of earlier calls in a row with
        the same value."""
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
        """Stop the watch before an orderly shutdown. Idempotent; does not wait for the threads."""
        self._closed.set()

    def guard(self) -> str | None:
        """Check, once a period, that looks end; return an error in one line, or None.

        It counts its own calls instead of seconds, since a stopped process makes no calls.
        """
        known, times = self._num_guarded
        times = times + 1 if known == self._num_looks else 0
        self._num_guarded = self._num_looks, times
        # A period may pass before the next look, and another one before the next guard.
        if times * self._period_s > self._limit_s - 2 * self._period_s:
            silent_s = times * self._period_s
            return f"rank 0 is stuck or out of reach: no answer from it for {silent_s:.0f} s"
        return None

    def look(self) -> str | None:
        """Count up, and read the others' counts; return an error in one line, or None."""
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
