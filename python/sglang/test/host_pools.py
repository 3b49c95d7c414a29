"""Small host pools with known bytes, for tests of L2 and L3."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolName,
    PoolTransfer,
)
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
    device_pool: MHATokenToKVPool,
    layout: str,
    *,
    ratio: float = 2.0,
    allocator_type: str = "default",
) -> MHATokenToKVPoolHost:
    """A host pool for `device_pool` with `ratio` times its tokens."""
    return MHATokenToKVPoolHost(
        device_pool, ratio, 0, device_pool.page_size, layout, allocator_type=allocator_type
    )


def page_slots(pages: list[int], page_size: int = PAGE) -> torch.Tensor:
    """int64 token slots of whole pages."""
    starts = torch.tensor(pages, dtype=torch.int64)[:, None] * page_size
    return (starts + torch.arange(page_size)).reshape(-1)


def device_bytes(pool: MHATokenToKVPool, slots: torch.Tensor) -> bytes:
    """The K and V bytes of `slots` in all layers, which a round trip must restore."""
    parts = [buffer[slots].contiguous() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    return b"".join(part.view(-1).view(torch.uint8).numpy().tobytes() for part in parts)


def copy_to_host(
    pool: MHATokenToKVPool, host: MHATokenToKVPoolHost, pages: list[int]
) -> torch.Tensor:
    """Back up device pages to newly allocated host pages, and return their slots."""
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


def storage_config(
    namespace: str = "ns", *, tp_rank: int = 0, tp_size: int = 1, **extra: Any
) -> HiCacheStorageConfig:
    """A storage config of one engine; `extra` is its extra config."""
    mark_device_set(detect_device())
    return HiCacheStorageConfig(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=None,
        extra_config=dict(extra),
        namespace=namespace,
    )


def page_keys(count: int, namespace: str = "ns") -> list[str]:
    """Keys of `count` pages, as the cache controller passes them to a backend."""
    return [f"{namespace}/{index:064x}" for index in range(count)]


def round_trip(
    storage: HiCacheStorage,
    layout: str,
    keys: list[str],
    pages: list[int],
    *,
    allocator_type: str = "default",
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Copy device to host to `storage` to host to another device pool; assert equal bytes.

    The bytes depend only on the pages. So a page written from one layout can be read into another
    of the same byte order; existing pages are not written again.
    """
    device = make_device_pool(dtype=dtype)
    writer = make_host_pool(device, layout, allocator_type=allocator_type)
    writer.alloc(PAGE)
    slots = copy_to_host(device, writer, pages)
    storage.register_mem_host_pool_v2(writer, PoolName.KV)
    written = storage.batch_set_v2([PoolTransfer(PoolName.KV, host_indices=slots, keys=keys)])
    assert all(written[PoolName.KV]), written
    assert storage.batch_exists_v2(keys).kv_hit_pages == len(keys)

    other = make_device_pool(dtype=dtype, seed=1)
    reader = make_host_pool(other, layout, allocator_type=allocator_type)
    target = reader.alloc(len(slots))
    assert target is not None
    storage.register_mem_host_pool_v2(reader, PoolName.KV)
    got = storage.batch_get_v2([PoolTransfer(PoolName.KV, host_indices=target, keys=keys)])
    assert all(got[PoolName.KV]), got
    copy_to_device(reader, other, target, pages)
    wanted = page_slots(pages)
    assert device_bytes(other, wanted) == device_bytes(device, wanted)
