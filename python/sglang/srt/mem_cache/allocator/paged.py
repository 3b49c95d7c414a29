"""Allocator for pages of several tokens."""

from __future__ import annotations

import torch

from sglang.srt.hardware_backend.device_runtime import device_runtime, on_device
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
        offsets = torch.arange(self.page_size, dtype=torch.int64, device=self.device)
        return (pages[:, None] * self.page_size + offsets).reshape(-1)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: Lengths,
        seq_lens: torch.Tensor,
        seq_lens_cpu: Lengths,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        page = self.page_size
        pages_held = (torch.as_tensor(prefix_lens_cpu, dtype=torch.int64) + page - 1) // page
        pages_needed = (torch.as_tensor(seq_lens_cpu, dtype=torch.int64) + page - 1) // page
        pages_new = pages_needed - pages_held
        pages = self._take_pages(int(pages_new.sum()))
        if pages is None:
            return None
        stage_to_device = device_runtime(self.device).stage_to_device
        # The place in `pages` of each request's first new page.
        first_new = stage_to_device(pages_new.cumsum(0) - pages_new)
        counts = seq_lens - prefix_lens
        owner = torch.repeat_interleave(counts, output_size=extend_num_tokens)
        token = torch.arange(extend_num_tokens, dtype=torch.int64, device=self.device)
        nth = token - (counts.cumsum(0) - counts)[owner]
        position = prefix_lens[owner] + nth
        page_of_request = position // page - stage_to_device(pages_held)[owner]
        in_old_page = last_loc[owner] + 1 + nth
        if len(pages) == 0:
            return in_old_page
        place = (first_new[owner] + page_of_request).clamp_(0, len(pages) - 1)
        in_new_page = pages[place] * page + position % page
        return torch.where(page_of_request < 0, in_old_page, in_new_page)

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
            slots.index_copy_(0, on_device(openers, self.device), pages * self.page_size)
        return slots
