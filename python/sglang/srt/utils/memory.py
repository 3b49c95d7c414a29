"""Returns freed memory to the operating system.

glibc reuses freed memory for later allocations and returns only the top of its heap. Without this
module a server would stay large after one huge request.
"""

from __future__ import annotations

import asyncio
import ctypes
from typing import Final

QUIET_SECONDS: Final = 2.0
"""Delay between the first large use and the return, so that simultaneous uses share one return."""


def trim_heap() -> None:
    """Return freed memory now. Does nothing without glibc. Any thread; releases the interpreter
    lock."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class HeapTrimmer:
    """Returns freed memory in a worker thread, some time after its use. Event loop thread only."""

    def __init__(self, quiet_seconds: float = QUIET_SECONDS) -> None:
        self._quiet_seconds = quiet_seconds
        self._is_due = False

    def trim_soon(self) -> None:
        """Return memory soon, because a large object exists now and will be freed."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(self._quiet_seconds, self._begin)

    def _begin(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, trim_heap)
