"""Reads that were cut: which of their host pages are free, and which a call may still write to."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.mem_cache.hicache_storage import CacheOutcome
from sglang.srt.mem_cache.l3.prefetch_table import PrefetchOperation, PrefetchTable
from sglang.srt.mem_cache.l3.storage_reads import hand_over, pages_per_read
from sglang.srt.mem_cache.l3.storage_writes import PAGES_PER_CALL
from sglang.srt.mem_cache.tree.radix_key import PageHash, RadixKey
from sglang.srt.mem_cache.tree.tick_sync import PrefetchProgress, Progress, from_vector, to_vector
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

PAGE = 2
PAGES = 10


def started(table: PrefetchTable, rid: str = "r", first_page: int = 0) -> PrefetchOperation:
    """A read of the ten host pages from `first_page` on."""
    operation = PrefetchOperation(
        request_id=rid,
        key=RadixKey([]),
        start=0,
        host_indices=torch.arange(first_page * PAGE, (first_page + PAGES) * PAGE),
        hashes=[PageHash(str(page)) for page in range(PAGES)],
        prefix_hashes=[],
        deadline=0.0,
        epoch=0,
    )
    table.start(operation)
    return operation


def tick(table: PrefetchTable) -> list[int]:
    """One agreement; the host pages that are free since."""
    freed, _ = table.agree(table.report(awaits_answers=False))
    slots = torch.cat([torch.empty(0, dtype=torch.int64), *freed]).tolist()
    assert slots[1::PAGE] == [slot + 1 for slot in slots[::PAGE]], "whole pages"
    return [slot // PAGE for slot in slots[::PAGE]]


def test_a_read_that_had_not_begun_gives_all_back_at_once_and_never_begins() -> None:
    table = PrefetchTable(PAGE)
    operation = started(table)
    table.leave("r")
    assert not hand_over(operation, 4), "too late"
    # Four pages are noted as read. They stay taken until the thread sees that it is too late.
    assert tick(table) == [4, 5, 6, 7, 8, 9]
    operation.outcome = CacheOutcome.LATE
    assert tick(table) == [0, 1, 2, 3]
    assert len(table.operations) == 0

    operation = started(table)
    table.leave("r")
    assert tick(table) == list(range(10))
    assert len(table.operations) == 0
    assert not hand_over(operation, 4)


def test_no_more_is_read_than_the_store_has_for_all_ranks() -> None:
    table = PrefetchTable(PAGE)
    operation = started(table)
    operation.hit_pages = 10
    assert hand_over(operation, 4), "no rank knows yet what the others have"
    table.agree([PrefetchProgress(hit=-1)])
    assert hand_over(operation, 6)
    table.agree([PrefetchProgress(hit=6, handed=6)])
    assert not hand_over(operation, 8)
    assert operation.handed_pages == 6


def test_only_the_pages_of_the_call_under_way_stay_with_a_read_that_was_cut() -> None:
    table = PrefetchTable(PAGE)
    operation = started(table)
    assert hand_over(operation, 4)
    operation.landed_pages = 4
    tick(table)
    assert hand_over(operation, 8)
    (cut,) = table.leave("r")
    assert (cut, cut.progress.landed) == (operation, 4)
    operation.owned[1 * PAGE : 4 * PAGE] = False
    assert tick(table) == [0, 8, 9]
    assert table.stuck_tokens() == 4 * PAGE
    assert tick(table) == []
    operation.landed_pages = 6
    assert tick(table) == [4, 5]
    operation.outcome = CacheOutcome.FAILED
    assert tick(table) == [6, 7]
    assert (len(table.operations), table.stuck_tokens(), table.room(0)) == (0, 0, 0)


def test_who_ended_gives_back_what_it_has_though_one_before_it_hangs() -> None:
    table = PrefetchTable(PAGE)
    hangs, behind = started(table, "hangs"), started(table, "behind", PAGES)
    hand_over(hangs, 2)
    for rid in ("hangs", "behind"):
        table.leave(rid)
    assert tick(table) == [*range(2, 10), *range(10, 20)]
    assert not hand_over(behind, 2)
    assert table.stuck_tokens() == 2 * PAGE


def test_ranks_keep_what_any_of_them_may_be_writing_to() -> None:
    ranks = [
        Progress(prefetches=[PrefetchProgress(landed=2, handed=4)]),
        Progress(prefetches=[PrefetchProgress(landed=4, handed=8, ended=True)]),
    ]
    vectors = torch.stack([to_vector(rank) for rank in ranks])
    (agreed,) = from_vector(vectors.min(dim=0).values, 1).prefetches
    assert (agreed.landed, agreed.handed, agreed.ended) == (2, 8, False)


@pytest.mark.parametrize(("host_pages", "pages"), [(4, 1), (64, 8), (100_000, PAGES_PER_CALL)])
def test_one_call_takes_a_small_share_of_l2(host_pages: int, pages: int) -> None:
    assert pages_per_read(host_pages) == pages
