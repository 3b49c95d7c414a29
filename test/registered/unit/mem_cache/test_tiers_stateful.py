"""The three tiers against a dict of pages: any order of requests, splits, evictions and landings.

Copies and transfers happen when a rule says so, never beside it, so that a run is decided by its
seed alone: a node can be split, evicted or matched at every page under a write, a load, a backup
and a prefetch. The rig's made-up KV shows a wrong byte, `check_integrity` a wrong owner.
A failure prints its steps; the line with `reproduce_failure` repeats it.
"""

from __future__ import annotations

import json

import pytest

from rigs.caches.cache_rig import HiCacheSettings, Reused
from rigs.caches.random_runs import run_machine
from rigs.caches.stepped_rig import SteppedRig
from rigs.caches.tiers_machine import StateTiers, Tiers
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=9, suite="base-a-test-cpu")
register_cuda_ci(est_time=20, suite="base-b-test-1-gpu-large")

EXAMPLES = 30
"""The nightly profile beside this file sets more."""


@pytest.mark.parametrize("kind", [Tiers, StateTiers])
def test_any_order_of_requests_splits_evictions_and_landings(kind: type[Tiers]) -> None:
    run_machine(kind, EXAMPLES)


# -- a split at every page, under every kind of operation ----------------------------------------

PAGES = 6
CUTS = range(1, PAGES)


def stepped(storage: str | None = "file") -> SteppedRig:
    return SteppedRig(
        l1_pages=16,
        page_size=2,
        settings=HiCacheSettings(
            hicache_ratio=2.0,
            hicache_storage_backend=storage,
            hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": 2}),
        ),
    )


def pages_of(count: int) -> list[int]:
    """A prompt whose `count` first pages can be reused."""
    return list(range(2 * count + 1))


def split_at(rig: SteppedRig, cut: int) -> None:
    match = rig.hi.match_prefix(MatchPrefixParams(RadixKey([*range(2 * cut), 99, 99])))
    assert len(match.best_match_node.key) <= 2 * cut
    rig.hi.check_integrity()


def everything(rig: SteppedRig) -> EvictParams:
    return EvictParams(num_tokens=rig.allocator.size)


def used_host_pages(rig: SteppedRig) -> int:
    return (rig.hi.host_pool.size - rig.hi.host_pool.available_size()) // rig.page_size


@pytest.mark.parametrize("cut", CUTS)
def test_a_split_under_a_write(cut: int) -> None:
    rig = stepped(storage=None)
    rig.run(pages_of(PAGES))
    rig.tick()
    split_at(rig, cut)
    assert rig.hi.evict(everything(rig)).num_tokens_evicted == 0, "it is being copied from"
    # Used again meanwhile, neither part is written a second time.
    request, _ = rig.start(pages_of(cut))
    rig.finish(request)
    rig.settle()
    assert used_host_pages(rig) == PAGES
    assert rig.hi.evict(everything(rig)).num_tokens_evicted == 2 * PAGES
    assert rig.run(pages_of(PAGES)) == Reused(host=2 * PAGES)
    rig.settle()


@pytest.mark.parametrize("cut", CUTS)
def test_a_split_under_a_load(cut: int) -> None:
    rig = stepped(storage=None)
    rig.run(pages_of(PAGES))
    rig.settle()
    rig.hi.evict(everything(rig))
    match = rig.hi.match_prefix(MatchPrefixParams(RadixKey(pages_of(PAGES))))
    rig.hi.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length))
    split_at(rig, cut)
    assert rig.hi.evict_host(1000) == 0, "it is being copied from"
    assert rig.hi.evict(everything(rig)).num_tokens_evicted == 0, "it is being copied to"
    rig.settle()
    assert rig.hi.protected_size() == 0
    assert rig.hi.evict_host(1000) == 2 * PAGES
    assert rig.run(pages_of(PAGES)) == Reused(device=2 * PAGES)
    rig.settle()


@pytest.mark.parametrize("cut", CUTS)
def test_a_split_under_a_backup_loses_no_page(cut: int) -> None:
    rig = stepped()
    rig.run(pages_of(PAGES))
    rig.tick()
    rig.writes.run()
    rig.tick()
    assert rig.hi.is_busy() == {"backups": 1}
    split_at(rig, cut)
    assert rig.hi.evict(everything(rig)).num_tokens_evicted == 2 * PAGES
    assert rig.hi.evict_host(1000) == 0, "it is being read from"
    rig.run(pages_of(cut))
    rig.settle()
    stored = sum(len(node.key) for node in rig.hi.nodes() if node.storage_epoch == 0)
    assert stored == 2 * PAGES
    assert rig.hi.metrics.backup_outcomes.labels("landed")._value.get() == 1, "and once"
    assert rig.hi.evict_host(1000) == 2 * PAGES
    rig.flush()
    assert rig.run(pages_of(PAGES)) == Reused(storage=2 * PAGES)


@pytest.mark.parametrize("cut", CUTS)
def test_a_split_under_a_prefetch_loses_no_page(cut: int) -> None:
    """The read continues a node of two pages; others bring pages of it meanwhile, or cut there."""
    writer, rig = stepped(), stepped()
    writer.run(pages_of(PAGES))
    writer.settle()
    rig.run(pages_of(2))
    rig.settle()
    rig.arrive("r", pages_of(PAGES))
    assert rig.hi.is_busy()["prefetches"] == 1
    rig.run([*range(2 * cut), 99, 99, 7])
    split_at(rig, min(cut, 2))
    rig.prefetches(None)
    rig.tick()
    assert rig.hi.check_prefetch_progress("r")
    request, reused = rig.admit("r", pages_of(PAGES))
    known = max(cut, 2)
    assert reused == Reused(device=2 * known, storage=2 * (PAGES - known))
    rig.finish(request)
    rig.settle()


def test_what_a_prefetch_continues_leaves_meanwhile() -> None:
    writer, rig = stepped(), stepped()
    writer.run(pages_of(PAGES))
    writer.settle()
    rig.run(pages_of(2))
    rig.settle()
    rig.arrive("r", pages_of(PAGES))
    rig.hi.evict(everything(rig))
    rig.hi.evict_host(1000)
    rig.prefetches(None)
    rig.tick()
    assert rig.hi.check_prefetch_progress("r")
    request, reused = rig.admit("r", pages_of(PAGES))
    assert reused == Reused()
    assert rig.hi.metrics.prefetch_outcomes.labels("orphan")._value.get() == 1
    rig.finish(request)
    rig.settle()
