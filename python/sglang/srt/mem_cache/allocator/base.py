"""The free list of a device pool, in pages.

A page is handed out whole and comes back whole. It is listed by its first slot. The list is sorted
while nobody waits (`sort_free`), so that a request's slots are contiguous where they can be and
attention may read them through a view. All indices are int64 on the pool's device. Called from the
scheduler thread only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.device.memory_pool import KVCache

Lengths: TypeAlias = torch.Tensor | Sequence[int]
"""Lengths in tokens, one for each request, on the CPU."""


class BaseTokenToKVPoolAllocator(ABC):
    """The free list. Page 0 is the padding page and never handed out."""

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kvcache: KVCache | None,
        need_sort: bool = True,
    ) -> None:
        """
        Args:
            size: Token slots to hand out; whole pages.
            page_size: Tokens per page.
            kvcache: The pool that has the slots. Tests of the free list alone pass None.
            need_sort: If true, `sort_free` sorts the pages.

        Raises:
            ValueError: `size` is not a positive number of whole pages.
        """
        if page_size < 1 or size < page_size or size % page_size:
            raise ValueError(f"size={size} must be one or more whole pages of {page_size} tokens")
        self.size = size
        self.page_size = page_size
        self.num_pages = size // page_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.need_sort = need_sort
        self._kvcache = kvcache
        self._grouped: list[torch.Tensor] | None = None
        self.clear()

    def size_full(self) -> int:
        """Token slots in all, free or not."""
        return self.size

    def available_size(self) -> int:
        """Token slots that can be allocated now."""
        return self._num_free * self.page_size

    def get_kvcache(self) -> KVCache:
        """The pool whose slots this hands out."""
        assert self._kvcache is not None, "made without a pool"
        return self._kvcache

    def clear(self) -> None:
        """Free every page."""
        pages = torch.arange(1, self.num_pages + 1, dtype=torch.int64, device=self.device)
        self._free = pages * self.page_size
        self._released: list[torch.Tensor] = []
        """Pages that came back and are not in `_free` yet."""
        self.is_sorted = True
        """False: `sort_free` has something to sort."""
        self._num_free = self.num_pages
        self._is_free: torch.Tensor | None = None
        """By page; None: a device's list is checked when it is sorted. A check of each page that
        comes back would be four launches, and an eviction has many."""
        if self._free.is_cpu:
            self._is_free = torch.ones(self.num_pages + 1, dtype=torch.bool)
            self._is_free[0] = False
        self._grouped = None

    def warm_up(self) -> None:
        """Hand out a page and take it back, so that a GPU has loaded the kernels for it before the
        first request: the first eviction of a server waited 0.14 s. Everything must be free."""
        assert self._num_free == self.num_pages, "pages are in use"
        slots = self.alloc(self.page_size)
        assert slots is not None
        self.free_in_order(slots)
        self.merge_and_sort_free()

    def free_group_begin(self) -> None:
        """Collect what is freed until `free_group_end`; a page freed in parts counts once."""
        assert self._grouped is None, "free groups do not nest"
        self._grouped = []

    def free_group_end(self) -> None:
        """Free what was collected."""
        grouped, self._grouped = self._grouped, None
        assert grouped is not None, "no free group was begun"
        if grouped:
            self.free(torch.cat(grouped))

    def _merge(self) -> None:
        """Put returned pages behind the others of the free list."""
        if self._released:
            self._free = torch.cat([self._free, *self._released])
            self._released, self.is_sorted = [], False

    def sort_free(self) -> None:
        """Sort the free list, if pages were put behind the others: six launches on a device, so
        call it when no step waits to be launched."""
        if self.need_sort and not self.is_sorted and self._free.numel():
            self._free, self.is_sorted = self._free.sort().values, True
            if self._is_free is None:  # This check does not wait for the device.
                torch._assert_async((self._free[1:] > self._free[:-1]).all())

    def merge_and_sort_free(self) -> None:
        """Merge returned pages into the free list, in ascending order."""
        self._merge()
        self.sort_free()

    def free_page_ids(self) -> Sequence[torch.Tensor]:
        """int64: numbers of the free pages (slot // page_size), in any number of tensors. For the
        self check."""
        return [first // self.page_size for first in (self._free, *self._released)]

    @abstractmethod
    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Allocate `need_size` slots, int64, in whole pages; None if too few are free."""

    @abstractmethod
    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: Lengths,
        seq_lens: torch.Tensor,
        seq_lens_cpu: Lengths,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        """Allocate slots for the tokens `[prefix_lens, seq_lens)` of each request.

        Args:
            prefix_lens: int64 `[bs]` on the device: tokens that have slots.
            prefix_lens_cpu: The same on the CPU.
            seq_lens: int64 `[bs]` on the device: tokens that have slots afterwards.
            seq_lens_cpu: The same on the CPU.
            last_loc: int64 `[bs]` on the device: slot of the last token with a slot; any number if
                there is none.
            extend_num_tokens: `sum(seq_lens - prefix_lens)`.

        Returns:
            int64 `[extend_num_tokens]`, request after request. If too few pages are free: None, and
            nothing has changed.
        """

    @abstractmethod
    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: Lengths, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Allocate a slot for the last of each request's `seq_lens` tokens; the others have theirs.

        Returns:
            int64 `[bs]`. If too few pages are free: None, and nothing has changed.
        """

    def free(self, free_index: torch.Tensor) -> None:
        """Take back the pages that the slots `free_index` (int64 `[n]`) lie in."""
        if free_index.numel() == 0:
            return
        if self._grouped is not None:
            self._grouped.append(free_index)
        else:
            self._give_pages(torch.unique(free_index // self.page_size) * self.page_size)

    def free_in_order(self, slots: torch.Tensor) -> None:
        """Take back the pages of `slots` (int64 `[n]`), which are as one request or node has
        them: page after page, each from its first slot on, only the last perhaps in part.

        Does not wait for the device.
        """
        if slots.numel() == 0:
            return
        if self._grouped is not None:
            self._grouped.append(slots)
        else:
            # One slot a page, instead of sorting them all: that would wait for the device.
            self._give_pages(slots[:: self.page_size])

    def _take_pages(self, count: int) -> torch.Tensor | None:
        """Take the first `count` free pages; None if fewer are free. A view of their first slots,
        which keeps the whole list alive: the caller keeps none."""
        if count > self._num_free:
            return None
        if count > self._free.numel():
            self._merge()
        self._num_free -= count
        first, self._free = self._free[:count], self._free[count:]
        if self._is_free is not None:
            self._is_free[first // self.page_size] = False
        return first

    def _give_pages(self, first_slots: torch.Tensor) -> None:
        """Take back distinct pages, by their first slots, which nobody changes any more."""
        if self._is_free is not None:
            pages = first_slots // self.page_size
            freed_twice = self._is_free[pages]
            assert not bool(freed_twice.any()), f"pages freed twice: {pages[freed_twice].tolist()}"
            self._is_free[pages] = True
        self._released.append(first_slots)
        self._num_free += first_slots.numel()
