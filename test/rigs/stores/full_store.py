"""Puts pages to a full Mooncake Store, with its log on stderr and counters on stdout.

A process of its own, because Mooncake reads its log level when it is loaded.

    python -m rigs.stores.full_store MASTER CALLS
"""

from __future__ import annotations

import json
import sys

from rigs.stores.host_pools import (
    make_device_pool,
    make_host_pool,
    page_keys,
    storage_config,
)
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.srt.utils.logging_utils import configure_logger


def main(master: str, calls: int) -> None:
    """Put `calls` pages of 768 KB, one page per call."""
    store = MooncakeStore(
        storage_config(master_server_address=master, protocol="tcp", global_segment_size=0)
    )
    host = make_host_pool(make_device_pool(head_dim=8192), "page_first_direct")
    store.register_mem_host_pool_v2(host, PoolName.KV)
    slots = host.alloc(host.page_size)
    assert slots is not None
    for key in page_keys(calls):
        store.batch_set_v2([PoolTransfer(PoolName.KV, host_indices=slots, keys=[key])])
    print(json.dumps(store.get_stats()))
    store.close()


if __name__ == "__main__":
    configure_logger("info")
    main(sys.argv[1], int(sys.argv[2]))
