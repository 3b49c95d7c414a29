"""Ends the server when a rank is gone, stuck or unreachable.

Each rank increments a heartbeat in the store of the rendezvous, and reads the other ranks'. A rank
that is going to be silent announces it there. The
parent notices sooner if a process on this machine dies; the watch is for stopped processes, other
machines and networks. The store is in rank 0's process, and its calls have no timeout, so a second
thread watches how long a check takes.
"""

from __future__ import annotations

import contextlib
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
"""Delay of a check, in seconds, that shows that this rank itself was stopped, perhaps with the
whole machine."""


class HeartbeatStore(Protocol):
    """The part of the store that the watch uses. Every call may raise RuntimeError, or never
    return."""

    def set(self, key: str, value: str, /) -> object: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...


class RankWatch:
    """Watches the ranks of a server. Owns two daemon threads: `rank-watch` checks heartbeats, and
    `rank-watch-guard` notices a check that does not end.

    Args:
        store: A connection to the store, only for this watch.
        on_lost: Called once, by one of the threads, with one line that names the rank.
        limit_s: Seconds without progress after which a rank counts as lost.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        store: HeartbeatStore,
        rank: int,
        size: int,
        on_lost: Callable[[str], None],
        *,
        limit_s: float = LIMIT_S,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._rank = rank
        self._on_lost = on_lost
        self._limit_s = limit_s
        self._period_s = period_s
        self._clock = clock
        self._heartbeat = 0
        self._silent_until = 0.0
        """Time of `clock` until which this rank may be silent."""
        self._beating = threading.Lock()
        """Held while the heartbeat changes."""
        self._last_check = clock()
        self._seen = {other: (b"", self._last_check) for other in range(size) if other != rank}
        self._num_checks = 0
        self._num_guarded = (-1, 0)
        """`_num_checks` at the last call of `guard`, and the number of consecutive earlier calls
        with the same value."""
        self._closed = threading.Event()
        self._reported = threading.Lock()
        self._threads = (
            threading.Thread(target=self._run, args=(self.check,), name="rank-watch", daemon=True),
            threading.Thread(
                target=self._run, args=(self.guard,), name="rank-watch-guard", daemon=True
            ),
        )
        for thread in self._threads:
            thread.start()

    def announce(self, seconds: float) -> None:
        """Tell the other ranks that this one may be silent for `seconds` from now on: a call holds
        the interpreter's lock, for example. 0: it is heard again. Any thread."""
        self._silent_until = self._clock() + seconds
        with contextlib.suppress(RuntimeError):  # The next check reports the store.
            self._beat()

    def _beat(self) -> None:
        with self._beating:
            self._heartbeat += 1
            left = max(0.0, self._silent_until - self._clock())
            self._store.set(_key(self._rank), f"{self._heartbeat} {left:.0f}")

    def close(self) -> None:
        """Stop the watch before an orderly shutdown. Idempotent; does not wait for the threads."""
        self._closed.set()

    def guard(self) -> str | None:
        """Verify, once a period, that checks end. Returns an error in one line, or None.

        It counts its own calls instead of seconds, because a stopped process makes no calls.
        """
        known, times = self._num_guarded
        times = times + 1 if known == self._num_checks else 0
        self._num_guarded = self._num_checks, times
        # A period may pass before the next check, and another one before the next call.
        if times * self._period_s > self._limit_s - 2 * self._period_s:
            silent_s = times * self._period_s
            return f"rank 0 is stuck or out of reach: no answer from it for {silent_s:.0f} s"
        return None

    def check(self) -> str | None:
        """Increment this rank's heartbeat, and check the others. Returns an error in one line, or
        None."""
        try:
            self._beat()
            heartbeats = {other: self._heartbeat_of(other) for other in self._seen}
        except RuntimeError as error:
            return f"rank 0 is gone or out of reach: {_first_line(error)}"
        self._num_checks += 1
        now = self._clock()
        was_late = now - self._last_check > self._period_s + _LATE_S
        self._last_check = now
        for other, count in heartbeats.items():
            known, since = self._seen[other]
            if count != known or was_late:
                self._seen[other] = count, now
            elif now - since > (limit_s := max(self._limit_s, _announced(count))):
                return f"rank {other} has given no sign of life for {limit_s:.0f} s"
        return None

    def _heartbeat_of(self, rank: int) -> bytes:
        key = _key(rank)
        return self._store.get(key) if self._store.check([key]) else b""

    def _run(self, find: Callable[[], str | None]) -> None:
        while not self._closed.wait(self._period_s):
            wrong = find()
            if wrong is None or self._closed.is_set():
                continue
            if self._reported.acquire(blocking=False):
                self._on_lost(wrong)
            return


def _key(rank: int) -> str:
    return f"alive/{rank}"


def _announced(heartbeat: bytes) -> float:
    """Seconds for which the rank of a heartbeat said that it may be silent."""
    _, _, seconds = heartbeat.partition(b" ")
    return float(seconds or 0)


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().partition("\n")[0]
