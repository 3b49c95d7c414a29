"""Faults of host memory, planted in the pages of L2."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

from sglang.srt.mem_cache.device.state_spec import PoolHitPolicy
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.tree.radix_key import RadixKey


def pool_of(cache: HiRadixCache, name: str = "kv") -> HostKVCache:
    """The host pool of this kind of state."""
    return cache.cache_controller.mem_pool_host.get_pool(name)


def host_pages(cache: HiRadixCache, ids: Sequence[int]) -> list[int]:
    """Pages of L2 that a prompt has there, in their order."""
    nodes = [node for node in cache.tree.walk(RadixKey(list(ids))) if node.backuped]
    slots = [slot for node in nodes for slot in node.host_value.tolist()]  # type: ignore[union-attr]
    return [slot // cache.page_size for slot in slots[:: cache.page_size]]


def host_state(cache: HiRadixCache, ids: Sequence[int]) -> int:
    """The slot of L2 that has the last recurrent state of a prompt."""
    values = [
        state.host_value
        for node in cache.tree.walk(RadixKey(list(ids)))
        for state in node.states
        if state.host_value is not None
    ]
    return int(values[-1])


def read_page(pool: HostKVCache, page: int) -> torch.Tensor:
    """A copy of the bytes of a page, uint8 `[1, page_bytes]`."""
    flat = torch.empty(1, pool.page_bytes, dtype=torch.uint8)
    pool.gather_pages(_slots(pool, page), flat)
    return flat


def write_page(pool: HostKVCache, page: int, raw: torch.Tensor) -> None:
    """Overwrite a page, as a copy would that comes late."""
    pool.scatter_pages(_slots(pool, page), raw)


def flip(pool: HostKVCache, page: int, bit: int = 6) -> None:
    """Flip one bit of every other byte of a page."""
    raw = read_page(pool, page)
    raw[:, 1::2] ^= 1 << bit
    write_page(pool, page, raw)


def swap(pool: HostKVCache, page: int, other: int) -> None:
    """Exchange the bytes of two pages."""
    mine, theirs = read_page(pool, page), read_page(pool, other)
    write_page(pool, page, theirs)
    write_page(pool, other, mine)


def flip_any(cache: RadixCache, rng: random.Random) -> bool:
    """Flip a bit in a page or a state that L2 shows; False: the drawn one has no checksum, or there
    is none. Backends of third parties keep none of what they read."""
    assert isinstance(cache, HiRadixCache)
    nodes = [node for node in cache.nodes() if node.host_value is not None]
    if not nodes:
        return False
    node = rng.choice(nodes)
    entry = rng.choice(list(cache.cache_controller.mem_pool_host.entries.values()))
    values = [node.host_value]
    if entry.spec.hit_policy is PoolHitPolicy.TRAILING_PAGES:
        values = [state.host_value for state in node.states]
    slots = [slot for value in values if value is not None for slot in value.tolist()]
    if not slots:
        return False
    pool = entry.host_pool
    page = rng.choice(slots) // pool.page_size
    if not pool.checksums.have(np.array([page])).all():
        return False
    flip(pool, page, rng.randrange(8))
    return True


def _slots(pool: HostKVCache, page: int) -> torch.Tensor:
    return torch.arange(page * pool.page_size, (page + 1) * pool.page_size)
