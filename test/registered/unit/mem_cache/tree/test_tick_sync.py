"""The tick sync: what ranks that saw different progress agree on."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch

from rigs.caches.memory_ranks import EchoGroup, MemoryExchange
from sglang.srt.distributed.rank_group import RankGroup, RanksDiverged, SingleRank
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.tree.replicated_state import CacheState
from sglang.srt.mem_cache.tree.tick_sync import (
    MAX_PREFETCHES,
    MAX_SETTLED,
    PrefetchProgress,
    Progress,
    Rates,
    Status,
    TickSync,
    Wait,
    from_vector,
    to_vector,
)
from sglang.srt.mem_cache.tree.tree_node import ROOT_ID, TreeNode
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

FAILED, LANDED = Status.FAILED, Status.LANDED


def vote(*ranks: Progress) -> Progress:
    """Agreement of `ranks`."""
    vectors = torch.stack([to_vector(rank) for rank in ranks])
    return from_vector(vectors.min(dim=0).values, len(ranks[0].prefetches))


def test_the_slowest_rank_decides() -> None:
    fast = Progress(writes=5, loads=3, prefetches=[PrefetchProgress(hit=8, landed=8, ended=True)])
    slow = Progress(writes=2, loads=4, prefetches=[PrefetchProgress(hit=6, landed=3)])
    agreed = vote(fast, slow)
    assert (agreed.writes, agreed.loads) == (2, 3)
    assert agreed.prefetches == [PrefetchProgress(hit=6, landed=3, ended=False, expired=False)]


def test_the_longest_silence_of_l3_counts() -> None:
    ranks = [Progress(), Progress(silence_ms=700), Progress(silence_ms=600)]
    assert vote(*ranks).silence_ms == 700
    agreed = vote(Progress(silence_ms=600, rates=Rates(1, 2), writes=3, loads=4, check=5))
    assert (agreed.silence_ms, agreed.rates, agreed.has_reconnected) == (600, Rates(1, 2), False)
    assert (agreed.writes, agreed.loads, agreed.check) == (3, 4, 5)


def test_one_rank_whose_time_is_up_ends_the_wait_of_all() -> None:
    expired = Progress(prefetches=[PrefetchProgress(expired=True)])
    assert vote(expired, Progress(prefetches=[PrefetchProgress()])).prefetches[0].expired


def test_a_write_that_failed_on_one_rank_failed_for_all_and_holds_up_no_other() -> None:
    good = Progress(backups=[LANDED, LANDED, LANDED, LANDED])
    bad = Progress(backups=[LANDED, FAILED, FAILED])
    other = Progress(backups=[FAILED, LANDED, LANDED, LANDED])
    assert vote(good, bad).backups == [LANDED, FAILED, FAILED]
    assert vote(good, bad, other).backups == [FAILED, FAILED, FAILED]
    # Until one has ended everywhere, only those before it count.
    assert vote(good, bad, Progress(backups=[LANDED])).backups == [LANDED]
    assert vote(good, bad, Progress()).backups == []


def test_as_many_writes_as_there_are_slots_are_settled_in_a_tick() -> None:
    statuses = [LANDED, FAILED] * (MAX_SETTLED // 2)
    reads = [PrefetchProgress(hit=8, landed=3, handed=5)] * MAX_PREFETCHES
    agreed = vote(Progress(backups=statuses, prefetches=reads))
    assert agreed.backups == statuses
    assert agreed.prefetches == reads


def test_what_one_rank_has_lost_is_lost_for_all_once_all_have_looked() -> None:
    found, missing = Progress(check=1 + 8), Progress(check=1 + 3)
    assert vote(found, missing).check == 1 + 3
    assert vote(found, found).check == 1 + 8
    assert vote(missing, Progress()).check == 0, "under way"
    reads = [Progress(prefetches=[PrefetchProgress(hit=8, whole=whole)]) for whole in (7, 5)]
    assert vote(*reads, Progress(prefetches=[PrefetchProgress()])).prefetches[0].whole == 5


def test_unavailable_or_slow_anywhere_is_so_everywhere() -> None:
    agreed = vote(Progress(available=False, rates=Rates(9, 4)), Progress(rates=Rates(5, 7)))
    assert not agreed.available
    assert agreed.rates == (5, 4)
    assert vote(Progress(rates=Rates(9, 4)), Progress()).rates == (0, 0)


def test_an_l3_that_came_back_on_one_rank_came_back_for_all() -> None:
    assert vote(Progress(has_reconnected=True), Progress()).has_reconnected
    assert not vote(Progress(), Progress()).has_reconnected


def state(free: int) -> CacheState:
    """State of an empty tree."""
    root = TreeNode(ROOT_ID, RadixKey([]))
    return CacheState(lambda: root, {"free tokens": lambda: free})


def sync_of(group: RankGroup, mine: CacheState) -> TickSync:
    return TickSync(group, mine, group.reduce_min, HiCacheMetrics(None).rank_lag)


def tick_sync(*free: int) -> list[str]:
    """Result of a tick sync on each rank, by the free tokens in its state."""
    exchange = MemoryExchange(len(free), deadline_s=60)

    def on(group: RankGroup) -> str:
        try:
            mine = state(free[group.rank])
            agreed = sync_of(group, mine).agree(Progress(writes=3))
            return f"writes {agreed.writes}"
        except RanksDiverged as error:
            return str(error)

    with ThreadPoolExecutor(len(free)) as pool:
        return list(pool.map(on, map(exchange.group, range(len(free)))))


def test_different_states_stop_all_ranks_and_name_what_differs() -> None:
    assert tick_sync(8, 8) == ["writes 3"] * 2
    difference = "rank 1 has free tokens: 7, rank 0 8; rank 2 has free tokens: 9, rank 0 8"
    assert tick_sync(8, 7, 9) == [f"the ranks' states differ: {difference}"] * 3


def test_the_vector_has_one_size_whatever_happens() -> None:
    full = Progress(
        prefetches=[PrefetchProgress()] * MAX_PREFETCHES, backups=[LANDED] * MAX_SETTLED
    )
    assert len(to_vector(Progress())) == len(to_vector(full))


def test_one_rank_agrees_with_itself() -> None:
    progress = Progress(loads=1)
    alone, echo = SingleRank(), EchoGroup()
    assert sync_of(alone, state(4)).agree(progress) is progress
    assert sync_of(echo, state(4)).agree(progress).loads == 1


def test_the_rank_that_waited_least_came_last() -> None:
    waits = [Wait(2_500_000, 0), Wait(40, 1), Wait(1_000_000, 2)]
    assert vote(*(Progress(wait=wait) for wait in waits)).lag == (1, 2.49996)
    assert vote(Progress(wait=Wait(7, 0)), Progress(wait=Wait(7, 1))).lag.seconds == 0


def test_the_wait_for_a_late_rank_is_counted_under_its_number() -> None:
    exchange = MemoryExchange(2, deadline_s=60)
    counters = [HiCacheMetrics(None).rank_lag for _ in range(2)]

    def on(group: RankGroup) -> None:
        sync = TickSync(group, state(1), group.reduce_min, counters[group.rank])
        for _ in range(3):
            time.sleep(0.05 * group.rank)
            sync.agree(Progress())

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(on, map(exchange.group, range(2))))
    for counter in counters:
        assert counter.labels(1)._value.get() > 0.08, "two of the three waits are known"
        assert counter.labels(0)._value.get() < 0.01
