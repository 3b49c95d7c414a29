"""A stand-alone `mooncake_client` is killed and restarted below an engine that goes on.

Only one client per process survives such a restart, because Mooncake shares all of the process's
memory anew. The test therefore has its own file.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rigs.stores.mooncake_standalone import connect, some_pages
from rigs.stores.store_processes import StandaloneClient
from sglang.embedded_mooncake import MooncakeMaster
from sglang.srt.mem_cache.hicache_storage import CacheOutcome, PoolTransfer, StorageUnavailable
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

# Mooncake's client looks at its server once a second; it does not notice a faster restart.
register_cpu_ci(est_time=6, suite="base-b-test-cpu", alone=True)

LANDED = CacheOutcome.LANDED


def moves(store: MooncakeStore, move: PoolTransfer) -> bool:
    try:
        return all(store.batch_set_v2([move])["kv"]) and all(store.batch_get_v2([move])["kv"])
    except StorageUnavailable:
        return False


def test_a_killed_client_serves_again_after_a_restart(tmp_path: Path) -> None:
    master = MooncakeMaster(tmp_path)
    process = StandaloneClient(master, tmp_path, segment_bytes=64 << 20)
    try:
        master.start()
        process.start()
        store = connect(process)
        move = some_pages(store)
        assert store.batch_set_v2([move])["kv"] == [LANDED] * 3
        process.kill()
        with pytest.raises(StorageUnavailable):
            store.batch_get_v2([move])
        assert not store.probe()
        # The store's client looks at its server once a second and misses a faster restart.
        wait_until(lambda: store._client.store.health_check() != 0, timeout=30)
        process.start()
        assert wait_until(store.probe, timeout=60)
        # The master forgets the objects of the dead process after `client_ttl`.
        assert wait_until(lambda: moves(store, move), timeout=60)
        store.close()
    finally:
        process.kill()
        master.kill()
