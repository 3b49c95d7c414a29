"""Reads from L3 that found no room in L2, or too little: others follow as room comes.

`test_buffer_only.py` has prompts that a buffer reads in parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from rigs.caches.cache_rig import HiCacheSettings, Reused
from rigs.caches.stepped_rig import SteppedRig, SteppedStateRig
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.messages.cache_report import CacheReport
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

PAGE = 2
L2_PAGES = 8
"""Reads hold at most half of them."""


def settings(l1_pages: int, l2_pages: int, **more: Any) -> HiCacheSettings:
    return HiCacheSettings(
        hicache_ratio=l2_pages / l1_pages,
        hicache_storage_backend="file",
        hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": PAGE}),
        **more,
    )


def make_rig(l2_pages: int = L2_PAGES, **more: Any) -> SteppedRig:
    return SteppedRig(l1_pages=64, page_size=PAGE, settings=settings(64, l2_pages, **more))


def prompt(family: int, pages: int) -> list[int]:
    """A prompt whose `pages` first pages can be reused."""
    return [1000 * family + at for at in range(PAGE * pages + 1)]


def store(*prompts: list[int]) -> None:
    """Let another server write `prompts` to L3."""
    rig = make_rig(l2_pages=64)
    for ids in prompts:
        rig.run(ids)
    rig.settle()
    rig.close()


def reads(rig: SteppedRig, rid: str) -> int:
    """Tokens of the reads that request `rid` waits for."""
    return sum(len(one.host_indices) for one in rig.hi.storage_prefetch.table.reads_of(rid))


def admit(rig: SteppedRig, rid: str, ids: list[int]) -> Reused:
    request, reused = rig.admit(rid, ids)
    rig.finish(request)
    return reused


def two_prompts(**more: Any) -> tuple[SteppedRig, list[int], list[int]]:
    """A rig in which the read for request `a` leaves `b` no room; and their prompts."""
    a, b = prompt(1, 4), prompt(2, 4)
    store(a, b)
    rig = make_rig(**more)
    rig.arrive("a", a)
    rig.arrive("b", b)
    assert (reads(rig, "a"), reads(rig, "b")) == (4 * PAGE, 0)
    return rig, a, b


def land_a(rig: SteppedRig) -> None:
    """Let the read for request `a` land."""
    rig.prefetches(None)
    rig.tick()
    assert rig.hi.check_prefetch_progress("a")


def test_a_read_without_room_begins_when_room_has_come() -> None:
    rig, a, b = two_prompts()
    assert rig.hi.check_prefetch_progress("b"), "no request waits for room"
    land_a(rig)
    assert not rig.hi.check_prefetch_progress("b"), "it waits for its read"
    assert reads(rig, "b") == 4 * PAGE
    rig.prefetches(None)
    rig.tick()
    assert rig.hi.check_prefetch_progress("b")
    assert admit(rig, "b", b) == Reused(storage=4 * PAGE)
    assert rig.hi.check_prefetch_progress("a")
    assert admit(rig, "a", a) == Reused(storage=4 * PAGE)
    rig.settle()
    assert not rig.hi.request_reads._streams


def test_a_prompt_longer_than_the_share_of_reads_is_read_on() -> None:
    ids = prompt(1, 7)
    store(ids)
    rig = make_rig()
    rig.arrive("a", ids)
    assert reads(rig, "a") == 4 * PAGE
    rig.until(lambda: rig.hi.check_prefetch_progress("a"))
    assert admit(rig, "a", ids) == Reused(storage=7 * PAGE)
    rig.settle()


def test_a_prompt_longer_than_l2_is_scheduled_with_what_has_room() -> None:
    ids = prompt(1, 12)
    store(ids)
    rig = make_rig()
    rig.arrive("a", ids)
    rig.until(lambda: rig.hi.check_prefetch_progress("a"))
    assert admit(rig, "a", ids) == Reused(storage=8 * PAGE)
    rig.settle()


def test_one_try_finds_no_room_until_something_ends() -> None:
    rig, _, _ = two_prompts()
    rig.arrive("c", prompt(3, 4))
    with patch.object(
        rig.hi.storage_prefetch, "join_or_read", wraps=rig.hi.storage_prefetch.join_or_read
    ) as tries:
        for _ in range(3):
            rig.tick()
            assert rig.hi.check_prefetch_progress("b")
            assert rig.hi.check_prefetch_progress("c")
        assert tries.call_count == 1
        land_a(rig)
        assert not rig.hi.check_prefetch_progress("b")
        assert rig.hi.check_prefetch_progress("c")
        assert tries.call_count == 3
    for rid in "abc":
        rig.hi.release_aborted_request(rid)
    rig.settle()


@pytest.mark.parametrize("leave", ["release_aborted_request", "note_scheduled"])
def test_a_request_that_waits_no_more_gives_room(leave: str) -> None:
    """The pages that were read for it may leave L2."""
    a, b = prompt(1, 4), prompt(2, 4)
    store(a, b)
    rig = make_rig(l2_pages=4)
    for rid, ids in (("a", a), ("b", b)):
        rig.arrive(rid, ids)
    rig.until(lambda: rig.hi.check_prefetch_progress("a"))
    rig.tick()
    assert rig.hi.check_prefetch_progress("b") and not reads(rig, "b")
    rig.tick()
    assert rig.hi.request_reads.is_full and not rig.hi.is_busy()
    getattr(rig.hi, leave)("a")
    assert not rig.hi.check_prefetch_progress("b")
    rig.until(lambda: rig.hi.check_prefetch_progress("b"))
    assert admit(rig, "b", b) == Reused(storage=4 * PAGE)
    rig.settle()


def test_a_copy_to_l2_that_has_ended_gives_room() -> None:
    b = prompt(2, 3)
    store(b)
    rig = make_rig(l2_pages=4)
    rig.run(prompt(1, 4))
    assert not rig.hi.host_pool.available_size(), "the pages are being copied"
    rig.arrive("b", b)
    assert rig.hi.check_prefetch_progress("b") and not reads(rig, "b")
    rig.until(lambda: reads(rig, "b") > 0 or not rig.hi.check_prefetch_progress("b"))
    rig.until(lambda: rig.hi.check_prefetch_progress("b"))
    assert admit(rig, "b", b) == Reused(storage=3 * PAGE)
    rig.settle()


def test_a_read_without_room_is_given_up_with_the_time_of_its_request() -> None:
    rig, _, b = two_prompts()
    deadline = rig.hi.request_reads._streams["b"].deadline
    assert deadline is not None and deadline > 0
    land_a(rig)
    rig.hi.begin_tick(deadline + 0.1)
    assert rig.hi.check_prefetch_progress("b")
    assert "b" not in rig.hi.request_reads._streams
    assert admit(rig, "b", b) == Reused()
    rig.hi.release_aborted_request("a")
    rig.settle()


def test_a_later_read_has_the_rest_of_the_time() -> None:
    rig, _, _ = two_prompts()
    deadline = rig.hi.request_reads._streams["b"].deadline
    assert deadline is not None
    first = rig.hi.storage_prefetch.table.reads_of("a")[0]
    land_a(rig)
    rig.hi.begin_tick(deadline - 1.0)
    assert not rig.hi.check_prefetch_progress("b")
    (second,) = rig.hi.storage_prefetch.table.reads_of("b")
    assert second.deadline < first.deadline
    for rid in "ab":
        rig.hi.release_aborted_request(rid)
    rig.settle()


def test_best_effort_tries_once() -> None:
    rig, _, _ = two_prompts(hicache_storage_prefetch_policy="best_effort")
    land_a(rig)
    assert rig.hi.check_prefetch_progress("b") and not reads(rig, "b")
    for rid in "ab":
        rig.hi.release_aborted_request(rid)
    rig.settle()


def test_where_the_store_ended_nothing_is_read() -> None:
    """A read brought less than it had room for: the store has no more."""
    store(prompt(1, 2))
    rig = make_rig()
    rig.arrive("a", prompt(1, 7))
    assert reads(rig, "a") == 4 * PAGE
    rig.prefetches(None)
    rig.tick()
    assert rig.hi.check_prefetch_progress("a") and not rig.hi.request_reads._streams
    assert admit(rig, "a", prompt(1, 7)) == Reused(storage=2 * PAGE)
    rig.settle()


def test_a_read_with_room_for_all_is_the_only_one() -> None:
    ids = prompt(1, 4)
    store(ids)
    rig = make_rig()
    rig.arrive("a", ids)
    assert not rig.hi.request_reads._streams
    rig.until(lambda: rig.hi.check_prefetch_progress("a"))
    assert admit(rig, "a", ids) == Reused(storage=4 * PAGE)
    rig.settle()


def test_samples_read_nothing_on() -> None:
    ids = prompt(1, 7)
    store(ids)
    rig = make_rig()
    rig.arrive("first", ids)
    rig.arrive("sample", ids, only_join=True)
    assert (reads(rig, "first"), reads(rig, "sample")) == (4 * PAGE, 4 * PAGE)
    assert list(rig.hi.request_reads._streams) == ["first"]
    for rid in ("first", "sample"):
        rig.hi.release_aborted_request(rid)
    rig.settle()


def arrive_with_report(rig: SteppedRig, rid: str, ids: list[int]) -> CacheReport:
    report = CacheReport(on_arrival=0, spans=None)
    node = rig.hi.match_prefix(MatchPrefixParams(RadixKey(ids[:-1]))).last_host_node
    rig.hi.prefetch_from_storage(rid, node, ids[:-1], report=report)
    return report


def storage_cuts(report: CacheReport) -> list[tuple[int, str]]:
    return [(one.at, one.reason) for one in report.cuts if one.tier == "storage"]


def test_a_report_says_what_the_last_read_brought() -> None:
    a, b = prompt(1, 4), prompt(2, 6)
    store(a, b[: 4 * PAGE + 1])
    rig = make_rig()
    rig.arrive("a", a)
    report = arrive_with_report(rig, "b", b)
    assert storage_cuts(report) == [(0, "queue_full")]
    assert rig.hi.check_prefetch_progress("b")
    assert storage_cuts(report) == [(0, "queue_full")]
    land_a(rig)
    rig.hi.release_aborted_request("a")
    assert not rig.hi.check_prefetch_progress("b")
    assert storage_cuts(report) == [(4 * PAGE, "queue_full")]
    rig.until(lambda: rig.hi.check_prefetch_progress("b"))
    rig.hi.release_aborted_request("b")
    assert (report.storage, storage_cuts(report)) == (4 * PAGE, [(4 * PAGE, "miss")])
    rig.settle()


def detach(rig: SteppedRig) -> None:
    rig.until(lambda: not rig.hi.is_busy())
    assert rig.hi.detach_storage_backend().done


def fail(rig: SteppedRig) -> None:
    rig.hi.store.silence_ms = 400


@pytest.mark.parametrize("end", [detach, fail])
def test_a_store_that_is_gone_ends_the_tries(end: Callable[[SteppedRig], None]) -> None:
    rig, _, b = two_prompts()
    land_a(rig)
    end(rig)
    assert rig.hi.check_prefetch_progress("b")
    assert "b" not in rig.hi.request_reads._streams
    assert admit(rig, "b", b) == Reused()
    rig.hi.release_aborted_request("a")


def test_a_flush_forgets_what_waits_for_room() -> None:
    rig, a, b = two_prompts()
    assert rig.hi.check_prefetch_progress("b") and rig.hi.request_reads.is_full
    for rid in "ab":
        rig.hi.release_aborted_request(rid)
    rig.flush()
    assert not rig.hi.request_reads.is_full
    for ids in (a, b):
        assert rig.run(ids) == Reused(storage=4 * PAGE)
        rig.settle()


def test_a_state_without_a_slot_is_read_when_one_has_come() -> None:
    ids = prompt(1, 3)
    chosen = settings(32, 16)
    writer, reader = (
        SteppedStateRig(l1_pages=32, page_size=PAGE, settings=chosen, num_states=8)
        for _ in range(2)
    )
    writer.run(ids)
    writer.settle()
    states = reader.states.host.pool
    taken = states.alloc(states.available_size())
    assert taken is not None
    reader.arrive("a", ids)
    assert not reads(reader, "a") and reader.hi.check_prefetch_progress("a")
    states.free(taken)
    reader.hi.request_reads.is_full = False
    assert not reader.hi.check_prefetch_progress("a")
    reader.until(lambda: reader.hi.check_prefetch_progress("a"))
    assert admit(reader, "a", ids).total == 3 * PAGE
    reader.settle()
    reader.hi.evict(EvictParams(num_tokens=64 * PAGE))
