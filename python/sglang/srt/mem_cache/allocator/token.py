"""Allocator for pages of one token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator, Lengths

if TYPE_CHECKING:
    from sglang.srt.mem_cache.device.memory_pool import KVCache


class TokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Hands out single slots: a page and a slot are the same."""

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kvcache: KVCache | None,
        need_sort: bool = True,
    ) -> None:
        """See `BaseTokenToKVPoolAllocator`."""
        super().__init__(size, 1, dtype, device, kvcache, need_sort)

    def _take_pages(self, count: int) -> torch.Tensor | None:
        slots = super()._take_pages(count)
        return None if slots is None else slots.clone()

    def alloc(self, need_size: int) -> torch.Tensor | None:
        return self._take_pages(need_size)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: Lengths,
        seq_lens: torch.Tensor,
        seq_lens_cpu: Lengths,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        return self._take_pages(extend_num_tokens)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: Lengths, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        return self._take_pages(len(seq_lens_cpu))
