"""Writes of states to L3: what they hold of L1 and L2 while they last, and how they end."""

from __future__ import annotations

from typing import Final

import pytest

from rigs.caches.state_rig import StateRig
from rigs.caches.stepped_rig import SteppedStateRig
from rigs.caches.storage_rigs import StorageRigs
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

SHARED: Final = list(range(12))


def test_a_silent_store_leaves_half_of_the_states_of_l2_to_new_prompts(rigs: StorageRigs) -> None:
    """L2 has room for 128 pages and eight states; a prompt has two pages and a state."""
    rig = rigs.make(
        "file",
        l1_pages=512,
        kind=lambda **args: SteppedStateRig(num_states=32, **args),
        extra={"prefetch_threshold": 1000},
        hicache_ratio=0.25,
    )
    assert isinstance(rig, SteppedStateRig)
    assert rig.hi.tree.components[0].host.pool.size == 8
    for number in range(20):
        rig.run(range(100 * number, 100 * number + 9))
        rig.tick()
        rig.writes.run()
        rig.tick()
    nodes = sorted(rig.hi.nodes(), key=lambda node: node.creation_time)
    assert [node.host_ref_counter for node in nodes] == [1] * 4 + [0] * 16
    assert all(node.states[0].host_value is not None for node in nodes[-4:]), "the newest reach L2"
    assert rig.hi.is_busy() == {"backups": 20}, "all others wait until a write ends"
    rig.settle()
    assert all(rig.hi.storage_backup.has_stored(node) for node in (*nodes[:4], *nodes[-4:]))


def test_a_full_l2_says_what_it_is_full_of(
    rigs: StorageRigs, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rigs.make(
        "file", kind=lambda **args: StateRig(num_states=4, **args), l1_pages=8, hicache_ratio=1.0
    )
    for number, pool in enumerate((rig.hi.tree.components[0].host.pool, rig.hi.host_pool)):
        taken = pool.alloc(pool.available_size())
        assert taken is not None
        rig.run(range(100 * number, 100 * number + 9))
        pool.free(taken)
        rig.settle()
    said = [line.getMessage() for line in caplog.records if "full" in line.getMessage()]
    assert said == [
        "L2 is full of states in use; 8 tokens wait in L1 for room",
        "L2 is full of pages in use or of the same prompt; 8 tokens wait in L1 for room",
    ]


def test_pages_under_a_write_leave_l1_though_their_state_goes_with_them(rigs: StorageRigs) -> None:
    """The host has the pages, and the device alone the state: nothing waits for a slow store."""
    rig = rigs.make("file", kind=SteppedStateRig)
    rig.run([*SHARED, *range(100, 109)])
    rig.settle()
    assert rig.hi.tree.components[0].host.evict(1) == 1
    (node,) = rig.hi.nodes()
    rig.hi.store.forget_stored()
    assert rig.hi.write_backup_storage(node) is None
    assert rig.tree.evictable_size() == len(node.key) == 20
    assert rig.tree.evict(EvictParams(num_tokens=8)).num_tokens_evicted == 20
    assert rig.allocator.available_size() == rig.allocator.size
    assert (node.backuped, node.states[0].is_on_any_tier) == (True, False), "the write goes on"
    rig.tree.check_integrity()
    rig.settle()
    assert list(rig.hi.nodes()) == []


def test_the_end_of_a_write_takes_what_nothing_else_keeps_out_of_the_tree(
    rigs: StorageRigs,
) -> None:
    """Pages without a state, split while they are written, whose children have gone."""
    rig = rigs.make("file", kind=SteppedStateRig)
    assert isinstance(rig, SteppedStateRig)
    rig.run([*SHARED, *range(100, 109)])
    rig.match([*SHARED, 90])
    rig.settle()
    (shared,) = rig.hi.root_node.children.values()
    rig.hi.store.forget_stored()
    assert rig.hi.write_backup_storage(shared) is None
    rig.match([*SHARED[:4], 90])
    rig.tree.evict(EvictParams(num_tokens=1000))
    assert rig.hi.tree.components[0].host.evict(1) == 1
    assert not shared.children and not shared.states[0].is_on_any_tier, "the write alone keeps it"
    assert len(list(rig.hi.nodes())) == 2
    rig.settle()
    assert list(rig.hi.nodes()) == []
    assert rig.hi.host_pool.available_size() == rig.hi.host_pool.size
