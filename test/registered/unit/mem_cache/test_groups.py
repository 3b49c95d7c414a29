"""A model that compresses groups of tokens, in all tiers: whole groups have items of several
tokens, and the open group of a request is nowhere but in its row.

The rig checks every row, key and state where a request continues.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rigs.caches.cache_rig import HiCacheSettings, Reused
from rigs.caches.grouped_rig import GroupedRig, SteppedGroupedRig
from rigs.caches.random_runs import end_at_any_point, run_machine, run_over_moods
from rigs.caches.storage_rigs import PAGE, StorageRigs, assert_without_one_none, object_file
from rigs.caches.tiers_machine import StateTiers
from rigs.stores.object_store import IN_PLACE, PLAIN
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.host.host_layout import HostLayout
from sglang.srt.mem_cache.l2.host_backup import WRITE_POLICIES
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")
register_cuda_ci(est_time=30, suite="base-b-test-1-gpu-large")

PROMPT = [*range(40), 7]
"""Ten pages and a token."""
LAYOUTS = tuple(one.value for one in HostLayout if one is not HostLayout.PAGE_FIRST_KV_SPLIT)
PAGED = ("kv", "indexer", "c128")
POOLS = (*PAGED, "swa", "compressor")


def two_tiers(page_size: int = PAGE, **values: object) -> GroupedRig:
    made = HiCacheSettings(**values)  # type: ignore[arg-type]
    return GroupedRig(l1_pages=16, page_size=page_size, num_states=8, settings=made)


@pytest.mark.parametrize("page_size", [4, 8])
@pytest.mark.parametrize("policy", WRITE_POLICIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_go_to_the_host_and_come_back(layout: str, policy: str, page_size: int) -> None:
    rig = two_tiers(page_size, hicache_mem_layout=layout, hicache_write_policy=policy)
    for _ in range(2):
        rig.run(PROMPT)
        rig.settle()
    rig.tree.evict(EvictParams(num_tokens=10_000))
    rig.spoil()
    assert rig.run(PROMPT) == Reused(host=40)
    rig.settle()
    rig.close()


def test_a_prompt_within_a_group_publishes_whole_pages_alone() -> None:
    rig = two_tiers()
    for end in range(PAGE, 3 * PAGE + 1):
        rig.run(PROMPT[:end])
        rig.settle()
        whole = end // PAGE * PAGE
        assert max(node.depth for node in rig.tree.nodes()) == whole
        assert rig.match(PROMPT[: whole + 1]).device_indices.numel() == whole
    rig.close()


def test_open_groups_are_in_no_tier(rigs: StorageRigs, storage_dir: Path) -> None:
    rig = rigs.make("file", kind=GroupedRig)
    rig.run(PROMPT)
    rig.settle()
    assert list(rig.hi.cache_controller.mem_pool_host.entries) == list(POOLS)
    kinds = {path.name.partition("%2F")[2] for path in storage_dir.glob("*/??/*%2F*")}
    assert kinds == set(POOLS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_go_to_files_and_come_back(
    rigs: StorageRigs, storage_dir: Path, layout: str
) -> None:
    writer, reader = (
        rigs.make("file", kind=GroupedRig, hicache_mem_layout=layout) for _ in range(2)
    )
    writer.run(PROMPT)
    writer.settle()
    trailer = 32
    sizes = {
        pool: object_file(storage_dir, PROMPT, pool).stat().st_size - trailer for pool in PAGED
    }
    assert sizes == {"kv": 2 * 2 * 16, "indexer": 2 * 2 * 4, "c128": 16}
    assert reader.run(PROMPT) == Reused(storage=40)
    reader.settle()


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("trouble", ["lost", "damaged"])
def test_without_one_kind_none_is_served_and_all_heal(
    rigs: StorageRigs, storage_dir: Path, pool: str, trouble: str
) -> None:
    assert_without_one_none(rigs, GroupedRig, storage_dir, PROMPT, pool, trouble)


@pytest.mark.parametrize("seed", range(2))
def test_requests_may_end_at_any_point(rigs: StorageRigs, seed: int) -> None:
    rig = rigs.make("file", kind=GroupedRig)
    end_at_any_point(rig, seed, steps=40)
    rig.settle()


@pytest.mark.parametrize("backend", [PLAIN, IN_PLACE])
def test_all_kinds_are_right_whatever_the_store_does(backend: str) -> None:
    run_over_moods(GroupedRig, backend, 5, LAYOUTS, l1_pages=14)


class GroupedTiers(StateTiers):
    """`StateTiers` with items of several tokens, and open groups."""

    rig_class = SteppedGroupedRig


def test_any_order_of_requests_splits_evictions_and_landings() -> None:
    run_machine(GroupedTiers, 20)
