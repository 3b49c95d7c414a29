"""Pages between L1 and L2: when they are copied, split under a copy, loaded, evicted."""

from __future__ import annotations

import random

import pytest

from rigs.caches.cache_rig import Reused
from rigs.caches.host_damage import host_pages
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
