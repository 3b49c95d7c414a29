"""Small host pools with known bytes, for tests of L2 and L3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch

from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.mem_cache.device.base_device_pool import PagedDevicePool
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.device.state_pool import StatePool
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost

PAGE = 4
"""Tokens per page of the pools made here."""

AnyDevicePool = PagedDevicePool | StatePool
"""Pools of token slots, and of states of whole prefixes, whose pages have one slot each."""


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
    fill_with_random_bits(pool, seed)
    return pool


def buffers_of(pool: AnyDevicePool) -> list[torch.Tensor]:
    """All layers of the first buffer, then of the next, each contiguous `[slots, ...]`."""
    return list(chain(*(pool.buffers if isinstance(pool, StatePool) else pool.parts)))


def fill_with_random_bits(pool: AnyDevicePool, seed: int) -> None:
    """Fill every slot of every buffer, the padding page included."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers_of(pool):
        raw = buffer.view(-1).view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))


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


def device_bytes(pool: AnyDevicePool, slots: torch.Tensor) -> bytes:
    """The bytes of `slots` in all buffers, which a round trip must restore."""
    parts = [buffer[slots].cpu().contiguous() for buffer in buffers_of(pool)]
    return b"".join(part.view(-1).view(torch.uint8).numpy().tobytes() for part in parts)


def copy_to_host(pool: AnyDevicePool, host: HostKVCache, pages: list[int]) -> torch.Tensor:
    """Back up device pages to newly allocated host pages, and return their slots."""
    slots = host.alloc(len(pages) * pool.page_size)
    assert slots is not None
    host.backup_from_device_all_layer(pool, slots, page_slots(pages, pool.page_size), "direct")
    return slots


def copy_to_device(
    host: HostKVCache, pool: AnyDevicePool, slots: torch.Tensor, pages: list[int]
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


@dataclass(frozen=True)
class PoolKind:
    """A kind of state and its pools, for `round_trip`."""

    name: PoolName
    make_device_pool: Callable[[int], AnyDevicePool]
    """Random bits by a seed."""
    host_pool_class: type[HostKVCache]


def keys_and_values(dtype: torch.dtype) -> PoolKind:
    """Keys and values per head, of `dtype`."""
    return PoolKind(
        PoolName.KV, lambda seed: make_device_pool(dtype=dtype, seed=seed), MHATokenToKVPoolHost
    )


KEYS_AND_VALUES: Final = keys_and_values(torch.bfloat16)


def round_trip(
    storage: HiCacheStorage,
    layout: str,
    keys: list[str],
    pages: list[int],
    *,
    allocator_type: str = "default",
    kind: PoolKind = KEYS_AND_VALUES,
) -> None:
    """Copy device to host to `storage` to other pages of the host and of another device pool;
    assert equal bytes, and that no other page of that pool changes.

    The bytes depend only on the pages. A page written from one layout can be read into another of
    the same byte order. Existing pages are not written again.
    """
    name = kind.name

    def make_host(device: AnyDevicePool) -> HostKVCache:
        host = kind.host_pool_class.make(
            device, page_num=32, layout=layout, allocator_type=allocator_type
        )
        storage.register_mem_host_pool_v2(host, name)
        return host

    device, other = (kind.make_device_pool(seed) for seed in (0, 1))
    writer = make_host(device)
    page = device.page_size
    writer.alloc(page)
    slots = copy_to_host(device, writer, pages)
    written = storage.batch_set_v2([PoolTransfer(name, host_indices=slots, keys=keys)])
    assert all(written[name]), written
    if name is PoolName.KV:
        assert storage.batch_exists_v2(keys).kv_hit_pages == len(keys)

    reader = make_host(other)
    target = reader.alloc(len(slots))
    assert target is not None
    got = storage.batch_get_v2([PoolTransfer(name, host_indices=target, keys=keys)])
    assert all(got[name]), got
    into = [one + 1 for one in pages]
    others = page_slots([one for one in range(other.size // page + 1) if one not in into], page)
    untouched = device_bytes(other, others)
    copy_to_device(reader, other, target, into)
    wanted = device_bytes(device, page_slots(pages, page))
    assert device_bytes(other, page_slots(into, page)) == wanted
    assert device_bytes(other, others) == untouched
