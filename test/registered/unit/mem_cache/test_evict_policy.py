"""Orders of eviction: the heap gives the order that a scan of all candidates would."""

from __future__ import annotations

import random

import pytest

from rigs.caches.cache_rig import CacheRig
from rigs.call_counts import CallCounts
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.evict_policy import EvictionHeap, get_eviction_strategy
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

POLICIES = ["lru", "lfu", "fifo", "mru", "filo", "priority", "slru"]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_of_all_candidates_leaves(policy: str) -> None:
    """Nodes move forward and backward; some are no candidates at times."""
    rng = random.Random(policy)
    strategy = get_eviction_strategy(policy)
    nodes = [TreeNode(number, RadixKey([number])) for number in range(1, 61)]
    candidates: set[TreeNode] = set()
    heap = EvictionHeap(strategy, candidates.__contains__)
    for now in range(3000):
        node = rng.choice(nodes)
        node.last_access_time = now
        node.hit_count += rng.random() < 0.3
        node.priority = rng.choice([node.priority, rng.randrange(3)])
        node.kept_on_device = rng.randrange(2)
        node.wanted_by = [rng.randrange(9)] if rng.random() < 0.2 else []
        heap.refresh(node)
        if rng.random() < 0.5:
            candidates.symmetric_difference_update({node})
            (heap.offer if node in candidates else heap.discard)(node)
        if candidates and rng.random() < 0.1:
            first = min(candidates, key=lambda one: (strategy.eviction_order(one), one.id))
            assert heap.pop() is first
            candidates.discard(first)
        for one in nodes:
            heap.check(one)
        assert len(heap) == len(candidates)


def test_a_node_that_was_used_since_waits_for_its_turn() -> None:
    """Use moves nodes backward, with or without a word to the heap."""
    nodes = [TreeNode(number, RadixKey([number])) for number in range(1, 31)]
    heap = EvictionHeap(get_eviction_strategy("lru"), nodes.__contains__)
    for node in nodes:
        node.last_access_time = node.id
        heap.offer(node)
    for node in nodes[:10]:
        node.last_access_time = 100 - node.id
    assert [heap.pop() for _ in nodes] == [*nodes[10:], *nodes[9::-1]]
    assert heap.pop() is None


# ---- costs, as counts of calls -------------------------------------------------------------------


def used_tree(leaves: int, policy: str) -> CacheRig:
    """A tree of prompts with one common page, each used again in ticks since it came."""
    rig = CacheRig(l1_pages=2 * leaves + 8, page_size=1, eviction_policy=policy)
    prompts = [[0, 1 + number, 1] for number in range(leaves)]
    for ids in prompts:
        rig.run(ids)
    for ids in prompts:
        rig.tree.begin_tick(0.0)
        rig.tree.match_prefix(MatchPrefixParams(RadixKey(ids)))
        rig.run(ids)
    rig.tree.begin_tick(0.0)
    return rig


@pytest.mark.parametrize("policy", POLICIES)
def test_an_eviction_pays_for_no_other_node(policy: str) -> None:
    """All nodes were used since the last eviction, and yet the first one costs the same in a small
    tree and in a large one."""
    counts = []
    for leaves in (8, 200):
        rig = used_tree(leaves, policy)
        with CallCounts() as calls:
            rig.tree.evict(EvictParams(num_tokens=1))
        counts.append(calls.total)
        rig.tree.check_integrity()
    small, large = counts
    assert large <= small + 10
