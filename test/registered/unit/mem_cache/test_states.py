"""Recurrent states through L1, L2 and L3, beside the pages that they stand behind.

The rig checks every state that a request continues from, and every key and value.
"""

from __future__ import annotations

import gc

import pytest
import torch

from rigs.caches.cache_rig import HeldStream, HiCacheSettings, Reused
from rigs.caches.state_rig import StateRig, depth
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams
from sglang.srt.mem_cache.l2.host_backup import WRITE_POLICIES
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

LAYOUTS = ("layer_first", "page_first", "page_first_direct")
EVERYTHING = EvictParams(num_tokens=10_000)


def two_tiers(l1_pages: int = 16, num_states: int = 8, **settings: object) -> StateRig:
    return StateRig(
        l1_pages=l1_pages,
        num_states=num_states,
        settings=HiCacheSettings(**settings),  # type: ignore[arg-type]
    )


def by_depth(rig: StateRig) -> dict[int, TreeNode]:
    return {depth(node): node for node in rig.tree.nodes()}


# -- down and up ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", WRITE_POLICIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_and_state_go_to_the_host_and_come_back(layout: str, policy: str) -> None:
    rig = two_tiers(hicache_mem_layout=layout, hicache_write_policy=policy)
    for _ in range(2):
        rig.run(range(21))
        rig.settle()
    rig.tree.evict(EVERYTHING)
    (node,) = rig.tree.nodes()
    assert (node.value, node.states[0].value) == (None, None)
    assert node.states[0].host_value is not None
    rig.mamba.temporal.fill_(-1)
    assert rig.run(range(21)) == Reused(host=20)
    rig.settle()
    rig.close()


def test_a_state_alone_comes_back_to_pages_that_are_there() -> None:
    rig = two_tiers()
    rig.run(range(21))
    rig.settle()
    assert rig.tree.evict(EvictParams(mamba_num=1)).num_tokens_evicted == 0, "L2 has it"
    match = rig.match(range(21))
    assert (len(match.device_indices), match.host_hit_length) == (20, 0)
    assert match.mamba_host_hit_length == 1
    rig.mamba.temporal.fill_(-1)
    assert rig.run(range(21)) == Reused(device=20)
    rig.settle()
    rig.close()


@pytest.mark.parametrize("policy", WRITE_POLICIES)
def test_prompts_that_come_and_go_leave_nothing_behind(policy: str) -> None:
    """L1 has room for two of them, L2 for four; most nodes leave an order that they were not
    evicted by."""
    rig = two_tiers(l1_pages=12, num_states=4, hicache_ratio=2.0, hicache_write_policy=policy)
    for number in range(200):
        rig.run(range(100 * number, 100 * number + 21))
        rig.settle()
    left = [node for node in gc.get_objects() if type(node) is TreeNode]
    digest = rig.hi.root_node.tree_digest
    assert sum(getattr(node, "tree_digest", None) is digest for node in left) < 100
    rig.close()


def test_a_node_that_gains_its_state_later_writes_the_state_alone() -> None:
    rig = two_tiers(l1_pages=32)
    shared = list(range(12))
    rig.run([*shared, *range(100, 109)])
    rig.settle()
    rig.run([*shared, *range(200, 209)])
    rig.settle()
    node = by_depth(rig)[12]
    assert node.states[0].host_value is not None
    rig.tree.evict(EVERYTHING)
    assert rig.run([*shared, 300]) == Reused(host=12)
    rig.settle()
    rig.close()


def test_a_state_that_comes_while_its_pages_are_on_their_way_is_written_when_they_landed() -> None:
    rig = two_tiers(l1_pages=32)
    controller = rig.hi.cache_controller
    controller._write_stream.close()
    held = HeldStream()
    controller._write_stream = held  # type: ignore[assignment]
    shared = list(range(12))
    rig.run([*shared, *range(100, 109)])
    rig.tick()
    rig.run([*shared, *range(200, 209)])
    node = by_depth(rig)[12]
    assert node.states[0].value is not None
    assert node.write_id is not None
    held.at_once = True
    held.run()
    rig.settle()
    assert node.states[0].host_value is not None
    rig.close()


def test_a_state_that_is_being_copied_is_not_copied_again() -> None:
    rig = two_tiers(l1_pages=32)
    shared = list(range(12))
    rig.run([*shared, *range(100, 109)])
    rig.match([*shared, 90])
    rig.settle()
    controller = rig.hi.cache_controller
    controller._write_stream.close()
    held = HeldStream()
    controller._write_stream = held  # type: ignore[assignment]
    node = by_depth(rig)[12]
    assert node.backuped and not node.states[0].is_on_any_tier
    rig.run([*shared, 300])
    assert (node.states[0].lock_ref, rig.tree.is_busy()) == (1, {"writes": 1})
    for _ in range(2):
        rig.run([*shared, 300])
        assert (node.states[0].lock_ref, rig.tree.is_busy()) == (1, {"writes": 1})
    held.at_once = True
    held.run()
    rig.settle()
    assert node.states[0].host_value is not None
    rig.close()


