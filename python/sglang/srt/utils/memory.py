"""Giving freed memory back to the operating system.

glibc keeps what large allocations leave behind: it takes freed pieces for the next ones, and gives
back no more than the top of its heap. A server that has seen one huge request would stay large.
"""

from __future__ import annotations

import asyncio
import ctypes
from typing import Final

QUIET_SECONDS: Final = 2.0
"""From the first large use to the return: others that come with it share one."""


def give_back() -> None:
    """Return freed memory now; nothing with another C library than glibc. Any thread: the
    interpreter lock is released meanwhile."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class MemoryReturner:
    """Returns freed memory in a thread, a while after it was used. Event loop thread only."""

    def __init__(self, quiet_seconds: float = QUIET_SECONDS) -> None:
        self._quiet_seconds = quiet_seconds
        self._is_due = False

    def give_back_soon(self) -> None:
        """Something large is used now, and freed soon."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(self._quiet_seconds, self._begin)

    def _begin(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, give_back)
