"""Slots of one pool on one tier: who keeps a second one, and what the self check names."""

from __future__ import annotations

import pytest
import torch

from rigs.caches.cache_rig import CacheRig, HiCacheSettings
from rigs.caches.state_rig import StateRig
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.tree import pool_tier
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.srt.utils.parts import do_all
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


def on_both_tiers() -> tuple[StateRig, TreeNode]:
    """A rig with one node: its pages and its state are in L1 and L2."""
    rig = StateRig(page_size=4, settings=HiCacheSettings(hicache_ratio=2.0))
    rig.run(range(9))
    rig.settle()
    (node,) = rig.tree.nodes()
    assert node.backuped and node.states[0].value is not None
    assert node.states[0].host_value is not None
    return rig, node


def test_a_second_host_slot_goes_back_to_its_pool() -> None:
    rig, node = on_both_tiers()
    host, first = rig.states.host, node.states[0].host_value
    second = host.alloc(1)
    assert second is not None
    assert host.put(node, second) is False
    assert node.states[0].host_value is first
    rig.tree.check_integrity()


@pytest.mark.parametrize(("has_device_state", "time"), [(False, 50), (True, 7)])
def test_a_host_state_alone_has_the_time_of_its_pages(has_device_state: bool, time: int) -> None:
    """Else it keeps the time at which a match last ended there."""
    rig, node = on_both_tiers()
    host, state = rig.states.host, node.states[0]
    host.drop(node)
    if not has_device_state:
        rig.states.device.drop(node)
    node.last_access_time, state.last_access_time = 50, 7
    slot = host.alloc(1)
    assert slot is not None and host.put(node, slot)
    assert state.last_access_time == time


def test_a_pin_on_the_host_keeps_no_condemned_page_on_the_device() -> None:
    """Else its slots count as evictable, and no eviction finds them."""
    rig, node = on_both_tiers()
    tree, slots = rig.tree.tree, node.value
    assert slots is not None
    free = rig.allocator.available_size()
    tree.host.pin(node)
    tree.condemn(node, 0)
    assert rig.allocator.available_size() == free + len(slots)
    assert rig.tree.evictable_size() == 0
    assert node.host_value is not None
    rig.tree.check_integrity()
    tree.host.unpin(node)
    assert node.host_value is None
    rig.tree.check_integrity()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize(("wanted", "leaving"), [(4, 8), (10, 12), (24, 24), (25, 32)])
def test_an_eviction_takes_the_last_pages_of_a_long_node(
    policy: str, wanted: int, leaving: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least 8 tokens leave, and at least 8 stay, unless all must leave."""
    monkeypatch.setattr(pool_tier, "LEAST_LEAVING", 8)
    settings = HiCacheSettings(hicache_ratio=2.0, hicache_write_policy=policy)
    rig = CacheRig(page_size=4, settings=settings)
    for _ in range(2):
        rig.run(range(33))
        rig.settle()
    free = rig.allocator.available_size()
    assert rig.tree.evict(EvictParams(num_tokens=wanted)).num_tokens_evicted == leaving
    assert rig.allocator.available_size() == free + leaving
    rig.tree.check_integrity()
    reused = rig.run(range(33))
    assert (reused.device, reused.host) == (32 - leaving, leaving)
    rig.settle()
    rig.tree.check_integrity()


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_state_without_its_pages_is_named(tier: str) -> None:
    rig, node = on_both_tiers()
    pages = getattr(rig.tree.tree, tier)
    slots = pages.get(node)
    getattr(node, "set_value" if tier == "device" else "set_host_value")(None)
    owned = [("the test", slots)]
    with pytest.raises(AssertionError, match=f"mamba states on the {tier}.*without others"):
        do_all(pages.check([node], owned))


@pytest.mark.parametrize("tier", ["device", "host"])
def test_slots_that_no_eviction_would_find_are_named(tier: str) -> None:
    rig, node = on_both_tiers()
    for owner in (rig.tree.tree, rig.states):
        slots: torch.Tensor | None = getattr(owner, tier).get(node)
        assert slots is not None
        getattr(owner, tier).heap.discard(node)
        with pytest.raises(AssertionError, match="is not offered"):
            rig.tree.check_integrity()
        getattr(owner, tier).heap.offer(node)
        rig.tree.check_integrity()
