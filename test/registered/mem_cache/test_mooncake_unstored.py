"""Pages that a Mooncake Store takes and does not keep: unfinished puts of others, a full store."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from rigs.caches.cache_rig import CacheRig, Reused
from rigs.caches.event_listener import Listener
from rigs.caches.storage_rigs import PAGE, StorageRigs, attached_store_of, counts
from rigs.stores.host_pools import make_device_pool, make_host_pool, page_keys
from rigs.stores.killed_writer import leave_unfinished
from rigs.stores.mooncake_bench import connect
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.mem_cache.hicache_storage import (
    CacheOutcome,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.l3 import storage_writes
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.utils import hash_str_to_int64
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=9, suite="base-b-test-cpu")

PROMPT = [*range(8 * PAGE), 7]
LONGER = [*PROMPT[:-1], *range(100, 100 + 3 * PAGE), 7]
BAD = 5
"""The page of `PROMPT` that another client has begun to put."""
FORGETS_PUTS = {"put_start_discard_timeout_sec": 15}
EVICTS_SOON = {"default_kv_lease_ttl": 10, "eviction_high_watermark_ratio": 0.6}
"""The ratio leaves room, because objects take up to an eighth more than the master counts."""


@pytest.fixture(scope="module")
def small() -> Iterator[MooncakeCluster]:
    with MooncakeCluster(segment_size="32mb", master_flags=EVICTS_SOON) as running:
        yield running


def test_c21_a_killed_writers_page_does_not_count_and_is_written_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One call for several writes puts pages behind the hole, too, before the answer is known.
    monkeypatch.setattr(storage_writes, "next_group", lambda queued: queued[:1])
    with MooncakeCluster(master_flags=FORGETS_PUTS) as cluster, StorageRigs.on(cluster) as rigs:
        writer = rigs.make(kind=functools.partial(CacheRig, kv_events=True))
        told = Listener("EXTERNAL")
        hashes = RadixKey(LONGER[:-1]).page_hashes(PAGE)
        keys = [f"{key}/kv" for key in attached_store_of(writer).pools.keys(hashes)]
        leave_unfinished(cluster.master.address, 1000, keys[BAD])

        for prompt in (PROMPT, LONGER):
            writer.run(prompt)
            writer.settle()
        ends = counts(attached_store_of(writer).metrics.backup_outcomes)
        # Their writes may wait already when the store refuses the page before them.
        untried = ends.keys() - {"miss"}
        assert untried and untried <= {"short", "orphan"}, "the pages below are not tried"
        assert not set(keys[8:]) & set(cluster.master.keys()), "nothing behind a hole"
        told.hear(writer.tree.take_events())
        assert not told.tokens, "no listener hears of a page that the store lacks"
        reader = rigs.make()
        assert reader.run(LONGER) == Reused(storage=BAD * PAGE)

        # The master forgets the dead writer's put; the next uses write what is missing.
        def is_whole() -> bool:
            writer.run(LONGER)
            writer.settle()
            return set(keys) <= set(cluster.master.keys())

        writer.until(is_whole)
        told.hear(writer.tree.take_events())
        assert told.tokens.keys() == {hash_str_to_int64(page) for page in hashes}
        last = rigs.make()
        assert last.run(LONGER) == Reused(storage=len(LONGER) - 1)
        for rig in (writer, reader, last):
            rig.settle()


def test_c22_a_full_store_keeps_a_prefix_as_long_as_what_follows_it(
    small: MooncakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has the beginning of all prompts in L1, and never reads it from the store."""
    monkeypatch.setattr(storage_writes, "_GATHER_S", 0.0)
    with StorageRigs.on(small) as rigs:
        rig = rigs.make(kind=functools.partial(CacheRig, head_dim=2048))
        hashes = RadixKey(PROMPT[:-1]).page_hashes(PAGE)
        head = {f"{key}/kv" for key in attached_store_of(rig).pools.keys(hashes)}
        evicted = small.master.metric("master_evicted_key_count")
        for turn in range(40):
            own = [1000 + turn, *range(3 * PAGE - 1)]
            rig.run([*PROMPT[:-1], *own, 7])
            rig.settle()
        assert small.master.metric("master_evicted_key_count") - evicted > 40
        assert counts(attached_store_of(rig).metrics.backup_outcomes) == {"landed": 40}
        assert head <= set(small.master.keys())


def test_c22_all_objects_of_a_page_are_kept_or_none(small: MooncakeCluster) -> None:
    store = connect(small, "parts")
    pools = (PoolName.KV, PoolName.INDEXER)
    for name in pools:
        host = make_host_pool(make_device_pool(head_dim=8192), "page_first_direct")
        store.register_mem_host_pool_v2(host, name)
    slots = host.alloc(host.page_size)
    assert slots is not None
    first, *others = page_keys(40, "parts")
    seen = HiCacheStorageExtraInfo(prefix_keys=[first])
    evicted = small.master.metric("master_evicted_key_count")
    for key in (first, *others):
        moves = [PoolTransfer(name, host_indices=slots, keys=[key]) for name in pools]
        landed = {name: [CacheOutcome.LANDED] for name in pools}
        extra = seen if key != first else None
        # The master evicts in a thread of its own, which a busy machine may hold up.
        assert wait_until(lambda m=moves, e=extra, w=landed: store.batch_set_v2(m, e) == w, 10)  # type: ignore[misc]
    assert small.master.metric("master_evicted_key_count") - evicted > 40
    there = set(small.master.keys())
    assert f"{first}/kv" in there, "each set renews it"
    by_pool = [{key for key in (first, *others) if {f"{key}/{name}"} <= there} for name in pools]
    assert by_pool[0] == by_pool[1]
    store.close()
