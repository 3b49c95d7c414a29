"""Owners of the pages of one pool, for the self check."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.utils.parts import MOST_ITEMS, NODE_ITEMS, Parts, slices

_Pages = npt.NDArray[np.int64]


class OwnershipAudit:
    """Counts the owners of each page of one pool; O(pages), in parts.

    Args:
        size: Capacity in tokens, without a padding page.
        page_size: Tokens of a page.
        first_page: Number of padding pages before the first page that may be owned.
    """

    def __init__(self, tier: str, size: int, page_size: int, first_page: int = 0) -> None:
        self._tier = tier
        self._page_size = page_size
        self._first = first_page
        self._is_owned = np.zeros(size // page_size, dtype=np.bool_)
        self._num_owned = 0
        self._owned: list[tuple[object, torch.Tensor, int]] = []
        """Owners, their slots or page numbers, and how many of these numbers a page has."""
        self._waiting: list[torch.Tensor] = []
        """Numbers that are counted together, since numpy's calls cost more than a short array."""
        self._num_waiting = 0
        self._unit = page_size
        """How many of the numbers that wait a page has."""
        self._last = -1
        """Page before the numbers that wait, if they continue those of the same owner; else -1."""

    def own(self, owner: object, slots: torch.Tensor | None) -> Parts:
        """Count `owner` for the pages of `slots` (int64 token slots, any number of them per
        page)."""
        return self._own(owner, slots, self._page_size)

    def own_pages(self, owner: object, pages: torch.Tensor) -> Parts:
        """Count `owner` for `pages` (int64 page numbers, padding pages included)."""
        return self._own(owner, pages, 1)

    def _own(self, owner: object, numbers: torch.Tensor | None, unit: int) -> Parts:
        if numbers is None or not len(numbers):
            return
        if unit != self._unit:
            self._count()
            self._unit = unit
        self._owned.append((owner, numbers, unit))
        for part in torch.split(numbers, MOST_ITEMS):
            self._waiting.append(part)
            self._num_waiting += len(part) + NODE_ITEMS // 8
            if self._num_waiting >= MOST_ITEMS:
                last = self._count()
                yield
                self._last = last
        self._last = -1

    def _count(self) -> int:
        """Count the numbers that wait. Returns the page of the last one."""
        waiting, self._waiting, self._num_waiting = self._waiting, [], 0
        if not waiting:
            return -1
        numbers = torch.cat(waiting) if len(waiting) > 1 else waiting[0]
        pages: _Pages = numbers.cpu().numpy() // self._unit
        is_first = np.empty(len(pages), dtype=np.bool_)
        np.not_equal(pages[1:], pages[:-1], out=is_first[1:])
        # Two owners that follow each other may have the same page.
        is_first[list(itertools.accumulate(map(len, waiting[:-1])))] = True
        is_first[0] = pages[0] != self._last
        last, self._last = int(pages[-1]), -1
        named = pages[is_first] - self._first
        if len(named):
            assert named.min() >= 0 and named.max() < len(self._is_owned), (
                f"{self._tier}: pages outside the pool are owned, from {named.min() + self._first} "
                f"to {named.max() + self._first}"
            )
            is_twice = self._is_owned[named]
            assert not is_twice.any(), self._accuse(int(named[is_twice][0]) + self._first)
            self._is_owned[named] = True
            self._num_owned += len(named)
        return last

    def check(self) -> Parts:
        """Assert that each page has one owner.

        Raises:
            AssertionError: Names a page without an owner, with two, or outside the pool; as the
                other methods.
        """
        self._count()
        known = 0
        for part in slices(len(self._is_owned)):
            known += int(np.count_nonzero(self._is_owned[part]))
            yield
        if known < self._num_owned:
            named = [_pages(numbers, unit) for _, numbers, unit in self._owned]
            pages, times = np.unique(np.concatenate(named), return_counts=True)
            raise AssertionError(self._accuse(int(pages[times > 1][0])))
        total = len(self._is_owned)
        assert known == total, (
            f"{self._tier}: {total - known} of {total} pages have no owner, the first is "
            f"{int(np.argmin(self._is_owned)) + self._first}"
        )

    def _accuse(self, page: int) -> str:
        owners = [
            str(owner)
            for owner, numbers, unit in self._owned
            for _ in range(int((_pages(numbers, unit) == page).sum()))
        ]
        return f"{self._tier}: page {page} is owned by {' and by '.join(owners)}"


def _pages(numbers: torch.Tensor, unit: int) -> _Pages:
    """Page of each number, runs of the same page once."""
    pages: _Pages = numbers.cpu().numpy() // unit
    return pages[np.flatnonzero(np.diff(pages, prepend=-1))]
