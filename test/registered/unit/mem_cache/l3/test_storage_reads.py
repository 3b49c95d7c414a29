"""Questions to the store: how many prompts each, and how often L3 is checked."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rigs.caches.storage_rigs import counts
from rigs.stores.hanging_store import HangingBench, wait_for
from sglang.srt.mem_cache.hicache_storage import (
    CacheOutcome,
)
from sglang.srt.mem_cache.l3.storage_reads import CheckOperation, LookUpRetries, outcome_now
from sglang.srt.mem_cache.tree.radix_key import PageHash
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


def test_l3_is_asked_what_it_still_has_now_and_then_and_less_often_where_it_loses_pages(
    bench: HangingBench,
) -> None:
    def check(*pages: str) -> int:
        operation = CheckOperation([PageHash(page) for page in pages], epoch=0, asked_at=0)
        bench.io.reads.queue.put(operation)
        wait_for(lambda: operation.there is not None)
        assert operation.there is not None
        return operation.there

    def pause() -> float:
        left = bench.io.reads._check_at - time.monotonic()
        bench.io.reads._check_at = 0.0
        return left

    assert check("a", "b") == 2
    bench.store.absent = {"b"}
    assert check("a", "b") == 2, "not asked again so soon"
    assert bench.store.questions == [1]
    assert 25 < pause() <= 30
    for longer in (60, 120, 240, 480, 600, 600):
        assert check("a", "b") == 0
        assert longer - 5 < pause() <= longer
    bench.store.is_mute = True
    assert check("a", "b") == 2, "whether it has lost anything is not known"
    assert bench.io.breaker.is_open
    bench.store.is_mute, bench.store.absent = False, set()
    bench.let_the_pause_pass()
    bench.io.reads._check_at = time.monotonic() + 100
    asked = len(bench.store.questions)
    assert check("a", "b") == 2
    assert (len(bench.store.questions), bench.io.reconnects) == (asked, 1), "probed all the same"
    bench.io.reads._check_at = 0.0
    assert check("a", "b") == 2
    assert 25 < pause() <= 30


def test_prompts_of_one_tick_are_one_question(bench: HangingBench) -> None:
    bench.store.absent = {"b"}
    here, absent, cut = (bench.operation(page) for page in ("a", "b", "c"))
    cut.is_terminated = True
    bench.io.reads.queue.put([here, absent, cut])
    wait_for(lambda: here.outcome is not None)
    assert [one.outcome for one in (here, absent, cut)] == ["landed", "miss", "late"]
    assert (here.landed_pages, absent.landed_pages) == (1, 0)
    assert bench.store.questions == [2]


def test_who_misses_does_not_wait_for_who_reads(bench: HangingBench) -> None:
    bench.store.absent, bench.store.hangs = {"b"}, {"a"}
    bench.store.goes_on.clear()
    reads, misses = bench.operation("a"), bench.operation("b")
    bench.io.reads.queue.put([reads, misses])
    wait_for(lambda: misses.outcome is not None)
    assert reads.outcome is None
    bench.store.goes_on.set()
    wait_for(lambda: reads.outcome is not None)


def test_a_look_up_that_missed_is_repeated_until_the_writer_has_committed(
    bench: HangingBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.io.reads._retries = LookUpRetries(attempts=3, pause_s=0.001)
    bench.store.absent = {"a", "b"}
    ask = bench.store.prompts_exist

    def commit_later(*arguments: Any) -> Any:
        if len(bench.store.questions) == 2:
            bench.store.absent = {"b"}
        return ask(*arguments)

    monkeypatch.setattr(bench.store, "prompts_exist", commit_later)
    late, absent = bench.operation("a", "c"), bench.operation("b")
    bench.io.reads.queue.put([late, absent])
    wait_for(lambda: late.outcome is not None and absent.outcome is not None)
    assert (late.outcome, late.landed_pages, late.misses) == ("landed", 2, 2)
    assert late.whole_pages == 2, "nothing is lost"
    assert (absent.outcome, absent.misses, absent.hit_pages) == ("miss", 3, 0)
    assert absent.whole_pages == 0
    assert bench.store.questions == [2, 2, 2, 1]


def test_new_prompts_are_asked_about_while_a_look_up_is_to_be_repeated(
    bench: HangingBench,
) -> None:
    bench.io.reads._retries = LookUpRetries(attempts=1, pause_s=600)
    bench.store.absent = {"b"}
    absent, here = bench.operation("b"), bench.operation("a")
    bench.io.reads.queue.put([absent])
    wait_for(lambda: absent.misses == 1)
    bench.io.reads.queue.put([here])
    wait_for(lambda: here.outcome is not None)
    assert absent.outcome is None and not absent.answered.is_set()
    assert bench.io.close()
    assert absent.outcome == "miss", "every operation ends"


def test_new_prompts_go_before_look_ups_that_are_always_due(bench: HangingBench) -> None:
    """A look-up is always due if a question takes longer than the pause before the next one."""
    bench.io.reads._retries = LookUpRetries(attempts=10**9, pause_s=0.0)
    bench.store.absent = {"b"}
    absent, here = bench.operation("b"), bench.operation("a")
    bench.io.reads.queue.put([absent])
    wait_for(lambda: absent.misses > 0)
    bench.io.reads.queue.put([here])
    wait_for(lambda: here.outcome is not None)
    assert (here.outcome, absent.outcome) == ("landed", None)
    assert bench.io.close(), "its thread ends"
    assert absent.outcome == "miss"


def test_a_request_that_left_ends_its_look_up(bench: HangingBench) -> None:
    bench.io.reads._retries = LookUpRetries(attempts=1000, pause_s=0.001)
    bench.store.absent = {"b"}
    absent = bench.operation("b")
    bench.io.reads.queue.put([absent])
    wait_for(lambda: absent.misses > 0)
    absent.is_terminated = True
    wait_for(lambda: absent.outcome is not None)
    assert absent.misses < 1000


@pytest.mark.parametrize(
    ("flags", "retries"),
    [
        ((None, None), LookUpRetries(0, 0.0)),
        ((4, None), LookUpRetries(4, 0.008)),
        ((None, 2), LookUpRetries(8, 0.002)),
        ((0, 2), LookUpRetries(0, 0.002)),
    ],
)
def test_each_flag_of_repetitions_implies_the_other(
    flags: tuple[int | None, int | None], retries: LookUpRetries
) -> None:
    assert LookUpRetries.of(*flags) == retries


@pytest.mark.parametrize("is_overtaken", [False, True])
def test_what_a_read_brings_after_it_was_cut_is_late(
    bench: HangingBench, is_overtaken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = bench.operation("a", "b")
    get = bench.store.batch_get_v2

    def cut_and_get(*args: Any) -> Any:
        if is_overtaken:
            operation.cancel()
        operation.is_terminated = True
        return get(*args)

    monkeypatch.setattr(bench.store, "batch_get_v2", cut_and_get)
    bench.io.reads.queue.put([operation])
    wait_for(lambda: operation.outcome is not None)
    outcome = "overtaken" if is_overtaken else "late"
    assert (operation.outcome, operation.landed_pages) == (outcome, 2)
    assert counts(bench.metrics.prefetch_outcomes) == {outcome: 1}


@pytest.mark.parametrize(
    ("hit", "wanted", "landed", "outcome"),
    [(-1, 3, 0, "late"), (3, 3, 2, "late"), (3, 2, 2, "landed"), (2, 3, 2, "landed")],
    ids=["not asked", "cut on its way", "all that was waited for", "all that the store has"],
)
def test_a_read_whose_pages_came_in_time_is_not_late(
    bench: HangingBench, hit: int, wanted: int, landed: int, outcome: str
) -> None:
    operation = bench.operation("a", "b", "c")
    operation.hit_pages, operation.wanted_pages, operation.landed_pages = hit, wanted, landed
    assert outcome_now(operation) is CacheOutcome.LANDED, "it is not cut"
    operation.is_terminated = True
    assert outcome_now(operation) == outcome


def test_a_question_that_fails_fails_all_it_was_about(bench: HangingBench) -> None:
    bench.store.is_mute = True
    operations = [bench.operation(page) for page in "ab"]
    bench.io.reads.queue.put(operations)
    wait_for(lambda: all(one.outcome is not None for one in operations))
    assert [one.outcome for one in operations] == ["failed", "failed"]
    assert [one.hit_pages for one in operations] == [0, 0]
    assert bench.io.breaker.is_open


def test_questions_have_a_size(bench: HangingBench) -> None:
    long = [str(number) for number in range(600)]
    operations = [bench.operation(*long), bench.operation(*long)]
    operations += [bench.operation(str(number)) for number in range(20)]
    bench.io.reads.queue.put(operations)
    wait_for(lambda: all(one.outcome is not None for one in operations))
    assert bench.store.questions == [1, 16, 5]
