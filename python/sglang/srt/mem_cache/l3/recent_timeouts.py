"""Remembers the pages whose transfer has just timed out, so that they are not tried again at once.

The breaker leaves a whole store alone. A store with one hanging node passes its probes, and each
further read of a page on that node would cost another timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from sglang.srt.mem_cache.tree.radix_key import PageHash

PERIOD_S: Final = 30.0
"""How long a page is left alone."""
_MAX_PAGES: Final = 65_536
"""A bound on memory, about 10 MB; beyond it the oldest are forgotten."""


class RecentTimeouts:
    """The timeouts of one kind of transfer. Only the thread that makes the transfers calls it.

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
