"""A store node that hangs and goes on again must not write into pages that were given up.

Mooncake's get returns after a minute; what it had asked of the node still waits in line then, and
arrives whenever the node goes on. Real master, real node, over TCP.
"""

from __future__ import annotations

import time

import pytest

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer, StorageUnavailable
from sglang.srt.mem_cache.storage.mooncake_store import page_batches
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.host_pools import (
    copy_to_host,
    make_device_pool,
    make_host_pool,
    page_keys,
    storage_config,
)
from sglang.test.mooncake_cluster import MooncakeCluster

register_cpu_ci(est_time=75, suite="nightly-test-cpu", nightly=True)

PAGES = 24
"""Three transfers each: many more than Mooncake has under way at once."""


class Bench:
    """A client with pages of its own, all in the store."""

    def __init__(self, cluster: MooncakeCluster) -> None:
        self.store = MooncakeStore(
            storage_config(
                "ns",
                master_server_address=cluster.master.address,
                protocol="tcp",
                global_segment_size="0mb",
            )
        )
        device = make_device_pool(num_pages=PAGES)
        self.host = make_host_pool(device, "page_first_direct")
        self.store.register_mem_host_pool_v2(self.host, PoolName.KV)
        slots = copy_to_host(device, self.host, list(range(PAGES)))
        self.move = PoolTransfer(PoolName.KV, host_indices=slots, keys=page_keys(PAGES))

    def get(self) -> bool:
        return all(self.store.batch_get_v2([self.move])["kv"])

    def holds(self, value: int) -> bool:
        buffers = self.host.get_hybrid_pool_buffer()
        return all(bool((buffer == value).all()) for buffer in buffers)


def test_what_a_get_left_behind_never_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    # The pages here are tiny, and would all be staged.
    monkeypatch.setattr(page_batches, "SHORT_PAGE_BYTES", 0)
    # The node is not missed while it hangs.
    flags = {"client_ttl": 600, "default_kv_lease_ttl": 600_000}
    with MooncakeCluster(segment_size="64mb", master_flags=flags) as cluster:
        reader, witness = Bench(cluster), Bench(cluster)
        assert all(reader.store.batch_set_v2([reader.move])["kv"])
        assert reader.get() and witness.get()
        cluster.nodes[0].suspend()
        began = time.monotonic()
        with pytest.raises(StorageUnavailable, match="hangs"):
            reader.get()
        assert time.monotonic() - began > 59, "Mooncake ends its gets sooner now: look again"
        # The pages are somebody else's now.
        for buffer in reader.host.get_hybrid_pool_buffer():
            buffer.fill_(7)
        cluster.nodes[0].resume()
        assert wait_until(witness.get, 60), "the node has caught up"
        assert reader.holds(7)
        assert wait_until(reader.store.probe, 60)
        assert reader.get()
        for bench in (reader, witness):
            bench.store.close()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
