"""L1 and L2 of a simulated server: which pages are there, and which leave next.

The order is the engine's: the least recently used pages leave first, those of waiting requests
last, pinned pages never; the last pages of a prompt leave before its first. Any hashable value may
stand for a page: its tokens and all before them.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeAlias

Page: TypeAlias = Hashable


class PageUses:
    """The last use of each page of a server, and the waiting requests that will use it.

    Attributes:
        now: Number of the last use.
    """

    def __init__(self) -> None:
        self.now = 0
        self._last: dict[Page, tuple[int, int]] = {}
        self._wanted: dict[Page, list[int]] = {}

    def use(self, pages: Sequence[Page]) -> None:
        """A prompt that begins with `pages` was matched, or entered the tree."""
        self.now += 1
        for place, page in enumerate(pages):
            self._last[page] = self.now, -place

    def last(self, page: Page) -> int:
        """Number of the last use of `page`."""
        return self._last[page][0]

    def want(self, pages: Iterable[Page], number: int) -> None:
        """The `number`-th request to arrive waits, and will use `pages`."""
        for page in pages:
            insort(self._wanted.setdefault(page, []), number)

    def unwant(self, pages: Iterable[Page], number: int) -> None:
        """Undo one `want`."""
        for page in pages:
            self._wanted[page].remove(number)
            if not self._wanted[page]:
                del self._wanted[page]

    def wanted_by(self, page: Page) -> int | None:
        """The first waiting request that will use `page`."""
        numbers = self._wanted.get(page)
        return numbers[0] if numbers else None

    def place(self, page: Page) -> tuple[int, int, int]:
        """Place of `page` in the order of eviction; the smallest leaves first."""
        number = self.wanted_by(page)
        last, place = self._last[page]
        return (0, last, place) if number is None else (1, -number, place)


class PageTier:
    """The pages of one tier.

    Attributes:
        size: Pages that it can hold.
        pages: Those that prompts can find. Read only.
        held: Number of pages of running requests, or of reads, that no prompt can find yet.
    """

    def __init__(self, size: int, uses: PageUses) -> None:
        self.size, self._uses = size, uses
        self.pages: set[Page] = set()
        self.held = 0
        self._pins: Counter[Page] = Counter()

    @property
    def free(self) -> int:
        return self.size - len(self.pages) - self.held

    @property
    def evictable(self) -> int:
        """Number of pages without a pin."""
        return len(self.pages) - len(self._pins)

    def pin(self, pages: Iterable[Page]) -> None:
        """Keep `pages`, which are here, until the matching `unpin`."""
        self._pins.update(pages)

    def unpin(self, pages: Iterable[Page]) -> None:
        for page in pages:
            self._pins[page] -= 1
            if not self._pins[page]:
                del self._pins[page]

    def make_room(
        self,
        count: int,
        *,
        spares: int | None = None,
        used_since: int | None = None,
    ) -> int:
        """Evict until `count` pages are free, or none may leave. Returns the number of free pages.

        Args:
            spares: Pages stay that a waiting request with a smaller number will use.
            used_since: Pages stay that were used then or later, as `PageUses.now` counts.
        """
        missing = count - self.free
        if missing > 0:
            unpinned = (page for page in self.pages if page not in self._pins)
            for page in sorted(unpinned, key=self._uses.place)[:missing]:
                number = self._uses.wanted_by(page)
                if number is not None and spares is not None and number < spares:
                    break
                if used_since is not None and self._uses.last(page) >= used_since:
                    break
                self.pages.remove(page)
        return self.free


def front(pages: Sequence[Page], *tiers: PageTier, begin: int = 0) -> int:
    """The end of the longest run of `pages` from `begin` on that `tiers` have between them."""
    there = [tier.pages for tier in tiers]
    for place in range(begin, len(pages)):
        page = pages[place]
        for one in there:
            if page in one:
                break
        else:
            return place
    return max(begin, len(pages))
