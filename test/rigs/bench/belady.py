"""The hits of an eviction policy that knows the future: Belady's choice among leaf pages.

The cache is closed under prefixes, as the radix tree is: a page can only be evicted while no page
that continues it is cached. The policy evicts the leaf whose next use is farthest away. A page is
used no later than the pages that continue it. The page with the farthest next use is thus always a
leaf, and the constraint to leaves costs no hit.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer" (1966). The
request in service holds all of its pages, as in the engine, so every page is cached at its use.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from rigs.bench.page_trace import PageTrace

_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Hits:
    """Pages that a replay found in the cache, and pages that it evicted."""

    hit_pages: int
    evicted_pages: int = 0


def unlimited_hits(trace: PageTrace) -> Hits:
    """Hits of a cache that never evicts."""
    seen: set[int] = set()
    hits = 0
    for request in trace.requests:
        hits += _leading(request.pages, request.usable, seen)
        seen.update(request.pages)
    return Hits(hits)


def belady_hits(trace: PageTrace, capacity_pages: int) -> Hits:
    """Hits of the clairvoyant cache of `capacity_pages`.

    O(page references x log pages).

    Raises:
        ValueError: A request does not fit.
    """
    if capacity_pages < trace.longest_pages:
        raise ValueError(
            f"capacity of {capacity_pages} pages: the longest request has {trace.longest_pages}"
        )
    cache = _ClairvoyantCache(trace, capacity_pages)
    hits = sum(cache.serve(index) for index in range(len(trace.requests)))
    return Hits(hits, cache.evicted_pages)


class _ClairvoyantCache:
    """The cached pages, each with its next use."""

    def __init__(self, trace: PageTrace, capacity_pages: int) -> None:
        self._trace = trace
        self._capacity = capacity_pages
        self._next_uses = _next_uses(trace)
        self._next_use: dict[int, int] = {}
        """Cached page to its next use."""
        self._children: dict[int, int] = {}
        """Page to the number of cached pages that continue it."""
        self._leaves: list[tuple[int, int]] = []
        """Heap of (-next use, page). Outdated entries are skipped."""
        self.evicted_pages = 0

    def serve(self, index: int) -> int:
        """Serve request `index`. Returns the pages that it found."""
        request = self._trace.requests[index]
        hits = _leading(request.pages, request.usable, self._next_use)
        in_service = set(request.pages)
        missing = [page for page in request.pages if page not in self._next_use]
        for _ in range(len(self._next_use) + len(missing) - self._capacity):
            self._evict(in_service)
        for page in missing:
            self._count_child(page, 1)
        for page, use in zip(request.pages, self._next_uses[index], strict=True):
            self._next_use[page] = use
        if request.pages:
            # Only the last page of a request can be a leaf.
            self._offer(request.pages[-1])
        return hits

    def _evict(self, in_service: set[int]) -> None:
        while True:
            negative_use, page = heapq.heappop(self._leaves)
            if (
                self._next_use.get(page) == -negative_use
                and not self._children.get(page)
                and page not in in_service
            ):
                break
        del self._next_use[page]
        self.evicted_pages += 1
        self._count_child(page, -1)
        parent = self._trace.parents[page]
        if parent >= 0:
            self._offer(parent)

    def _offer(self, page: int) -> None:
        if not self._children.get(page):
            heapq.heappush(self._leaves, (-self._next_use[page], page))

    def _count_child(self, page: int, change: int) -> None:
        parent = self._trace.parents[page]
        if parent >= 0:
            self._children[parent] = self._children.get(parent, 0) + change


def _next_uses(trace: PageTrace) -> list[list[int]]:
    """For each page of each request, the next request that could hit the page."""
    upcoming: dict[int, int] = {}
    uses: list[list[int]] = []
    for index in range(len(trace.requests) - 1, -1, -1):
        request = trace.requests[index]
        uses.append([upcoming.get(page, _NEVER) for page in request.pages])
        for page in request.pages[: request.usable]:
            upcoming[page] = index
    uses.reverse()
    return uses


def _leading(pages: Sequence[int], usable: int, held: set[int] | dict[int, int]) -> int:
    for count, page in enumerate(pages[:usable]):
        if page not in held:
            return count
    return min(usable, len(pages))
