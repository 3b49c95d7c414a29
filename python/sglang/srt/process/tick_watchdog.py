"""Ends a scheduler process whose tick hangs."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


def end_hung_process() -> None:
    """Write the stacks of all threads to stderr and exit: a hung tick cannot be unwound."""
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    logging.shutdown()
    os._exit(70)


class TickWatchdog:
    """Ends the process if the scheduler's tick under way takes too long: a forward or a copy hangs,
    or another rank does not take part in what all ranks do.

    Owns one daemon thread, `tick-watchdog`. `guard` is for one thread, the scheduler's.

    Args:
        timeout: Seconds that one tick may take.
        on_hang: Called once from the watchdog's thread.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        timeout: float,
        on_hang: Callable[[], None] = end_hung_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout = timeout
        self._on_hang = on_hang
        self._clock = clock
        self._begin: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tick-watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def guard(self) -> Iterator[None]:
        self._begin = self._clock()
        try:
            yield
        finally:
            self._begin = None

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._timeout / 4)):
            begin = self._begin
            if begin is not None and self._clock() - begin > self._timeout:
                logger.critical(
                    "a tick of the scheduler has taken more than --watchdog-timeout %.0f s: "
                    "ending the process",
                    self._timeout,
                )
                self._on_hang()
                return
