"""The free list of a host pool: whole pages, handed out as token slots.

Called from the scheduler's thread only, so it has no lock. Costs are per page and vectorised.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.utils.parts import Parts, do_all, slices


class HostPageList:
    """Free pages of a pool of `page_num` pages of `page_size` tokens, as a stack."""

    def __init__(self, page_num: int, page_size: int) -> None:
        self.page_num = page_num
        self.page_size = page_size
        self._stack: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._owned: npt.NDArray[np.bool_] = np.empty(0, dtype=np.bool_)
        self._num_free = 0
        self.clear()

    def clear(self) -> None:
        """Free every page; the lowest are handed out first. Their bytes stay as they are."""
        self._stack = np.arange(self.page_num - 1, -1, -1, dtype=np.int64)
        self._owned = np.zeros(self.page_num, dtype=np.bool_)
        self._num_free = self.page_num

    def available_size(self) -> int:
        """Free tokens."""
        return self._num_free * self.page_size

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """int64 `[need_size]` on CPU: slots of whole pages, ascending inside each page.

        None if too few are free. Raises ValueError for a part of a page.
        """
        if need_size < 0 or need_size % self.page_size:
            raise ValueError(
                f"host pages are allocated whole: need_tokens={need_size} is no multiple of "
                f"page_size={self.page_size}"
            )
        count = need_size // self.page_size
        if count > self._num_free:
            return None
        first = self._num_free - count
        pages = self._stack[first : self._num_free][::-1]
        self._num_free = first
        self._owned[pages] = True
        return torch.from_numpy(
            (pages[:, None] * self.page_size + _offsets(self.page_size)).reshape(-1)
        )

    def free(self, indices: torch.Tensor) -> int:
        """Take whole pages back; returns how many tokens.

        Raises:
            ValueError: The slots are no whole pages of this pool.
            AssertionError: A page is free already, or named twice. Names the pages.
        """
        pages = whole_pages(indices, self.page_size, self.page_num)
        ascending = np.sort(pages)
        is_twice = ascending[1:] == ascending[:-1]
        if is_twice.any() or not self._owned[pages].all():
            named = ascending[1:][is_twice].tolist() or pages[~self._owned[pages]].tolist()
            raise AssertionError(f"double free of host pages {named[:16]}")
        self._owned[pages] = False
        self._stack[self._num_free : self._num_free + len(pages)] = pages[::-1]
        self._num_free += len(pages)
        return pages.size * self.page_size

    def free_page_ids(self) -> Sequence[torch.Tensor]:
        """int64 `[n]`: every free page, by number. For the self check."""
        return [torch.from_numpy(self._stack[: self._num_free])]

    def integrity_parts(self) -> Parts:
        """Assert that every page is either owned or free, once. O(pages), in parts."""
        is_free = np.zeros(self.page_num, dtype=np.bool_)
        for part in slices(self._num_free):
            free = self._stack[: self._num_free][part]
            assert not self._owned[free].any(), "a free host page is marked as owned"
            is_free[free] = True
            yield
        free_pages = owned = 0
        for part in slices(self.page_num):
            free_pages += int(np.count_nonzero(is_free[part]))
            owned += int(np.count_nonzero(self._owned[part]))
            yield
        assert free_pages == self._num_free, "a host page is in the free list twice"
        assert owned + self._num_free == self.page_num, (
            f"host pages leaked: {owned} owned + {self._num_free} free != {self.page_num}"
        )

    def check_integrity(self) -> None:
        """`integrity_parts`, all at once."""
        do_all(self.integrity_parts())


def whole_pages(indices: torch.Tensor, page_size: int, page_num: int) -> npt.NDArray[np.int64]:
    """Page numbers of `indices`, checked.

    Args:
        indices: int64 `[pages * page_size]` on CPU: consecutive slots of aligned pages.
        page_size: Tokens per page.
        page_num: Pages in the pool.

    Raises:
        ValueError: The slots are not whole, aligned pages inside the pool.
    """
    if indices.dtype != torch.int64 or not indices.is_cpu or indices.dim() != 1:
        raise ValueError(
            f"host_indices: need a 1-d int64 CPU tensor, got {indices.dtype} "
            f"{tuple(indices.shape)} on {indices.device}"
        )
    slots: npt.NDArray[np.int64] = indices.numpy()
    if page_size == 1:
        pages = slots.copy()  # The caller may change its slots.
    else:
        if slots.size % page_size:
            raise ValueError(
                f"host_indices: {slots.size} slots are no multiple of page_size={page_size}"
            )
        by_page = slots.reshape(-1, page_size)
        pages = by_page[:, 0] // page_size
        if (by_page != pages[:, None] * page_size + _offsets(page_size)).any():
            raise ValueError(f"host_indices: slots are not whole pages aligned to {page_size}")
    # Negative pages are large unsigned ones.
    if (pages.view(np.uint64) >= page_num).any():
        raise ValueError(
            f"host_indices: slots {slots.min()} to {slots.max()} leave the pool of "
            f"{page_num * page_size} slots"
        )
    return pages


@functools.cache
def _offsets(page_size: int) -> npt.NDArray[np.int64]:
    return np.arange(page_size, dtype=np.int64)
