"""All who keep a node of the tree are told when it leaves, for whatever reason."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from rigs.caches.cache_rig import SESSION_TTL, CacheRig, HiCacheSettings
from rigs.caches.state_rig import StateRig
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

PAGE = 4
AGENT = list(range(1, 18))
"""Four pages and a token."""


class Recorder:
    """A keeper that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[TreeNode] = []

    def on_delete(self, node: TreeNode) -> None:
        assert node.is_in_tree and not node.children
        self.told.append(node)

    def on_reset(self, nodes: Sequence[TreeNode]) -> None:
        self.told += nodes


def rig_of(kind: type[CacheRig] = CacheRig, policy: str = "write_through") -> CacheRig:
    settings = HiCacheSettings(hicache_ratio=1.5 + 0.5 / 24, hicache_write_policy=policy)
    return kind(l1_pages=24, page_size=PAGE, settings=settings, session_share=0.5, kv_events=True)


def change(rig: CacheRig, rng: random.Random) -> None:
    """Something that may take nodes out of the tree."""
    what = rng.random()
    if what < 0.5:
        shared = [rng.randrange(2) for _ in range(2 * PAGE)]
        ids = [*shared[: rng.randrange(2 * PAGE)], *range(rng.randrange(1, 12)), 99]
        rig.run(ids, session=f"s{rng.randrange(6)}" if rng.random() < 0.6 else None)
    elif what < 0.65:
        rig.tree.evict(EvictParams(num_tokens=rng.randrange(40)))
    elif what < 0.75:
        rig.hi.evict_host(rng.randrange(40))
    elif what < 0.95:
        nodes = [node for node in rig.tree.nodes() if not node.lock_ref]
        if nodes:
            node = rng.choice(nodes)
            rig.tree.tree.condemn(node, rng.randrange(len(node.key) // PAGE) * PAGE)
    else:
        rig.flush()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("kind", [CacheRig, StateRig])
def test_every_node_that_leaves_is_told_once(kind: type[CacheRig], policy: str) -> None:
    rng = random.Random(kind.__name__ + policy)
    rig = rig_of(kind, policy)
    recorder = Recorder()
    rig.tree.tree.keepers.append(recorder)
    ever: dict[int, TreeNode] = {}
    count = 0
    for tick in range(120):
        rig.tree.begin_tick(tick * SESSION_TTL / 20)
        change(rig, rng)
        rig.settle()
        there = {node.id: node for node in rig.tree.nodes()}
        told = {node.id for node in recorder.told}
        assert len(told) == len(recorder.told) and not told & there.keys()
        assert all(node_id in told for node_id in ever.keys() - there.keys())
        if told and not there:
            # After a flush ids begin anew.
            count += len(told)
            ever, recorder.told = {}, []
        ever |= there
    assert count > 40
    rig.close()


@pytest.mark.parametrize("begin", [0, 2 * PAGE])
def test_a_session_ends_where_its_prefix_was_condemned(begin: int) -> None:
    """Condemned nodes in use are not freed at once, and nobody keeps them then."""
    rig = rig_of(StateRig)
    tree = rig.tree.tree
    rig.run(AGENT, session="agent")
    rig.settle()
    match = rig.tree.match_prefix(MatchPrefixParams(RadixKey(AGENT)))
    node = match.last_device_node
    rig.tree.note_waiting("waits", 0, node)
    rig.tree.inc_lock_ref(node)
    assert tree.sessions.tiers[1].tokens == 4 * PAGE
    tree.condemn(node, begin)
    rig.tree.check_integrity()
    kept = [node.kept_on_host, *(state.kept_on_host for state in node.states), *node.wanted_by]
    assert node.is_condemned and not any(kept)
    assert tree.sessions.tiers[1].tokens == begin
    rig.tree.note_scheduled("waits")
    rig.tree.dec_lock_ref(node)
    # Without a state at its end, the front is of no use to anybody.
    assert tree.sessions.tiers[1].tokens == 0 and not list(rig.tree.nodes())
    rig.run(AGENT, session="agent")
    rig.tree.evict(EvictParams(num_tokens=1000))
    rig.hi.evict_host(1000)
    rig.settle()
    rig.close()


def test_a_condemned_prefix_counts_as_departed() -> None:
    rig = CacheRig(l1_pages=48, page_size=PAGE)
    ids = list(range(130))
    rig.run(ids)
    (node,) = rig.tree.nodes()
    rig.tree.tree.condemn(node, 0)
    assert rig.tree.tree.departed.reach(RadixKey(ids), 0) == 128
    rig.tree.check_integrity()


def test_a_session_keeps_what_comes_before_the_damage() -> None:
    rig = rig_of()
    rig.run(AGENT, session="agent")
    rig.settle()
    (node,) = rig.tree.nodes()
    rig.tree.tree.condemn(node, 2 * PAGE)
    assert rig.tree.tree.sessions.tiers[1].tokens == 2 * PAGE
    rig.tree.check_integrity()
    rig.tree.evict(EvictParams(num_tokens=1000))
    rig.hi.evict_host(1000)
    assert rig.tree.tree.sessions.tiers[1].tokens == 0
    rig.settle()
    rig.close()


def test_a_write_that_waits_is_given_up_with_its_node() -> None:
    settings = HiCacheSettings(hicache_ratio=2.0)
    rig = CacheRig(l1_pages=24, page_size=PAGE, settings=settings)
    rig.run(AGENT)
    rig.settle()
    (node,) = rig.tree.nodes()
    writes = rig.hi.storage_backup
    writes.postponed[node.id] = node
    rig.tree.tree.condemn(node, 0)
    assert not writes.postponed
    rig.settle()
    rig.close()
