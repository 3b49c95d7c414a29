"""Clients of a stand-alone `mooncake_client`, and pages that they can share with it."""

from __future__ import annotations

from rigs.stores.host_pools import (
    copy_to_host,
    make_device_pool,
    make_host_pool,
    page_keys,
    storage_config,
)
from rigs.stores.store_processes import StandaloneClient
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore


def connect(client: StandaloneClient) -> MooncakeStore:
    env = client.engine_env()
    return MooncakeStore(
        storage_config(
            master_server_address=env["MOONCAKE_MASTER"],
            client_server_address=env["MOONCAKE_CLIENT"],
            protocol="tcp",
            global_segment_size=0,
        )
    )


def some_pages(store: MooncakeStore, count: int = 3) -> PoolTransfer:
    """Pages in a host pool that is registered with `store`."""
    device = make_device_pool()
    host = make_host_pool(device, "page_first_direct", allocator_type="mooncake")
    slots = copy_to_host(device, host, list(range(count)))
    store.register_mem_host_pool_v2(host, PoolName.KV)
    return PoolTransfer(PoolName.KV, host_indices=slots, keys=page_keys(count))
