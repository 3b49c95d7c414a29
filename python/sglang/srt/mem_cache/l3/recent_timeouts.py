"""Pages whose transfer has just timed out, so that they are not asked for again at once.

The breaker leaves a whole store alone. A store of which one node hangs passes its probes, and
each further read of a page on that node would cost another timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from sglang.srt.mem_cache.tree.radix_key import PageHash

PERIOD_S: Final = 30.0
"""How long a page is left alone."""
_MAX_PAGES: Final = 65_536
"""The oldest are forgotten beyond that: a bound on memory, about 10 MB."""


class RecentTimeouts:
    """Of one kind of transfer. Called by the thread that makes them, and by no other.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[PageHash, float] = {}
        """In order of time."""

    def add(self, pages: Iterable[PageHash]) -> None:
        """A transfer of `pages` has taken too long, and they did not land."""
        until = self._clock() + PERIOD_S
        for page in pages:
            self._until.pop(page, None)
            self._until[page] = until
        while len(self._until) > _MAX_PAGES:
            del self._until[next(iter(self._until))]

    def leading_allowed(self, pages: Sequence[PageHash]) -> int:
        """How many pages there are before the first that is to be left alone."""
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            del self._until[next(iter(self._until))]
        if not self._until:
            return len(pages)
        return next((i for i, page in enumerate(pages) if page in self._until), len(pages))
