"""A clock for upper bounds of time: while the machine stands still, it does too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Self

LONGEST_STEP_S: Final = 0.5
"""Seconds of a pause that count: threads of a busy machine run as late as that."""
_LOOK_S: Final = 0.05


class RunningClock:
    """Context manager: the seconds since its begin, without pauses of this process.

    A call is late because the program is slow, or because the machine stood still for seconds, as
    virtual machines do. A test of the first must not fail for the second.

    Args:
        clock: Seconds, which go on while the machine stands still.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._looked = clock()
        self._seconds = 0.0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="running-clock", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def __call__(self) -> float:
        with self._lock:
            now = self._clock()
            self._seconds += min(now - self._looked, LONGEST_STEP_S)
            self._looked = now
            return self._seconds

    def _run(self) -> None:
        while not self._ends.wait(_LOOK_S):
            self()
