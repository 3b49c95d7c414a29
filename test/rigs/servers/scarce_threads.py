"""A system that has no thread left for some names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from unittest import mock

NO_THREAD: Final = "can't start new thread"
"""The interpreter's error."""


@contextmanager
def no_threads(prefix: str, spared: int = 0) -> Iterator[None]:
    """Threads whose names begin with `prefix` cannot start in this block, after the first
    `spared`."""
    start = threading.Thread.start
    left = spared

    def refuse(thread: threading.Thread) -> None:
        nonlocal left
        if thread.name.startswith(prefix):
            if not left:
                raise RuntimeError(NO_THREAD)
            left -= 1
        start(thread)

    with mock.patch.object(threading.Thread, "start", refuse):
        yield
