"""Rows C4, C7 and C8: slow, stopped and killed store nodes of a real Mooncake Store.

The engine is a `CacheRig`, which compares every reused prefix with the expected KV of its tokens.
`check_integrity` and `settle` check the owners of all pages.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest

from rigs.caches.cache_rig import CacheRig, Reused
from rigs.caches.memory_ranks import run_on_ranks
from rigs.caches.sharded_rig import ShardedRig
from rigs.caches.storage_rigs import PAGE, StorageRigs, counts
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolTransfer
from sglang.srt.mem_cache.l3 import store_calls
from sglang.srt.mem_cache.l3.storage_writes import PAGES_PER_CALL
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=17, suite="base-b-test-cpu")

PAGES = 100
PROMPT = [*range(PAGES * PAGE), 7]
EPSILON_S = 20.0
"""Seconds that a request may take beyond its timeout, on a machine that also runs other tests. A
request that waited for an unresponsive node would take a minute."""


class StoppedInMidGet(MooncakeStore):
    """Runs `before_get(n)` before the n-th get of a page batch, from 0 on."""

    before_get: ClassVar[Callable[[int], None]]

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> Any:
        number = self.__dict__.setdefault("gets", 0)
        self.__dict__["gets"] += 1
        type(self).before_get(number)
        return super().batch_get_v2(transfers, extra_info)


def written(rigs: StorageRigs) -> None:
    """Write the pages of `PROMPT` to the store."""
    writer = rigs.make()
    assert writer.run(PROMPT) == Reused()
    writer.settle()


def test_c4_a_read_that_outlives_its_lease_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    # The default limit is 3 s: the cache leaves pages alone whose read took longer.
    monkeypatch.setattr(store_calls, "_STUCK_AFTER_S", 60.0)
    monkeypatch.setattr(store_calls, "_SILENT_AFTER_S", 60.0)
    flags = {"default_kv_lease_ttl": 2500}
    with MooncakeCluster(segment_size="64mb", master_flags=flags) as cluster:
        node = cluster.nodes[0]

        def slow(number: int) -> None:
            if number == 0:
                node.suspend()
                threading.Timer(4.0, node.resume).start()

        monkeypatch.setattr(StoppedInMidGet, "before_get", staticmethod(slow), raising=False)
        with StorageRigs.on(cluster) as rigs:
            written(rigs)
            reader = rigs.make(StoppedInMidGet)
            assert reader.run(PROMPT) == Reused()
            reader.settle()
            assert counts(reader.hi.metrics.pages)["get/miss"] >= 1
            assert counts(reader.hi.metrics.prefetch_outcomes) == {"miss": 1}
            # Objects and store are intact.
            reader.flush()
            assert reader.run(PROMPT) == Reused(storage=PAGES * PAGE)
            reader.settle()


@pytest.mark.parametrize("is_patient", [True, False])
@pytest.mark.parametrize(
    ("policy", "timeout_s"), [("best_effort", 0.0), ("wait_complete", 1.5), ("timeout", 1.0)]
)
def test_c7_a_node_stopped_in_mid_get(
    cluster: MooncakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    timeout_s: float,
    is_patient: bool,
) -> None:
    """The first 64 pages land, then the node stops; the request uses them in the policy's time, or
    once the silence has lasted longer than computing takes."""
    monkeypatch.setattr(store_calls, "_FIRST_GET_S", 0.0)
    monkeypatch.setattr(store_calls, "_SILENT_AFTER_S", 60.0)
    is_cut = not is_patient and policy != "best_effort"
    node = cluster.nodes[0]
    stopped = threading.Event()

    def stop(number: int) -> None:
        if number == 1:
            node.suspend()
            stopped.set()

    monkeypatch.setattr(StoppedInMidGet, "before_get", staticmethod(stop), raising=False)
    times = {
        "prefetch_timeout_max": 1.5,
        "prefetch_timeout_base": 1.0,
        "prefetch_timeout_per_ki_token": 0.0,
    }
    with StorageRigs.on(cluster, **times) as rigs:
        written(rigs)
        reader = rigs.make(StoppedInMidGet, hicache_storage_prefetch_policy=policy)
        try:
            began = time.monotonic()
            reader.arrive("held", PROMPT)
            operation = reader.hi.storage_prefetch.table.operations[0]
            reader.until(lambda: operation.landed_pages == PAGES_PER_CALL and stopped.is_set())
            reader.tick()
            landed_after = time.monotonic() - began
            if not is_patient:
                monkeypatch.setattr(store_calls, "_SILENT_AFTER_S", 0.0)
            reader.until(lambda: reader.tree.check_prefetch_progress("held"))
            waited = time.monotonic() - began
            request, reused = reader.admit("held", PROMPT)
            reader.finish(request)
            assert reused == Reused(storage=PAGES_PER_CALL * PAGE)
            assert operation.is_cancelled == is_cut
            if policy == "best_effort":
                assert waited - landed_after < EPSILON_S
            elif not is_cut:
                assert timeout_s <= waited < timeout_s + EPSILON_S
            # The pages that the call may still write to are neither free nor visible.
            assert operation.outcome is None
            reader.tree.check_integrity()
            assert reader.hi.is_busy()["prefetches"] == 1
            began = time.monotonic()
            reader.run(range(5000, 5040))
            assert time.monotonic() - began < timeout_s + EPSILON_S, "other requests wait no longer"
        finally:
            node.resume()
        reader.settle()
        assert operation.outcome is not None
        reader.flush()
        assert reader.hi.host_pool.available_size() == reader.hi.host_pool.size
        monkeypatch.setattr(store_calls, "_SILENT_AFTER_S", 60.0)
        assert rigs.make().run(PROMPT) == Reused(storage=PAGES * PAGE)


def missed(rig: CacheRig) -> float:
    """Number of pages and prefetches that the store could not deliver."""
    pages, prefetches = counts(rig.hi.metrics.pages), counts(rig.hi.metrics.prefetch_outcomes)
    words = ("miss", "failed")
    return sum(pages.get(f"get/{word}", 0) + prefetches.get(word, 0) for word in words)


def use_while_a_node_dies(
    cluster: MooncakeCluster, rigs: StorageRigs, make_rig: Callable[..., CacheRig] = CacheRig
) -> list[int]:
    """Two engines use prompts that are in the store, and one of three nodes gets SIGKILL.

    Args:
        make_rig: Makes an engine, or a rank of one: all ranks of both run this at once.

    Returns:
        How many tokens each request reused.
    """
    rng = random.Random(8)
    prompts = [[family * 1000 + i for i in range(160)] + [7] for family in range(12)]
    writer, reader = (rigs.make(kind=make_rig) for _ in range(2))
    try:
        for prompt in prompts:
            writer.run(prompt)
            writer.settle()
        assert reader.run(prompts[0]) == Reused(storage=160)
        missed_before = missed(writer) + missed(reader)
        slowest = 0.0
        reused = []
        for step in range(40):
            if step == 5 and writer.group.rank == 0:
                cluster.nodes[1].kill()
            rig = rng.choice((writer, reader))
            began = time.monotonic()
            reused.append(rig.run([*rng.choice(prompts)[: rng.randrange(40, 160)], 9]).total)
            slowest = max(slowest, time.monotonic() - began)
            if step % 4 == 3:
                rig.flush()
        for rig in (writer, reader):
            rig.settle()
        assert slowest < 5.0 + EPSILON_S
        # All prompts were in the store, so that each miss is a page of the dead node.
        lost = missed(writer) + missed(reader) - missed_before
        assert lost >= 1, [counts(rig.hi.metrics.pages) for rig in (writer, reader)]
        # The two nodes left are a working store: one engine reads what the other writes.
        fresh = [*range(90_000, 90_160), 7]

        def stored_by_two() -> bool:
            for rig in (writer, reader):
                rig.flush()
            writer.run(fresh)
            writer.settle()
            return reader.run(fresh).storage == 160

        writer.until(stored_by_two)
        return reused
    finally:
        for rig in (writer, reader):
            rig.close()


@pytest.fixture
def three_nodes() -> Iterator[MooncakeCluster]:
    flags = {"client_ttl": 2}
    with MooncakeCluster(num_nodes=3, segment_size="32mb", master_flags=flags) as running:
        yield running


def test_c8_a_node_killed_under_load(three_nodes: MooncakeCluster) -> None:
    """All requests finish with right bytes; misses are counted; two nodes are a store."""
    with StorageRigs.on(three_nodes, prefetch_timeout_max=5.0) as rigs:
        assert sum(use_while_a_node_dies(three_nodes, rigs)) > 0


def test_c8_a_node_killed_under_load_of_two_ranks(three_nodes: MooncakeCluster) -> None:
    """The same of two ranks with half of the heads each, which reuse the same: what one of them
    cannot read, none uses."""

    def use(group: RankGroup) -> list[int]:
        return use_while_a_node_dies(three_nodes, rigs, partial(ShardedRig, group=group))

    with StorageRigs.on(three_nodes, prefetch_timeout_max=5.0) as rigs:
        first, second = run_on_ranks(2, use)
        assert first == second
        assert sum(first) > 0
