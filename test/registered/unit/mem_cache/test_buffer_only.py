"""L2 as a buffer (`--hicache-host-memory-mode buffer_only`): pages pass through it and do not stay.

`test_tiers_stateful.py` has the same in any order of operations.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from rigs.caches.cache_rig import HiCacheSettings, Reused
from rigs.caches.stepped_rig import SteppedRig, SteppedStateRig
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.messages.cache_report import CacheReport
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

PAGE = 2


def settings(l1_pages: int, l2_pages: int, **more: Any) -> HiCacheSettings:
    return HiCacheSettings(
        hicache_host_memory_mode="buffer_only",
        hicache_ratio=l2_pages / l1_pages,
        hicache_storage_backend="file",
        hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": PAGE}),
        **more,
    )


def make_rig(l1_pages: int = 32, l2_pages: int = 8, **more: Any) -> SteppedRig:
    chosen = settings(l1_pages, l2_pages, **more)
    return SteppedRig(l1_pages=l1_pages, page_size=PAGE, settings=chosen)


def pages_of(count: int) -> list[int]:
    """A prompt whose `count` first pages can be reused."""
    return list(range(PAGE * count + 1))


def used_host_pages(rig: SteppedRig) -> int:
    return (rig.hi.host_pool.size - rig.hi.host_pool.available_size()) // PAGE


def stored_pages(rig: SteppedRig) -> int:
    epoch = rig.hi.store.epoch
    return sum(len(one.key) for one in rig.hi.nodes() if one.storage_epoch == epoch) // PAGE


def empty_l1(rig: SteppedRig) -> None:
    rig.hi.evict(EvictParams(num_tokens=rig.allocator.size))


def test_a_page_leaves_once_it_is_in_the_store() -> None:
    rig = make_rig()
    rig.run(pages_of(3))
    rig.tick()
    rig.writes.run()
    rig.tick()
    assert used_host_pages(rig) == 3, "it is being written"
    rig.settle()
    assert (used_host_pages(rig), stored_pages(rig)) == (0, 3)
    # Used again, it is not written again.
    assert rig.run(pages_of(3)) == Reused(device=3 * PAGE)
    rig.settle()
    assert rig.hi.metrics.host_written._value.get() == 3 * PAGE


def test_a_page_leaves_once_it_is_in_l1() -> None:
    rig = make_rig()
    rig.run(pages_of(2))
    rig.settle()
    empty_l1(rig)
    assert not list(rig.hi.nodes()), "prefixes are known in L1 alone"
    rig.arrive("r", pages_of(2))
    rig.prefetches(None)
    rig.tick()
    assert rig.hi.check_prefetch_progress("r")
    assert used_host_pages(rig) == 2
    rig.tick()
    assert used_host_pages(rig) == 2, "a waiting request will use it"
    request, reused = rig.admit("r", pages_of(2))
    assert reused == Reused(storage=2 * PAGE)
    rig.finish(request)
    rig.settle()
    assert used_host_pages(rig) == 0
    assert rig.run(pages_of(2)) == Reused(device=2 * PAGE)


def test_what_no_request_waits_for_leaves() -> None:
    rig = make_rig()
    rig.run(pages_of(2))
    rig.settle()
    empty_l1(rig)
    rig.arrive("r", pages_of(2))
    rig.prefetches(None)
    rig.tick()
    assert rig.hi.check_prefetch_progress("r")
    rig.hi.release_aborted_request("r")
    assert rig.hi.needs_tick
    rig.tick()
    assert used_host_pages(rig) == 0 and not rig.hi.needs_tick
    rig.settle()


@pytest.mark.parametrize("l2_pages", [2, 3, 4, 8])
def test_a_prompt_longer_than_the_buffer_passes_in_parts(l2_pages: int) -> None:
    rig = make_rig(l2_pages=l2_pages)
    rig.run(pages_of(20))
    while rig.hi.is_busy():
        rig.land_all()
        rig.tick()
        assert used_host_pages(rig) <= l2_pages // 2, "readers have the other half"
    assert stored_pages(rig) == 20
    empty_l1(rig)
    request, reused = rig.start(pages_of(20))
    assert reused.total == 20 * PAGE
    rig.finish(request)
    rig.settle()
    assert used_host_pages(rig) == 0


def test_one_prompt_at_a_time_is_read_in_parts_and_none_starves() -> None:
    rig = make_rig(l1_pages=64, l2_pages=8)
    prompts = [[1000 * at + one for one in pages_of(12)] for at in range(4)]
    for ids in prompts:
        rig.run(ids)
        rig.settle()
    empty_l1(rig)
    for at, ids in enumerate(prompts):
        rig.arrive(str(at), ids)
    for at, ids in enumerate(prompts):
        rig.until(lambda rid=str(at): rig.hi.check_prefetch_progress(rid))  # type: ignore[misc]
        request, reused = rig.admit(str(at), ids)
        assert reused.total == 12 * PAGE
        rig.finish(request)
    rig.settle()
    assert used_host_pages(rig) == 0


def rig_with_two_streams() -> tuple[SteppedRig, list[int]]:
    """A rig in which request `a` has the turn to read its prompt in parts, and `b` waits for it;
    and the prompt of `b`."""
    rig = make_rig(l1_pages=64, l2_pages=8)
    prompts = {name: [1000 * at + one for one in pages_of(12)] for at, name in enumerate("ab")}
    for ids in prompts.values():
        rig.run(ids)
        rig.settle()
    empty_l1(rig)
    rig.hi.begin_tick(1.0)
    for name, ids in prompts.items():
        rig.arrive(name, ids)
    rig.prefetches(None)
    rig.tick()
    assert not rig.hi.check_prefetch_progress("a")
    assert not rig.hi.check_prefetch_progress("b")
    return rig, prompts["b"]


def test_a_turn_passes_on_if_the_scheduler_asks_about_others_alone() -> None:
    """A decode server, for example, passes over new requests while a retracted one waits."""
    rig, ids = rig_with_two_streams()
    now = 1.0

    def may_admit() -> bool:
        nonlocal now
        now += 0.01
        rig.hi.begin_tick(now)
        return rig.hi.check_prefetch_progress("b")

    rig.until(may_admit)
    request, reused = rig.admit("b", ids)
    assert reused.total == 12 * PAGE and now < 2.0
    rig.finish(request)
    rig.hi.release_aborted_request("a")
    rig.settle()
    assert used_host_pages(rig) == 0


def test_a_turn_stays_in_ticks_in_which_nothing_is_asked() -> None:
    rig, _ = rig_with_two_streams()
    for now in (1.1, 1.2, 1.3):
        rig.hi.begin_tick(now)
    rig.prefetches(None)
    rig.tick()
    assert not rig.hi.check_prefetch_progress("b")
    assert not rig.hi.storage_prefetch.table.reads_of("b")
    assert not rig.hi.check_prefetch_progress("a")
    assert rig.hi.storage_prefetch.table.reads_of("a")
    for name in "ab":
        rig.hi.release_aborted_request(name)
    assert not rig.hi.request_reads._streams and rig.hi.request_reads._turn is None
    rig.settle()
    assert used_host_pages(rig) == 0


def test_no_prompt_waits_for_its_turn_while_the_store_is_silent() -> None:
    rig, ids = rig_with_two_streams()
    rig.hi.store.silence_ms = 400
    assert rig.hi.check_prefetch_progress("b"), "computing takes no longer"
    request, reused = rig.admit("b", ids)
    assert 0 < reused.storage < 12 * PAGE
    rig.finish(request)
    rig.hi.release_aborted_request("a")
    rig.settle()
    assert used_host_pages(rig) == 0


def test_a_report_of_a_prompt_read_in_parts_ends_where_the_store_does() -> None:
    rig = make_rig()
    rig.run(pages_of(20))
    rig.settle()
    empty_l1(rig)
    report = CacheReport(on_arrival=0, spans=None)
    longer = [*pages_of(20)[:-1], 99, 98, 97]
    node = rig.hi.match_prefix(MatchPrefixParams(RadixKey(longer))).last_host_node
    rig.hi.prefetch_from_storage("r", node, longer, report=report)
    rig.until(lambda: rig.hi.check_prefetch_progress("r"))
    rig.hi.release_aborted_request("r")
    assert report.storage == 20 * PAGE
    assert [(one.at, one.reason) for one in report.cuts] == [(20 * PAGE, "miss")]
    rig.settle()


def test_a_part_that_takes_over_half_of_what_is_free_waits_for_its_request() -> None:
    """Running requests need room for their output."""
    rig = make_rig()
    rig.run(pages_of(20))
    rig.settle()
    empty_l1(rig)
    running, _ = rig.start([*range(500, 500 + 29 * PAGE)])
    rig.arrive("r", pages_of(20))
    rig.until(lambda: rig.hi.check_prefetch_progress("r"))
    match = rig.hi.match_prefix(MatchPrefixParams(RadixKey(pages_of(20))))
    assert (len(match.device_indices), match.host_hit_length) == (0, 2 * PAGE), "3 pages are free"
    rig.hi.release_aborted_request("r")
    rig.finish(running)
    rig.settle()
    assert used_host_pages(rig) == 0


@pytest.mark.parametrize(("tokens", "end"), [(7, 6), (8, 6), (9, 8)])
def test_the_last_token_of_a_retracted_request_is_not_read(tokens: int, end: int) -> None:
    rig = make_rig()
    rig.hi.request_reads.expect("r", RadixKey(list(range(tokens))))
    assert rig.hi.request_reads._streams["r"].end == end
    rig.hi.release_aborted_request("r")
    rig.settle()


def test_best_effort_reads_no_further_than_the_first_part() -> None:
    rig = make_rig(l2_pages=8, hicache_storage_prefetch_policy="best_effort")
    rig.run(pages_of(20))
    rig.settle()
    empty_l1(rig)
    rig.arrive("r", pages_of(20))
    rig.prefetches(None)
    rig.tick()
    assert rig.hi.check_prefetch_progress("r")
    request, reused = rig.admit("r", pages_of(20))
    assert 0 < reused.total < 20 * PAGE
    rig.finish(request)
    rig.settle()


def test_a_read_of_a_long_prompt_ends_with_the_time_of_its_request() -> None:
    rig = make_rig()
    rig.run(pages_of(20))
    rig.settle()
    empty_l1(rig)
    rig.hi.begin_tick(1.0)
    rig.arrive("r", pages_of(20))
    rig.prefetches(None)
    rig.tick()
    deadline = rig.hi.request_reads._streams["r"].deadline
    assert deadline is not None
    rig.hi.begin_tick(deadline - 0.1)
    assert not rig.hi.check_prefetch_progress("r")
    (second,) = rig.hi.storage_prefetch.table.reads_of("r")
    assert second.deadline <= time.monotonic() + 0.11
    rig.prefetches(None)
    rig.tick()
    rig.hi.begin_tick(deadline + 0.1)
    assert rig.hi.check_prefetch_progress("r")
    request, reused = rig.admit("r", pages_of(20))
    assert 0 < reused.total < 20 * PAGE
    rig.finish(request)
    rig.settle()
    assert used_host_pages(rig) == 0


def test_writes_that_hang_keep_no_page_of_l1_and_no_reader_waits_for_them() -> None:
    rig = make_rig(l1_pages=32, l2_pages=8)
    other = [*range(500, 500 + 2 * PAGE), 7]
    rig.run(other)
    rig.settle()
    empty_l1(rig)
    rig.run(pages_of(2))
    rig.settle()
    rig.run(pages_of(10))
    for _ in range(3):
        rig.tick()
        rig.writes.run()
    assert rig.hi.is_busy() == {"backups": 2}, "one is under way, and one waits for its room"
    # The first two pages are in L1 and L3, the next four are being written.
    empty_l1(rig)
    assert rig.allocator.available_size() == rig.allocator.size
    assert used_host_pages(rig) == 4
    rig.hi.check_integrity()
    rig.arrive("r", other)
    rig.prefetches(None)
    rig.tick()
    assert rig.hi.check_prefetch_progress("r")
    request, reused = rig.admit("r", other)
    assert reused == Reused(storage=2 * PAGE)
    rig.finish(request)
    rig.settle()
    assert used_host_pages(rig) == 0


def test_a_store_that_is_gone_leaves_pages_in_l1() -> None:
    rig = make_rig()
    rig.run(pages_of(2))
    rig.settle()
    assert rig.hi.detach_storage_backend().done
    rig.run([*range(700, 700 + 3 * PAGE), 7])
    rig.settle()
    assert used_host_pages(rig) == 0
    assert rig.run([*range(700, 700 + 3 * PAGE), 7]) == Reused(device=3 * PAGE)


def test_a_long_prompt_that_the_store_refuses_waits_for_its_next_use() -> None:
    rig = make_rig(l2_pages=8)
    store = rig.hi.store.attached
    assert store is not None
    store.breaker.trip()
    rig.run(pages_of(10))
    rig.settle()
    assert (used_host_pages(rig), stored_pages(rig)) == (0, 0)
    assert rig.hi.metrics.host_written._value.get() == 4 * PAGE, "the first part, once"
    assert rig.hi.metrics.backup_outcomes.labels("short")._value.get() == 1
    store.breaker.reset()
    rig.run(pages_of(10))
    rig.settle()
    assert (used_host_pages(rig), stored_pages(rig)) == (0, 10)


def test_write_back_is_refused_while_running() -> None:
    rig = make_rig()
    answer = rig.hi.attach_storage_backend("file", hicache_write_policy="write_back")
    assert not answer.done
    assert "write_through, write_through_selective" in answer.message


def test_selective_writes_wait_for_a_second_use() -> None:
    rig = make_rig(hicache_write_policy="write_through_selective")
    rig.run(pages_of(3))
    rig.settle()
    assert stored_pages(rig) == 0
    rig.run(pages_of(3))
    rig.settle()
    assert (used_host_pages(rig), stored_pages(rig)) == (0, 3)


def test_what_l1_evicts_before_its_turn_is_lost_and_counted() -> None:
    rig = make_rig(l2_pages=2)
    rig.run(pages_of(6))
    rig.tick()
    rig.writes.run()
    rig.tick()
    assert rig.hi.host_backup.owed.nodes
    empty_l1(rig)
    assert not rig.hi.host_backup.owed.nodes
    rig.settle()
    assert rig.hi.metrics.dropped.labels("unwritten")._value.get() >= 4 * PAGE
    assert used_host_pages(rig) == 0


def test_copies_begin_in_the_order_of_their_prompts() -> None:
    rig = make_rig(l2_pages=8)
    for family in (0, 1):
        request, _ = rig.admit("r", [1000 * family + one for one in pages_of(6)])
        rig.finish(request)
    rig.tick()
    copied = [one.node.key.ids[0] for one in rig.hi.host_backup.writing.values()]
    assert copied == [0], "half of the buffer has room for four pages of the first"
    rig.settle()
    assert stored_pages(rig) == 12


def test_a_state_without_room_waits_also_if_pages_have_none() -> None:
    """Four pages of a prompt are written to L3, and half of the buffer has no room for more. Then
    another prompt branches off behind the second."""
    rig = SteppedStateRig(l1_pages=32, page_size=PAGE, settings=settings(32, 8), num_states=32)
    ids = pages_of(4)
    request, _ = rig.admit("a", ids)
    rig.finish(request)
    rig.tick()
    rig.writes.run()
    rig.tick()
    states = rig.states.host.pool
    taken = states.alloc(states.available_size())
    assert taken is not None
    rig.states.host.evict(states.size)
    request, _ = rig.admit("b", [*ids[: 2 * PAGE], 97, 98, 99])
    rig.finish(request)
    upper = rig.hi.tree.walk(RadixKey(ids[: 2 * PAGE]))[-1]
    assert upper.backuped and upper.has_unsaved_state and upper.host_ref_counter
    assert upper.id in rig.hi.host_backup.owed.nodes
    states.free(taken)
    rig.tick()
    assert [one.node for one in rig.hi.host_backup.writing.values()] == [upper]
    rig.settle()
    assert used_host_pages(rig) == 0 and states.available_size() == states.size


def test_a_backup_of_a_retracted_request_goes_to_the_store() -> None:
    """Whatever the write policy; what has no room in the buffer yet may be lost."""
    rig = make_rig(hicache_write_policy="write_through_selective")
    rig.run(pages_of(6))
    rig.settle()
    match = rig.hi.match_prefix(MatchPrefixParams(RadixKey(pages_of(6))))
    lost = rig.hi.host_backup.back_up(rig.hi.tree.path_to(match.last_host_node))
    assert lost == 2 * PAGE, "half of the buffer has room for the others"
    rig.settle()
    assert (used_host_pages(rig), stored_pages(rig)) == (0, 6)


def test_a_state_that_comes_later_is_written_with_its_pages() -> None:
    chosen = settings(32, 16)
    rig = SteppedStateRig(l1_pages=32, page_size=PAGE, settings=chosen, num_states=8)
    ids = pages_of(4)
    rig.run(ids)
    rig.settle()
    host = rig.states.host.pool
    assert used_host_pages(rig) == 0 and host.available_size() == host.size
    empty_l1(rig)
    request, reused = rig.start(ids)
    assert reused.storage + reused.host + reused.device > 0
    rig.finish(request)
    rig.settle()
    assert used_host_pages(rig) == 0 and host.available_size() == host.size
