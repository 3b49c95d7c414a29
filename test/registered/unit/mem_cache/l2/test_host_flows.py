"""Pages between L1 and L2: when they are copied, split under a copy, loaded, evicted."""

from __future__ import annotations

import random

import pytest
import torch

from rigs.caches.cache_rig import CacheRig, HiCacheSettings, Reused, expected_kv
from rigs.caches.host_damage import host_pages
from rigs.caches.stepped_rig import SteppedRig
from rigs.caches.storage_rigs import counts
from rigs.caches.tier_rigs import other_prompts, three_tiers, two_tiers
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")
register_cuda_ci(est_time=10, suite="base-b-test-1-gpu-large")

POLICIES = ("write_through", "write_through_selective", "write_back")


def tokens_of(rig: CacheRig, prompt: range, tier: str) -> list[int]:
    """Lengths of the nodes of `prompt`, 0 for those that `tier` ("host" or "store") lacks."""
    stored = rig.hi.storage_backup.has_stored
    return [
        len(node.key) if (node.backuped if tier == "host" else stored(node)) else 0
        for node in rig.hi.tree.walk(RadixKey(list(prompt)))
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_loses_a_page_or_a_byte_under_pressure(policy: str) -> None:
    """Working set 120 pages, L2 32, L1 12: random prompts that share prefixes."""
    rng = random.Random(policy)
    rig = three_tiers(12, hicache_write_policy=policy, hicache_ratio=32 / 12)
    for step in range(150):
        family = rng.randrange(10)
        length = rng.randrange(5, 40)
        rig.run([family * 100 + i // 12 * 7 for i in range(length)])
        rig.tick()
        if step % 10 == 0:
            rig.settle()
    rig.settle()
    rig.close()


def test_a_host_node_with_any_child_on_the_host_is_no_leaf() -> None:
    """Two prompts go on from one start, all of it on the host alone: the start leaves last."""
    rig = two_tiers(32, hicache_ratio=2.0)
    start, first, second = list(range(8)), list(range(100, 108)), list(range(200, 208))
    for tail in (first, second):
        rig.run([*start, *tail])
        rig.settle()
    rig.tree.evict(EvictParams(num_tokens=1000))
    assert rig.tree.total_size() == 0

    def on_host(tail: list[int]) -> int:
        path = rig.hi.tree.walk(RadixKey([*start, *tail]))
        return sum(len(node.key) for node in path if node.backuped)

    assert (on_host(first), on_host(second)) == (16, 16)
    for left in ({8, 16}, {8}, {0}):
        assert rig.hi.evict_host(1) == 8
        assert {on_host(first), on_host(second)} == left
        rig.hi.check_integrity()
    rig.close()


def test_write_back_writes_when_l1_is_left_and_not_before() -> None:
    rig = two_tiers(hicache_write_policy="write_back")
    rig.run(range(16))
    rig.settle()
    assert rig.hi.host_pool.available_size() == rig.hi.host_pool.size
    other_prompts(rig)
    assert rig.run(range(17)) == Reused(host=16)


def test_the_checksums_of_a_copy_are_kept_once() -> None:
    """A page that was written back has another owner before its copy is settled."""
    with envs.SGLANG_HICACHE_CHECKED_SHARE.override(1.0):
        rig = two_tiers(hicache_write_policy="write_back", hicache_ratio=0.5)
    first, second = range(8), range(100, 108)
    for prompt in (first, second):
        rig.run(prompt)
    rig.settle()
    rig.tree.evict(EvictParams(num_tokens=8))
    pages = host_pages(rig.hi, first)
    taken = rig.hi.host_pool.alloc(rig.hi.host_pool.available_size())
    assert taken is not None and rig.hi.evict_host(8) == 8
    rig.tree.evict(EvictParams(num_tokens=8))
    rig.hi.host_pool.free(taken)
    assert set(host_pages(rig.hi, second)) == set(pages)
    # The first copy alone is settled, and a load of the second is compared.
    rig.hi.host_backup.settle(1)
    match = rig.tree.match_prefix(MatchPrefixParams(RadixKey(list(second))))
    rig.tree.init_load_back(InitLoadBackParams(match.best_match_node, 8))
    rig.hi.verify_load(rig.hi.ready_to_load_host_cache())
    assert counts(rig.hi.metrics.checked_pages) == {"host/intact": 2}
    rig.settle()
    rig.close()


def test_one_eviction_frees_all_that_can_go_also_where_l2_is_smaller_than_a_node() -> None:
    """L2 of 4 pages: the leaf is written back, its parent of 8 pages finds no room and is lost."""
    rig = two_tiers(16, hicache_write_policy="write_back", hicache_ratio=0.25)
    rig.run(range(32))
    rig.run([*range(32), *range(100, 108)])
    rig.settle()
    assert rig.tree.evict(EvictParams(num_tokens=1000)).num_tokens_evicted == 40
    rig.settle()


def test_write_through_selective_writes_at_the_second_hit() -> None:
    rig = two_tiers(hicache_write_policy="write_through_selective")
    for expected_used in (0, 16):
        rig.run(range(16))
        rig.settle()
        assert rig.hi.host_pool.size - rig.hi.host_pool.available_size() == expected_used


def test_l2_smaller_than_l1_loses_no_page_and_keeps_the_newest() -> None:
    rig = three_tiers(16, hicache_ratio=0.5)
    for base in range(0, 600, 100):
        rig.run(range(base, base + 16))
        rig.settle()
    assert rig.run(range(500, 517)) == Reused(device=16)
    rig.settle()


def test_a_node_split_under_a_write_publishes_all_its_parts() -> None:
    for cut in (4, 8, 12):
        rig = two_tiers()
        rig.run(range(16))
        # Queued, not yet acknowledged: split the node now.
        rig.tree.match_prefix(MatchPrefixParams(RadixKey([*range(cut), *[99] * 8])))
        rig.settle()
        other_prompts(rig)
        assert rig.run(range(17)) == Reused(host=16)
        rig.settle()


def test_a_node_split_under_a_load_releases_all_its_parts() -> None:
    rig = two_tiers()
    rig.run(range(16))
    rig.settle()
    rig.tree.evict(EvictParams(num_tokens=32))
    match = rig.tree.match_prefix(MatchPrefixParams(RadixKey(list(range(16)))))
    rig.tree.init_load_back(InitLoadBackParams(match.best_match_node, 16))
    rig.tree.match_prefix(MatchPrefixParams(RadixKey([*range(8), *[99] * 8])))
    rig.tree.ready_to_load_host_cache()
    rig.settle()
    assert rig.tree.protected_size() == 0
    assert rig.run(range(17)) == Reused(device=16)


def test_a_load_takes_what_fits_the_quota() -> None:
    rig = two_tiers()
    rig.run(range(8))
    rig.run(range(16))
    rig.settle()
    rig.tree.evict(EvictParams(num_tokens=32))
    match = rig.tree.match_prefix(MatchPrefixParams(RadixKey(list(range(16)))))
    assert match.host_hit_length == 16
    loaded, _ = rig.tree.init_load_back(InitLoadBackParams(match.best_match_node, 16, mem_quota=8))
    assert len(loaded) == 8
    rig.tree.ready_to_load_host_cache()
    rig.settle()


def test_a_load_does_not_evict_what_it_hangs_on() -> None:
    """L1 of 8 pages, full: 2 of the prefix, which is not locked, and 6 that were used later."""
    rig = two_tiers()
    for length in (8, 16):
        rig.run(range(length))
    rig.settle()
    rig.tree.evict(EvictParams(num_tokens=8))
    rig.run(range(100, 124))
    rig.settle()
    assert rig.allocator.available_size() == 0
    match = rig.tree.match_prefix(MatchPrefixParams(RadixKey(list(range(16)))))
    assert (len(match.device_indices), match.host_hit_length) == (8, 8)
    rig.tree.match_prefix(MatchPrefixParams(RadixKey(list(range(100, 124)))))
    loaded, _ = rig.tree.init_load_back(InitLoadBackParams(match.best_match_node, 8))
    assert len(loaded) == 8
    rig.tree.check_integrity()
    rig.tree.ready_to_load_host_cache()
    rig.settle()
    assert rig.run(range(17)) == Reused(device=16)


def test_pages_above_a_pinned_host_page_stay_if_l2_is_full() -> None:
    """Dropping them would drop the page below, which a transfer reads."""
    rig = two_tiers(16, hicache_ratio=1.0, hicache_write_policy="write_back")
    rig.run(range(32))
    rig.settle()
    (upper,) = rig.hi.tree.walk(RadixKey(range(16)))
    (lower,) = upper.children.values()
    rig.tree.evict(EvictParams(num_tokens=1))
    assert (upper.backuped, lower.backuped, lower.value) == (False, True, None)
    rig.hi.tree.host.pin(lower)
    taken = rig.hi.host_pool.alloc(rig.hi.host_pool.available_size())
    assert taken is not None
    assert rig.tree.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 0
    assert upper.value is not None and lower.parent is upper and lower.backuped
    rig.hi.host_pool.free(taken)
    rig.hi.tree.host.unpin(lower)
    rig.settle()
    rig.close()


def test_a_copy_does_not_evict_the_pages_before_it() -> None:
    """L2 of 10 pages and a prompt of 16 in four chunks: L2 keeps the first pages, and L3 has all
    that L2 has. Another prompt's pages leave for it."""
    rig = three_tiers(32, hicache_ratio=10 / 32)
    rig.run(range(100, 108))
    rig.settle()
    for end in (16, 32, 48, 64):
        rig.run(range(end))
    rig.settle()
    for tier in ("host", "store"):
        assert tokens_of(rig, range(64), tier) == [16, 16, 8, 0, 0], tier
    assert not any(node.backuped for node in rig.hi.tree.walk(RadixKey(list(range(100, 108)))))
    copied = rig.hi.metrics.host_written._value.get()
    rig.run(range(64))
    rig.settle()
    assert rig.hi.metrics.host_written._value.get() == copied, "a further use copies nothing"
    rig.flush()
    assert rig.run(range(65)) == Reused(storage=40), "two reads, each of half of L2"
    rig.settle()
    assert tokens_of(rig, range(64), "host") == [20, 20, 0]
    rig.close()


def test_a_copy_under_way_keeps_the_pages_before_it() -> None:
    """L2 of 6 pages has the first 3 of a prompt, the next 2 are on their way, and 2 more come."""
    rig = SteppedRig(l1_pages=32, settings=HiCacheSettings(hicache_ratio=6 / 32))
    rig.run(range(12))
    rig.settle()
    rig.run(range(20))
    rig.tick()
    assert rig.tree.is_busy() == {"writes": 1}
    rig.run(range(28))
    rig.settle()
    assert tokens_of(rig, range(28), "host") == [12, 8, 4, 0]
    rig.close()


def test_pages_of_a_node_that_find_no_room_are_counted() -> None:
    """L2 of 4 pages, a node of 6."""
    rig = two_tiers(16, hicache_ratio=4 / 16, hicache_write_policy="write_through_selective")
    rig.run(range(24))
    assert rig.hi.host_backup.back_up(rig.hi.tree.walk(RadixKey(list(range(24))))) == 8
    rig.settle()
    assert tokens_of(rig, range(24), "host") == [16, 0]
    rig.close()


def test_a_request_keeps_its_slots_if_its_copy_splits_pages_that_others_computed() -> None:
    """L2 has room for one of the first three pages, and a request has the same pages again."""
    rig = two_tiers(16, hicache_ratio=4 / 16)
    host = rig.hi.host_pool
    taken = host.alloc(host.size)
    assert taken is not None
    first, again = list(range(12)), [*range(12), *range(50, 62)]
    requests = [rig.start(ids)[0] for ids in (first, again)]
    rig.tree.cache_unfinished_req(requests[0])
    host.free(taken[:4])
    rig.tree.cache_unfinished_req(requests[1])
    assert tokens_of(rig, range(12), "host") == [0, 0], "the copy has begun"
    row = rig.rows.req_to_token[requests[1].req_pool_idx, : len(again)].to(torch.int64)
    rig.use_slots(row, len(again), expected_kv(again, None).to(row.device))
    assert torch.equal(requests[1].prefix_indices.cpu(), row.cpu())
    for request in requests:
        rig.finish(request)
    host.free(taken[4:])
    rig.settle()
    rig.close()
