"""Figures for operators: the use of L2, the busiest prefixes, the last decisions."""

from __future__ import annotations

import random

from rigs.caches.cache_rig import CacheRig, HiCacheSettings
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.tree.hicache_metrics import Decision, DecisionLog
from sglang.srt.mem_cache.tree.tier_use import HostUse, busiest_prefixes
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

PAGE = 4


def prompt(seed: int, pages: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=pages * PAGE)


def test_the_parts_of_l2_are_its_size_while_copies_run_and_after_them() -> None:
    rig = CacheRig(l1_pages=8, page_size=PAGE, settings=HiCacheSettings(hicache_ratio=2.0))
    assert rig.hi.host_use() == HostUse(0, 0, 0, 16 * PAGE)
    tokens = prompt(1, 5)
    rig.run(tokens)
    assert rig.hi.host_use() == HostUse(5 * PAGE, 0, 0, 11 * PAGE), "the copy has not ended"
    rig.settle()
    assert rig.hi.host_use() == HostUse(0, 0, 5 * PAGE, 11 * PAGE)
    rig.tree.evict(EvictParams(num_tokens=5 * PAGE))
    request, reused = rig.start([*tokens, 7])
    assert reused.host == 5 * PAGE
    assert rig.hi.host_use() == HostUse(0, 5 * PAGE, 0, 11 * PAGE), "a load reads the pages"
    rig.finish(request)
    rig.settle()
    assert rig.hi.host_use() == HostUse(0, 0, 5 * PAGE, 11 * PAGE)


def test_the_busiest_prefixes_come_first_and_nested_ones_once() -> None:
    rig = CacheRig(l1_pages=32, page_size=PAGE)
    system = prompt(1, 3)
    for seed in (2, 3):
        rig.run([*system, *prompt(seed, 2)])
        rig.run([*system, *prompt(seed, 2)])
    rig.run(prompt(4, 4))
    found = busiest_prefixes(rig.tree.tree, 0, 10)
    assert [(one["tokens"], one["uses"]) for one in found] == [
        (3 * PAGE, 4), (5 * PAGE, 2), (5 * PAGE, 2), (4 * PAGE, 1),
    ]  # fmt: skip
    assert len({one["hash"] for one in found}) == 4
    assert all(one["tiers"] == ["L1"] and not one["locked"] for one in found)
    assert busiest_prefixes(rig.tree.tree, 0, 2) == found[:2]
    assert busiest_prefixes(CacheRig(page_size=PAGE).tree.tree, 0, 10) == []


def test_new_prefixes_come_before_old_ones_of_as_many_uses() -> None:
    rig = CacheRig(l1_pages=8, page_size=PAGE)
    for length in (1, 2, 3):
        rig.run(prompt(length, length))
    found = busiest_prefixes(rig.tree.tree, 0, 2)
    assert [one["tokens"] for one in found] == [3 * PAGE, 2 * PAGE]


def test_equal_decisions_of_a_second_are_one_entry() -> None:
    now = 100.0
    log = DecisionLog(lambda: now)
    log.note(Decision.NO_READ, "miss", 64)
    now = 100.9
    log.note(Decision.NO_READ, "miss", 32)
    log.note(Decision.NO_READ, "too_short", 8)
    log.note(Decision.EVICTED_HOST, "room for other pages", 0)
    now = 101.5
    log.note(Decision.NO_READ, "miss", 1)
    assert log.latest() == [
        {
            "what": "no read from L3", "why": why, "request": None, "tenant": None, "of": [],
            "tokens": tokens, "count": count, "age_s": age,
        }
        for why, tokens, count, age in (
            ("miss", 1, 1, 0.0), ("too_short", 8, 1, 0.6), ("miss", 96, 2, 1.5),
        )
    ]  # fmt: skip
    for step in range(200):
        now = 200.0 + step
        log.note(Decision.DROPPED, "no copy in L2", 1)
    assert len(log.latest()) == 64


def test_evictions_are_decisions() -> None:
    rig = CacheRig(l1_pages=8, page_size=PAGE, settings=HiCacheSettings(hicache_ratio=1.5))
    for seed in range(4):
        rig.run(prompt(seed, 6))
    noted = {entry["what"]: entry["tokens"] for entry in rig.tree.metrics.decisions.latest()}
    assert noted[Decision.EVICTED_DEVICE.value] >= 6 * PAGE
    assert noted[Decision.EVICTED_HOST.value] >= 6 * PAGE
