"""MooncakeStore where its client, its master or its node fails, over TCP on loopback."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from rigs.stores.mooncake_bench import Bench, connect
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.mem_cache.hicache_storage import CacheOutcome, StorageUnavailable
from sglang.srt.mem_cache.storage.mooncake_store import client as mooncake_client
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=17, suite="base-b-test-cpu")

pytestmark = pytest.mark.usefixtures("moving_in_place")

LANDED = CacheOutcome.LANDED


def test_a_client_is_replaced_with_all_its_memory(cluster: MooncakeCluster, bench: Bench) -> None:
    before = bench.store._client
    bench.store.rebuild()
    assert bench.store._client is not before
    assert {t.data_ptr() for t in bench.store._client.registered()} == {
        t.data_ptr() for t in before.registered()
    }
    assert bench.get() == [LANDED] * 3
    assert bench.host_is_intact()
    bench.store.warmup()


class Poisoned:
    """A client after too many slices in flight: it answers, but moves nothing."""

    def __init__(self, inner: Any, *, full: bool) -> None:
        self._inner = inner
        self._full = full

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def batch_get_into_multi_buffers(self, keys: list[str], *args: object) -> list[int]:
        return [-800] * len(keys)

    def put(self, key: str, value: bytes) -> int:
        return -200 if self._full else -800


@pytest.mark.parametrize("full", [False, True])
def test_the_probe_replaces_a_client_that_moves_nothing(
    cluster: MooncakeCluster, full: bool
) -> None:
    store = connect(cluster)
    store.clear()
    bench = Bench(store)
    assert bench.put() == [LANDED] * 3
    broken = store._client
    broken.store = Poisoned(broken.store, full=full)
    with pytest.raises(StorageUnavailable, match="get of 3 pages: -800"):
        bench.get()
    assert store.probe()
    assert store._client is not broken
    assert store.get_stats()["rebuilds"] == 1
    assert bench.get() == [LANDED] * 3
    assert bench.host_is_intact()
    # A probe does not change a store that works.
    assert store.probe()
    assert store.get_stats()["rebuilds"] == 1
    store.close()


def test_a_client_with_an_unfinished_get_is_given_up_after_its_last_use(
    cluster: MooncakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its transfers could still write; `test_mooncake_late_writes.py` shows the consequence."""
    store = connect(cluster)
    store.clear()
    bench = Bench(store)
    assert bench.put() == [LANDED] * 3
    lingering = store._client
    ended: list[str] = []

    def get() -> None:
        with pytest.raises(StorageUnavailable, match="a store node hangs"):
            bench.get()
        ended.append("get")

    thread = threading.Thread(target=get)
    with monkeypatch.context() as patched:
        patched.setattr(mooncake_client, "_UNFINISHED_AFTER_S", -1.0)
        with lingering.using() as raw:
            thread.start()
            assert wait_until(lambda: lingering.is_given_up, timeout=30)
            # A thread inside one of its calls finishes that call.
            assert raw.is_exist(bench.object_key(0)) == 1
            assert not ended
        thread.join(30)
    assert ended == ["get"]
    for call in (bench.get, bench.put):
        with pytest.raises(StorageUnavailable, match="given up"):
            call()
    assert store.probe()
    assert store._client is not lingering
    assert bench.get() == [LANDED] * 3
    assert bench.host_is_intact()
    store.close()


def recovers(store: MooncakeStore) -> bool:
    """Until the master notices that a node is dead, it may still place pages there."""
    try:
        return store.probe() and all(Bench(store).put())
    except StorageUnavailable:
        return False


def test_master_gone_and_back() -> None:
    with MooncakeCluster(num_nodes=1, segment_size="64mb") as cluster:
        store = connect(cluster)
        bench = Bench(store)
        assert bench.put() == [LANDED] * 3
        cluster.master.kill()
        started = time.monotonic()
        with pytest.raises(StorageUnavailable):
            store.batch_exists_v2(bench.keys)
        with pytest.raises(StorageUnavailable):
            bench.get()
        with pytest.raises(StorageUnavailable):
            store.batch_set_v2([bench.move])
        with pytest.raises(StorageUnavailable):
            store.clear()
        assert not store.probe()
        assert time.monotonic() - started < 60
        cluster.master.start()
        assert wait_until(lambda: recovers(store), timeout=90)
        again = Bench(store)
        assert again.get() == [LANDED] * 3
        assert again.host_is_intact()
        assert store.get_stats()["slices_in_flight"] == 0
        store.close()


def test_a_store_node_that_dies_is_a_miss_or_unavailable() -> None:
    with MooncakeCluster(num_nodes=1, segment_size="64mb") as cluster:
        store = connect(cluster)
        bench = Bench(store)
        assert bench.put() == [LANDED] * 3
        cluster.nodes[0].kill()
        started = time.monotonic()
        try:
            outcomes = bench.get()
        except StorageUnavailable:
            outcomes = []
        assert not any(outcomes)
        assert time.monotonic() - started < 60
        cluster.nodes[0].start()
        store.clear()
        assert wait_until(lambda: recovers(store), timeout=60)
        again = Bench(store)
        assert again.get() == [LANDED] * 3
        assert again.host_is_intact()
        store.close()
