"""Transfers that continue after their call returned must not touch reused pages or other objects.

A get or a put returns after a minute. Its transfers to a hanging node remain queued, and continue
when the node does. Real master, real nodes, real clients, over TCP.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from rigs.stores.host_pools import (
    copy_to_host,
    make_device_pool,
    make_host_pool,
    page_keys,
    storage_config,
)
from rigs.stores.mooncake_cluster import MooncakeCluster
from rigs.stores.store_processes import StandaloneClient
from sglang.embedded_mooncake import MooncakeMaster
from sglang.srt.mem_cache.hicache_storage import (
    CacheOutcome,
    PoolName,
    PoolTransfer,
    StorageUnavailable,
)
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=190, suite="nightly-test-cpu", nightly=True)

pytestmark = [pytest.mark.usefixtures("moving_in_place"), pytest.mark.timeout(900)]

PAGES = 24
"""Three transfers each: many more than Mooncake runs at once."""
MANY_PAGES, LARGE_HEAD = 200, 512
"""Most of a segment of 16 MB, in pages of 48 KB, so that later objects get the same memory."""
UNMISSED = {"client_ttl": 600, "default_kv_lease_ttl": 600_000}
"""Flags of a master that tolerates a hanging node and removes no object."""


class Bench:
    """A client with its own pages, whose bytes depend on `seed`."""

    def __init__(
        self,
        env: dict[str, str],
        *,
        pages: int = PAGES,
        head_dim: int = 4,
        seed: int = 0,
        owner: str = "ns",
    ) -> None:
        self.store = MooncakeStore(
            storage_config(
                "ns",
                master_server_address=env["MOONCAKE_MASTER"],
                client_server_address=env.get("MOONCAKE_CLIENT", ""),
                protocol="tcp",
                global_segment_size="0mb",
                # Damaged pages must be visible here.
                verify_checksum=False,
            )
        )
        device = make_device_pool(num_pages=pages, head_dim=head_dim, seed=seed)
        kind = self.store.config.host_allocator_type
        self.host = make_host_pool(device, "page_first_direct", allocator_type=kind)
        self.store.register_mem_host_pool_v2(self.host, PoolName.KV)
        slots = copy_to_host(device, self.host, list(range(pages)))
        keys = page_keys(pages, f"ns/{owner}")
        self.move = PoolTransfer(PoolName.KV, host_indices=slots, keys=keys)

    def put(self) -> bool:
        return all(self.store.batch_set_v2([self.move])["kv"])

    def outcomes(self) -> list[CacheOutcome]:
        return self.store.batch_get_v2([self.move])["kv"]

    def get(self) -> bool:
        return all(self.outcomes())

    def fill(self, value: int) -> None:
        for buffer in self.host.get_hybrid_pool_buffer():
            buffer.fill_(value)

    def holds(self, value: int) -> bool:
        buffers = self.host.get_hybrid_pool_buffer()
        return all(bool((buffer == value).all()) for buffer in buffers)

    def pages(self) -> list[bytes]:
        assert self.move.host_indices is not None
        return [b"".join(views) for views in self.host.get_page_views(self.move.host_indices)]


def test_unfinished_transfers_of_a_get_never_arrive() -> None:
    with MooncakeCluster(segment_size="64mb", master_flags=UNMISSED) as cluster:
        reader, witness = Bench(cluster.engine_env()), Bench(cluster.engine_env())
        assert reader.put()
        assert reader.get() and witness.get()
        cluster.nodes[0].suspend()
        began = time.monotonic()
        with pytest.raises(StorageUnavailable, match="hangs"):
            reader.get()
        assert time.monotonic() - began > 59, "Mooncake ends its gets sooner now: look again"
        # The pages may be reused now.
        reader.fill(7)
        cluster.nodes[0].resume()
        assert wait_until(witness.get, 60), "the node has caught up"
        assert reader.holds(7)
        assert wait_until(reader.store.probe, 60)
        assert reader.get()
        for bench in (reader, witness):
            bench.store.close()


def test_unfinished_transfers_of_a_put_damage_no_object_of_another_engine() -> None:
    with MooncakeCluster(segment_size="16mb", master_flags=UNMISSED) as cluster:
        env, large = cluster.engine_env(), {"pages": MANY_PAGES, "head_dim": LARGE_HEAD}
        gone = Bench(env, owner="gone", seed=1, **large)
        writer = Bench(env, owner="writer", seed=2, **large)
        reader = Bench(env, owner="writer", seed=3, **large)
        for bench in (gone, writer):
            # Opens a session with the node.
            assert bench.store.set(f"ns/{id(bench)}", torch.zeros(8))
        cluster.nodes[0].suspend()
        began = time.monotonic()
        with pytest.raises(StorageUnavailable, match="hangs"):
            gone.put()
        assert time.monotonic() - began > 59, "Mooncake ends its puts sooner now: look again"
        # The pages, and the memory of the node, may be reused now.
        gone.fill(7)
        landed: list[bool] = []
        other = threading.Thread(target=lambda: landed.append(writer.put()))
        other.start()
        assert wait_until(lambda: cluster.master.metric("master_key_count") >= PAGES, 30)
        cluster.nodes[0].resume()
        other.join(60)
        assert landed == [True]
        assert wait_until(gone.store.probe, 60), "and whatever it left has arrived, if it ever does"
        reader.fill(0)
        assert reader.get()
        assert reader.pages() == writer.pages()
        for bench in (gone, writer, reader):
            bench.store.close()


@pytest.mark.parametrize("way", ["get", "put"])
def test_pages_are_kept_until_a_hanging_stand_alone_client_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The client continues the call when it resumes, later than any timeout."""
    # Longer than the client hangs, so that it still has its objects when it resumes.
    master = MooncakeMaster(tmp_path, flags={"client_ttl": 45})
    client = StandaloneClient(master, tmp_path, segment_bytes=64 << 20)
    try:
        master.start()
        client.start()
        bench = Bench(client.engine_env())
        assert bench.put() and bench.get()
        if way == "put":
            bench.store.clear()
            # The query before the put was answered before the client began to hang.
            monkeypatch.setattr(bench.store, "_exist", lambda keys: [False] * len(keys))
        ended = threading.Event()

        def call() -> None:
            with pytest.raises(StorageUnavailable, match="did not answer"):
                getattr(bench, way)()
            ended.set()

        client.suspend()
        thread = threading.Thread(target=call)
        thread.start()
        hung = bench.store._client
        assert wait_until(lambda: hung.has_unfinished_transfers, 60)
        bench.fill(7)
        client.resume()
        if way == "get":
            assert wait_until(lambda: not bench.holds(7), 60), "it ended the call: look again"
        assert not ended.wait(2)
        client.kill()
        assert ended.wait(30)
        thread.join(30)
        assert wait_until(lambda: hung.store.health_check() != 0, 30)
        client.start()
        assert wait_until(bench.store.probe, 90), "the master forgets what the dead one held"
        bench.store.close()
    finally:
        client.kill()
        master.kill()