def test_nothing_of_a_copy_is_visible_before_all_of_it_has_landed() -> None:
    rig = two_tiers()
    controller = rig.hi.cache_controller
    controller._write_stream.close()
    held = HeldStream()
    controller._write_stream = held  # type: ignore[assignment]
    rig.run(range(21))
    rig.tick()
    (node,) = rig.tree.nodes()
    assert (node.host_value, node.states[0].host_value) == (None, None)
    result = rig.tree.evict(EvictParams(num_tokens=100, mamba_num=5))
    assert (result.num_tokens_evicted, result.mamba_num_evicted) == (0, 0), "it is copied from"
    held.run()
    rig.settle()
    assert node.backuped
    assert node.states[0].host_value is not None
    rig.close()


def test_a_state_that_is_being_loaded_is_copied_after_the_load_has_been_started() -> None:
    rig = two_tiers()
    rig.run(range(21))
    rig.settle()
    rig.tree.evict(EVERYTHING)
    rig.mamba.temporal.fill_(-1)
    match = rig.match(range(21))
    rig.tree.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length))
    assert rig.match(range(21)).mamba_host_hit_length == 1, "queued"
    assert rig.run(range(21)) == Reused(device=20)
    rig.settle()
    assert rig.match(range(21)).mamba_host_hit_length == 0
    rig.close()


# -- room ----------------------------------------------------------------------------------------


def test_a_backup_takes_room_for_pages_and_state_or_for_none() -> None:
    rig = two_tiers(hicache_ratio=1.0, num_states=4)
    rig.run(range(21))
    rig.settle()
    pool = rig.states.host.pool
    (node,) = rig.tree.nodes()
    rig.hi.tree.host.pin(node)
    taken = pool.alloc(pool.available_size())
    assert taken is not None
    before = rig.hi.host_pool.available_size()
    rig.run(range(100, 121))
    assert rig.hi.host_pool.available_size() == before
    other = next(one for one in rig.tree.nodes() if one is not node)
    assert (other.backuped, other.lock_ref, other.states[0].lock_ref) == (False, 0, 0)
    pool.free(taken)
    rig.hi.tree.host.unpin(node)
    rig.settle()
    rig.close()


def test_host_states_are_evicted_by_an_order_of_their_own() -> None:
    rig = two_tiers(l1_pages=64, num_states=4, hicache_ratio=1.0)
    for base in range(0, 600, 100):
        rig.run(range(base, base + 9))
        rig.settle()
    assert rig.states.host.pool.available_size() == 0
    on_host = [node.states[0].host_value is not None for node in rig.tree.nodes()]
    assert sum(on_host) == 4
    rig.tree.evict(EvictParams(mamba_num=4))
    assert sorted(int(node.key.ids[0]) for node in rig.tree.nodes()) == [200, 300, 400, 500], (
        "what has no state on any tier has gone"
    )
    rig.settle()
    rig.close()


def test_a_host_leaf_without_its_state_goes_and_so_does_what_it_leaves() -> None:
    rig = two_tiers(l1_pages=32)
    rig.run([*range(12), *range(100, 109)])
    rig.match([*range(8), 90, 91, 92, 93])
    rig.settle()
    rig.tree.evict(EVERYTHING)
    assert sorted(by_depth(rig)) == [8, 20]
    assert rig.states.host.evict(1) == 1
    assert list(rig.tree.nodes()) == []
    assert rig.hi.host_pool.available_size() == rig.hi.host_pool.size
    rig.settle()
    rig.close()


def test_a_host_node_with_any_child_is_no_leaf() -> None:
    """Its child is on the device alone; the pages that it hangs on stay on the host."""
    rig = two_tiers(l1_pages=32)
    rig.run(range(9))
    rig.settle()
    rig.hi.host_backup.write_policy = "write_back"
    rig.run([*range(8), *range(100, 109)])
    rig.settle()
    parent, child = by_depth(rig)[8], by_depth(rig)[16]
    assert (parent.host_children, child.backuped) == (0, False)
    assert rig.states.host.evict(1) == 1
    assert rig.tree.evict(EvictParams(mamba_num=1)).mamba_num_evicted == 1
    assert not parent.states[0].is_on_any_tier
    assert parent.backuped
    rig.settle()
    rig.close()


def test_a_load_takes_room_for_pages_and_state_or_for_none() -> None:
    rig = two_tiers(num_states=3)
    rig.run(range(21))
    rig.settle()
    rig.tree.evict(EVERYTHING)
    held = rig.mamba.take(3)
    assert held is not None
    before = rig.allocator.available_size()
    match = rig.match(range(21))
    params = InitLoadBackParams(match.best_match_node, match.host_hit_length)
    slots, node = rig.tree.init_load_back(params)
    assert (len(slots), node) == (0, rig.tree.root_node)
    assert rig.allocator.available_size() == before
    (node,) = rig.tree.nodes()
    assert node.host_ref_counter == 0
    rig.mamba.free(held)
    taken = rig.allocator.alloc(before)
    assert taken is not None
    slots, node = rig.tree.init_load_back(params)
    assert (len(slots), node) == (0, rig.tree.root_node)
    assert rig.mamba.available_size() == 3
    rig.allocator.free(taken)
    rig.settle()
    rig.close()


