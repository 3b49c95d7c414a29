"""Leaves a failing store alone for a while (`CircuitBreaker`), or some pages (`RecentTimeouts`).

Source of the pattern of the breaker: Nygard, "Release It!" (2007).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from sglang.srt.mem_cache.tree.radix_key import PageHash
from sglang.srt.utils.metrics import Gauge

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0
PERIOD_S: Final = 30.0
"""Seconds for which a page whose transfer timed out is left alone."""
_MAX_PAGES: Final = 65_536
"""A bound on memory, about 10 MB; beyond it the oldest are forgotten."""


class CircuitBreaker:
    """Closed while the store works; open (calls refused) for a growing pause after a failure.

    When a pause is over, the thread of `run` probes the store; the breaker closes if the probe
    succeeds. A single failure opens it, since a call to a dead Mooncake master costs seconds. So
    does a probe, which is why no caller makes it.

    Threads: any. `run` has a thread of its own, and probes outside the lock.

    Args:
        probe: True if the store works again. May block; must not raise.
        opened: 1 while the breaker is open.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, probe: Callable[[], bool], opened: Gauge, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._probe = probe
        self._opened = opened
        self._clock = clock
        self._changed = threading.Condition()
        self._pause = _FIRST_PAUSE_S
        self._retry_at: float | None = None
        self._has_ended = False

    @property
    def is_open(self) -> bool:
        """True while calls are refused. Never blocks."""
        return self._retry_at is not None

    def trip(self) -> None:
        """Open after a failed call; an open breaker stays open for twice as long."""
        with self._changed:
            self._open()
            self._changed.notify_all()

    def reset(self) -> None:
        """Close after a successful call."""
        with self._changed:
            if self._retry_at is not None:
                self._close()

    def run(self) -> None:
        """Body of the thread that probes; returns after `end`."""
        while self._await_turn():
            works = self._probe()
            with self._changed:
                if works:
                    self._close()
                else:
                    self._open()

    def end(self) -> None:
        """Probe no more. Idempotent."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _await_turn(self) -> bool:
        """Wait until a pause is over; False: after `end`."""
        with self._changed:
            while not self._has_ended:
                left = None if self._retry_at is None else self._retry_at - self._clock()
                if left is not None and left <= 0:
                    return True
                self._changed.wait(left)
        return False

    def _open(self) -> None:
        if self._retry_at is not None:
            self._pause = min(self._pause * 2, _LONGEST_PAUSE_S)
        self._retry_at = self._clock() + self._pause
        self._opened.set(1)

    def _close(self) -> None:
        self._retry_at, self._pause = None, _FIRST_PAUSE_S
        self._opened.set(0)


class RecentTimeouts:
    """The pages whose transfers of one kind have just timed out, so that they are not tried again
    at once.

    A store with one hanging node passes the probes of the breaker, and each further read of a page
    on that node would cost another timeout. Only the thread that makes the transfers calls it.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[PageHash, float] = {}
        """Until when a page is left alone; the earliest first."""

    def add(self, pages: Iterable[PageHash]) -> None:
        """Note `pages` that did not land in a transfer that took too long."""
        until = self._clock() + PERIOD_S
        for page in pages:
            self._until.pop(page, None)
            self._until[page] = until
        while len(self._until) > _MAX_PAGES:
            del self._until[next(iter(self._until))]

    def leading_allowed(self, pages: Sequence[PageHash]) -> int:
        """The number of pages before the first that is left alone."""
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            del self._until[next(iter(self._until))]
        if not self._until:
            return len(pages)
        return next((i for i, page in enumerate(pages) if page in self._until), len(pages))
