"""Two kinds of state of a prefix: their slots are the same, and they move together, or not at all.

The rig checks both where a request continues, and every key and value.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rigs.caches.cache_rig import HiCacheSettings, Reused
from rigs.caches.random_runs import run_machine, run_over_moods
from rigs.caches.storage_rigs import StorageRigs, assert_without_one_none, object_file
from rigs.caches.tiers_machine import StateTiers
from rigs.caches.two_states_rig import SteppedTwoStatesRig, TwoStatesRig
from rigs.stores.object_store import IN_PLACE, PLAIN
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.l2.host_backup import WRITE_POLICIES
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")
register_cuda_ci(est_time=20, suite="base-b-test-1-gpu-large")

PROMPT = [*range(40), 7]
"""Ten pages and a token."""
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
POOLS = ("indexer", "mamba")
"""Pools of both kinds of state."""


def two_tiers(**values: object) -> TwoStatesRig:
    made = HiCacheSettings(**values)  # type: ignore[arg-type]
    return TwoStatesRig(l1_pages=16, num_states=8, settings=made)


def spoil(rig: TwoStatesRig) -> None:
    """Overwrite every state on the device."""
    for buffer in (*rig.slots.buffers, *rig.mamba.buffers):
        buffer.fill_(-1)


def test_a_request_continues_from_both_in_l1() -> None:
    rig = TwoStatesRig()
    rig.run(PROMPT)
    assert rig.run(PROMPT) == Reused(device=40)
    assert rig.run([*PROMPT[:12], 99]) == Reused(), "no state stands there"
    assert rig.run([*PROMPT[:12], 98]) == Reused(device=12)
    rig.check()


@pytest.mark.parametrize("policy", WRITE_POLICIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_go_to_the_host_and_come_back(layout: str, policy: str) -> None:
    rig = two_tiers(hicache_mem_layout=layout, hicache_write_policy=policy)
    for _ in range(2):
        rig.run(PROMPT)
        rig.settle()
    rig.tree.evict(EvictParams(num_tokens=10_000))
    spoil(rig)
    assert rig.run(PROMPT) == Reused(host=40)
    rig.settle()
    rig.close()


def test_both_come_back_alone_to_pages_that_are_there() -> None:
    rig = two_tiers()
    rig.run(PROMPT)
    rig.settle()
    assert rig.tree.evict(EvictParams(mamba_num=1)).mamba_num_evicted == 1
    spoil(rig)
    assert rig.run(PROMPT) == Reused(device=40)
    rig.settle()
    rig.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_go_to_files_and_come_back(rigs: StorageRigs, storage_dir: Path, layout: str) -> None:
    writer, reader = (
        rigs.make("file", kind=TwoStatesRig, hicache_mem_layout=layout) for _ in range(2)
    )
    writer.run(PROMPT)
    writer.settle()
    assert all(object_file(storage_dir, PROMPT, pool).is_file() for pool in POOLS)
    assert reader.run(PROMPT) == Reused(storage=40)
    reader.settle()


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("trouble", ["lost", "damaged"])
def test_without_one_of_them_neither_is_served_and_both_heal(
    rigs: StorageRigs, storage_dir: Path, pool: str, trouble: str
) -> None:
    assert_without_one_none(rigs, TwoStatesRig, storage_dir, PROMPT, pool, trouble)


@pytest.mark.parametrize("backend", [PLAIN, IN_PLACE])
def test_both_are_right_whatever_the_store_does(backend: str) -> None:
    run_over_moods(TwoStatesRig, backend, 5, LAYOUTS, l1_pages=14)


class TwoStatesTiers(StateTiers):
    """`StateTiers` with two kinds of state in each slot."""

    rig_class = SteppedTwoStatesRig


def test_any_order_of_requests_splits_evictions_and_landings() -> None:
    run_machine(TwoStatesTiers, 20)
