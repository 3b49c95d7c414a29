"""Diagnostics of long random tests: detection of hanging steps, and the engine's last log lines."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from types import FrameType


class StepHangs(AssertionError):
    """A step of the scheduler did not return."""


class Watchdog:
    """Raises StepHangs in the main thread if a step takes too long, with the stacks of all threads.

    Must be entered in the main thread. It cannot interrupt a step that hangs in C code and never
    returns to the interpreter.
    """

    def __enter__(self) -> Watchdog:
        self._before = signal.signal(signal.SIGALRM, self._on_alarm)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Limit the time of the block."""
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    @staticmethod
    def _on_alarm(_: int, frame: FrameType | None) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = [
            f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(at))}"
            for ident, at in sys._current_frames().items()
        ]
        raise StepHangs("a step hangs; the stacks of all threads:\n" + "\n".join(stacks))


class _LastLines(logging.Handler):
    """Keeps the engine's last log lines for the report of a failure; prints nothing."""

    def __init__(self, lines: deque[str]) -> None:
        super().__init__(logging.INFO)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{record.levelname} {record.threadName}: {record.getMessage()}"
        if record.exc_info and record.exc_info[1] is not None:
            line += f" ({record.exc_info[1]!r})"
        self._lines.append(line)


@contextlib.contextmanager
def log_kept(lines: deque[str]) -> Iterator[None]:
    """Put the engine's log into `lines` instead of printing it."""
    logger, handler = logging.getLogger("sglang"), _LastLines(lines)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
