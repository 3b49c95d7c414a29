"""Pages that a store node of Mooncake has on disk alone come back bit for bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rigs.stores.host_pools import copy_to_host, make_device_pool, make_host_pool, page_keys
from rigs.stores.mooncake_bench import connect
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.mem_cache.hicache_storage import CacheOutcome, PoolName, PoolTransfer
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=30, suite="nightly-test-cpu", nightly=True)

LANDED, MISS = CacheOutcome.LANDED, CacheOutcome.MISS


def test_pages_come_back_from_the_disk_of_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "MOONCAKE_ENABLE_SSD_OFFLOAD": "1",
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(tmp_path),
        "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
        "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(2 << 20),
    }.items():
        monkeypatch.setenv(name, value)
    offloads: dict[str, str | int | float] = {"enable_offload": "true", "default_kv_lease_ttl": 100}
    with MooncakeCluster(1, "16mb", master_flags=offloads) as cluster:
        # The environment has the switch, and this client lends nothing that could go to disk.
        store = connect(cluster)
        device = make_device_pool(head_dim=4096)
        host = make_host_pool(device, "page_first_direct")
        store.register_mem_host_pool_v2(host, PoolName.KV)
        slots = copy_to_host(device, host, list(range(16)))
        wanted = [bytes(b"".join(views)) for views in host.get_page_views(slots)]
        keys = page_keys(64)

        def moves() -> list[PoolTransfer]:
            return [
                PoolTransfer(PoolName.KV, host_indices=slots, keys=keys[begin : begin + 16])
                for begin in range(0, len(keys), 16)
            ]

        in_memory = (16 << 20) // host.page_bytes

        def holds_more_than_memory() -> bool:
            for move in moves():
                store.batch_set_v2([move])
            return sum(store._exist([f"{key}/kv" for key in keys])) > in_memory

        # Each question renews leases, and what has one is not evicted.
        assert wait_until(holds_more_than_memory, 60, interval=1.0)
        seen: Counter[CacheOutcome] = Counter()
        for move in moves():
            for page, key in enumerate(move.keys or ()):
                piece = slots.view(16, -1)[page]
                for view in host.get_page_views(piece)[0]:
                    view[:] = bytes(len(view))
                one = PoolTransfer(PoolName.KV, host_indices=piece, keys=[key])
                (outcome,) = store.batch_get_v2([one])["kv"]
                seen[outcome] += 1
                if outcome:
                    (views,) = host.get_page_views(piece)
                    assert bytes(b"".join(views)) == wanted[page]
        assert seen[LANDED] > in_memory, "some are from the disk"
        assert seen.keys() <= {LANDED, MISS}
        store.close()
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["client_0"]
        assert cluster.nodes[0].stop() == 0