def test_a_load_that_finds_no_room_ends_at_the_last_state_on_the_device() -> None:
    rig = two_tiers(l1_pages=32)
    rig.run(range(9))
    rig.run([*range(8), *range(100, 113)])
    rig.settle()
    rig.match([*range(8), *range(100, 104), 7])
    deep = by_depth(rig)[20]
    rig.tree.evict(EvictParams(num_tokens=8))
    assert deep.evicted
    taken = rig.allocator.alloc(rig.allocator.available_size())
    assert taken is not None
    match = rig.match([*range(8), *range(100, 113)])
    assert (len(match.device_indices), match.host_hit_length) == (12, 8)
    rig.tree.inc_lock_ref(match.last_device_node)
    params = InitLoadBackParams(match.best_match_node, match.host_hit_length)
    _, node = rig.tree.init_load_back(params)
    assert depth(node) == 8, "twelve tokens are on the device, and the state behind eight"
    rig.tree.dec_lock_ref(match.last_device_node)
    rig.allocator.free(taken)
    rig.settle()
    rig.close()


def test_a_quota_shortens_a_load_to_a_prefix_with_a_state() -> None:
    rig = two_tiers(l1_pages=32)
    rig.run(range(9))
    rig.run(range(21))
    rig.settle()
    rig.match([*range(12), 90, 91, 92, 93])
    rig.tree.evict(EVERYTHING)
    assert sorted(by_depth(rig)) == [8, 12, 20]
    match = rig.match(range(21))
    params = InitLoadBackParams(match.best_match_node, match.host_hit_length, mem_quota=16)
    slots, node = rig.tree.init_load_back(params)
    assert (len(slots), depth(node)) == (8, 8)
    rig.tree.ready_to_load_host_cache()
    rig.settle()
    rig.close()


@pytest.mark.parametrize("cut", [4, 8, 12, 16])
def test_a_split_under_a_copy_leaves_the_state_with_the_lower_part(cut: int) -> None:
    rig = two_tiers()
    controller = rig.hi.cache_controller
    for name in ("_write_stream", "_load_stream"):
        getattr(controller, name).close()
        setattr(controller, name, HeldStream())
    rig.run(range(21))
    rig.tick()
    rig.match([*range(cut), 90, 91, 92, 93])
    controller._write_stream.run()  # type: ignore[attr-defined]
    rig.settle()
    nodes = by_depth(rig)
    assert nodes[20].states[0].host_value is not None
    assert nodes[cut].states[0].host_value is None
    assert nodes[cut].backuped
    rig.tree.evict(EVERYTHING)
    match = rig.match(range(21))
    rig.tree.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length))
    rig.tree.ready_to_load_host_cache()
    rig.match([*range(20 - cut), 90, 91, 92, 93])
    assert rig.states.host.evict(5) == 0, "it is copied from"
    assert rig.tree.evict(EvictParams(mamba_num=5)).mamba_num_evicted == 0, "it is copied to"
    controller._load_stream.run()  # type: ignore[attr-defined]
    rig.settle()
    assert rig.tree.protected_size() == 0
    rig.close()


def test_write_back_saves_the_state_of_a_leaf_whose_state_is_evicted() -> None:
    rig = two_tiers(hicache_write_policy="write_back")
    rig.run(range(21))
    result = rig.tree.evict(EvictParams(mamba_num=1))
    assert (result.mamba_num_evicted, result.num_tokens_evicted) == (1, 20)
    assert rig.run(range(21)) == Reused(host=20)
    rig.settle()
    rig.close()


def test_write_back_saves_no_leaf_whose_state_finds_no_room() -> None:
    rig = two_tiers(hicache_write_policy="write_back")
    rig.run(range(21))
    states = rig.states.host.pool
    taken = states.alloc(states.available_size())
    assert taken is not None
    assert rig.tree.evict(EvictParams(num_tokens=20)).num_tokens_evicted == 20
    assert rig.hi.host_pool.available_size() == rig.hi.host_pool.size
    assert not rig.hi.metrics.flows()["written"], "pages that no state can continue"
    states.free(taken)
    assert rig.run(range(21)) == Reused()
    rig.settle()
    rig.close()


def test_integrity_names_a_lost_host_state() -> None:
    rig = two_tiers()
    lost = rig.states.host.pool.alloc(1)
    with pytest.raises(AssertionError, match="states on the host: 1 of 32"):
        rig.tree.check_integrity()
    assert lost is not None
    rig.states.host.pool.free(lost)
    rig.close()


def test_slots_of_the_tree_are_known_to_the_cpu() -> None:
    """Freeing one must not wait for the device."""
    rig = two_tiers()
    rig.run(range(21))
    rig.settle()
    (node,) = rig.tree.nodes()
    for slot in (node.states[0].value, node.states[0].host_value):
        assert isinstance(slot, torch.Tensor)
        assert slot.is_cpu
    rig.close()
