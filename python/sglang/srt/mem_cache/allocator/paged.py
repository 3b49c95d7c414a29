"""Allocator for pages of several tokens."""

from __future__ import annotations

import functools

import numpy as np
import torch

from sglang.srt.hardware_backend.device_runtime import on_device
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator, Lengths


class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Hands out whole pages; a request fills its last page before it takes another.

    A page holds tokens of one request, in order, from its first slot on: the slot of position p
    is `page * page_size + p % page_size`.
    """

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Allocate `need_size` slots, a multiple of the page size."""
        assert need_size % self.page_size == 0, f"{need_size} is not whole pages"
        pages = self._take_pages(need_size // self.page_size)
        if pages is None:
            return None
        return (pages[:, None] + self._offsets).reshape(-1)

    @functools.cached_property
    def _offsets(self) -> torch.Tensor:
        """int64 `[page_size]`: slots of a page, counted from its first."""
        return torch.arange(self.page_size, dtype=torch.int64, device=self.device)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: Lengths,
        seq_lens: torch.Tensor,
        seq_lens_cpu: Lengths,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        # Lengths are known on the CPU, so one upload replaces a dozen launches.
        page = self.page_size
        prefix, end = (np.asarray(lens, dtype=np.int64) for lens in (prefix_lens_cpu, seq_lens_cpu))
        held = -(-prefix // page)
        num_new = -(-end // page) - held
        pages = self._take_pages(int(num_new.sum()))
        if pages is None:
            return None
        counts = end - prefix
        owner = np.repeat(np.arange(len(counts)), counts)
        nth = np.arange(extend_num_tokens) - np.repeat(counts.cumsum() - counts, counts)
        if len(pages) == 0:
            owners, steps = on_device(np.stack((owner, nth + 1)), self.device).unbind()
            return last_loc.index_select(0, owners) + steps
        position = prefix[owner] + nth
        new_page = position // page - held[owner]
        is_old = new_page < 0
        # Index of each token's page in `pages`, which requests share out in their order.
        place = np.where(is_old, 0, (num_new.cumsum() - num_new)[owner] + new_page)
        offset = np.where(is_old, nth + 1, position % page)
        plan = np.stack((is_old, owner, place, offset))
        old, owners, places, offsets = on_device(plan, self.device).unbind()
        begins = pages.index_select(0, places)
        return torch.where(old > 0, last_loc.index_select(0, owners), begins) + offsets

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: Lengths, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        first_of_page = 1 % self.page_size
        openers = [
            i for i, n in enumerate(seq_lens_cpu) if int(n) % self.page_size == first_of_page
        ]
        slots = last_loc + 1
        if openers:
            pages = self._take_pages(len(openers))
            if pages is None:
                return None
            slots.index_copy_(0, on_device(openers, self.device), pages)
        return slots
