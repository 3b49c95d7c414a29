"""Allocators of device slots: one for pages of a single token, one for longer pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

if TYPE_CHECKING:
    from sglang.srt.mem_cache.device.memory_pool import KVCache

__all__ = [
    "BaseTokenToKVPoolAllocator",
    "PagedTokenToKVPoolAllocator",
    "TokenToKVPoolAllocator",
    "make_allocator",
]


def make_allocator(kvcache: KVCache) -> BaseTokenToKVPoolAllocator:
    """The allocator that fits a pool's page size."""
    if kvcache.page_size == 1:
        return TokenToKVPoolAllocator(kvcache.size, kvcache.dtype, kvcache.device, kvcache)
    return PagedTokenToKVPoolAllocator(
        kvcache.size, kvcache.page_size, kvcache.dtype, kvcache.device, kvcache
    )
