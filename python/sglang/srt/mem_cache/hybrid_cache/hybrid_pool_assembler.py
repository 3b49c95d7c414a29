"""Builds the host pools that mirror a model's device pools, as one group.

Building succeeds whole or raises: there is never a cache without a pool that its model needs.
"""

from __future__ import annotations

from sglang.srt.mem_cache.device.memory_pool import KVCache, MHATokenToKVPool
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.srt.mem_cache.host.host_layout import resolve_layout_and_io
from sglang.srt.mem_cache.host.host_pool_group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.host.mha_host_pool import MHATokenToKVPoolHost
from sglang.srt.mem_cache.host.page_copier import check_has_copier


def build_kv_host_stack(
    device_pool: KVCache,
    *,
    ratio: float,
    size_gb: float,
    io_backend: str,
    layout: str,
    has_storage: bool,
    allocator_type: str = "default",
) -> tuple[str, HostPoolGroup]:
    """The stack of a dense model: KV alone, as the anchor.

    Args:
        device_pool: L1.
        ratio: Tokens of L2 per token of L1, where `size_gb` is 0.
        size_gb: GB (10^9 bytes) of L2; wins over the ratio.
        io_backend: As asked for; `auto` chooses.
        layout: As asked for; `auto` chooses.
        has_storage: An L3 backend is configured.
        allocator_type: Where the host memory comes from; see `HostKVCache`.

    Returns:
        The resolved I/O backend, and the pools.

    Raises:
        ValueError: The pool's kind has no host counterpart, or layout, I/O or size cannot work.
    """
    if not isinstance(device_pool, MHATokenToKVPool):
        raise ValueError(
            f"the hierarchical cache has no host pool for {type(device_pool).__name__}; "
            "start without --enable-hierarchical-cache"
        )
    check_has_copier(device_pool.device)
    elements = device_pool.head_num * min(device_pool.head_dim, device_pool.v_head_dim)
    token_bytes = elements * device_pool.layer_num * device_pool.store_dtype.itemsize
    io_backend, layout = resolve_layout_and_io(
        device_pool.device.type,
        io_backend,
        layout,
        has_storage,
        token_bytes * device_pool.page_size,
    )
    host_pool = MHATokenToKVPoolHost(
        device_pool,
        ratio,
        size_gb,
        device_pool.page_size,
        layout,
        allocator_type=allocator_type,
    )
    anchor = PoolEntry(
        name=PoolName.KV,
        host_pool=host_pool,
        device_pool=device_pool,
        layer_mapper=lambda layer: layer,
        is_primary_index_anchor=True,
    )
    return io_backend, HostPoolGroup([anchor])
