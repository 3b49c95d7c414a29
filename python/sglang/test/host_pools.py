"""Small host pools with known bytes, for tests of L2 and L3."""

from __future__ import annotations

import torch

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost

PAGE = 4
"""Tokens per page of the pools made here."""


def make_device_pool(
    num_pages: int = 16,
    *,
    page_size: int = PAGE,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 4,
    v_head_dim: int | None = None,
    seed: int = 0,
) -> MHATokenToKVPool:
    """A device pool on the CPU, 3 layers of 2 heads, filled with random bits (NaNs included)."""
    pool = MHATokenToKVPool(
        num_pages * page_size, page_size, dtype, 2, head_dim, 3, "cpu", v_head_dim=v_head_dim
    )
    generator = torch.Generator().manual_seed(seed)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        raw = buffer.view(-1).view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    return pool


def make_host_pool(
    device_pool: MHATokenToKVPool, layout: str, *, ratio: float = 2.0
) -> MHATokenToKVPoolHost:
    """A host pool for `device_pool` with `ratio` times its tokens."""
    return MHATokenToKVPoolHost(device_pool, ratio, 0, device_pool.page_size, layout)


def page_slots(pages: list[int], page_size: int = PAGE) -> torch.Tensor:
    """int64 token slots of whole pages."""
    starts = torch.tensor(pages, dtype=torch.int64)[:, None] * page_size
    return (starts + torch.arange(page_size)).reshape(-1)


def device_bytes(pool: MHATokenToKVPool, slots: torch.Tensor) -> bytes:
    """All layers' K and V bytes of `slots`: what a round trip must give back."""
    parts = [buffer[slots].contiguous() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    return b"".join(part.view(-1).view(torch.uint8).numpy().tobytes() for part in parts)


def copy_to_host(
    pool: MHATokenToKVPool, host: MHATokenToKVPoolHost, pages: list[int]
) -> torch.Tensor:
    """Back device pages up into newly allocated host pages; returns their slots."""
    slots = host.alloc(len(pages) * pool.page_size)
    assert slots is not None
    host.backup_from_device_all_layer(pool, slots, page_slots(pages, pool.page_size), "direct")
    return slots


def copy_to_device(
    host: MHATokenToKVPoolHost, pool: MHATokenToKVPool, slots: torch.Tensor, pages: list[int]
) -> None:
    """Load host slots into device pages, all layers."""
    for layer in range(pool.layer_num):
        host.load_to_device_per_layer(
            pool, slots, page_slots(pages, pool.page_size), layer, "direct"
        )
