"""Scheduling decisions over plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from sglang.srt.managers.scheduler.policy import (
    LPM_MAX_OVERTAKEN,
    LPM_MAX_WAITING,
    MAX_DECODE_STEPS_A_PREFILL,
    MAX_PREFILLS_IN_A_ROW,
    AddOutcome,
    AddPlan,
    BatchLimits,
    BatchPolicy,
    NewTokenEstimate,
    PrefillAdder,
    SchedulePolicy,
    newest,
    order_waiting,
    pages_to_decode,
    states_to_load,
)
from sglang.srt.managers.scheduler.snapshots import Spare, first_to_give_up
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


@dataclass
class Waiting:
    arrival_number: int
    cached: int = 0
    turn: int = 0


def limits(chunk: int | None = 16, max_prefill: int = 64, rows: int = 4) -> BatchLimits:
    return BatchLimits(
        max_queued_requests=8,
        page_size=4,
        max_running_requests=rows,
        max_prefill_tokens=max_prefill,
        chunk_tokens=chunk,
        pool_tokens=100,
        context_len=80,
    )


def test_fcfs_is_the_order_of_arrival_retracted_ones_included() -> None:
    waiting = [Waiting(3, cached=9), Waiting(1), Waiting(2)]
    ordered = order_waiting(SchedulePolicy.FCFS, waiting, lambda r: r.cached, 0)
    assert [r.arrival_number for r in ordered] == [1, 2, 3]


def test_lpm_takes_the_longest_prefix_and_breaks_ties_by_arrival() -> None:
    waiting = [Waiting(1, 4), Waiting(2, 8), Waiting(3, 8), Waiting(4)]
    ordered = order_waiting(SchedulePolicy.LPM, waiting, lambda r: r.cached, 0)
    assert [r.arrival_number for r in ordered] == [2, 3, 1, 4]


def test_lpm_lets_those_go_first_that_too_many_overtook() -> None:
    hot, cold, colder = Waiting(9, 8, turn=9), Waiting(2, 1, turn=4), Waiting(1, turn=5)

    def order(num_admitted: int) -> list[Waiting]:
        return order_waiting(
            SchedulePolicy.LPM, [hot, colder, cold], lambda r: r.cached, num_admitted
        )

    assert order(3 + LPM_MAX_OVERTAKEN) == [hot, cold, colder]
    assert order(4 + LPM_MAX_OVERTAKEN) == [cold, hot, colder]
    assert order(5 + LPM_MAX_OVERTAKEN) == [colder, cold, hot], "in the order of arrival"


def test_lpm_matches_nobody_when_too_many_wait() -> None:
    waiting = [Waiting(n) for n in range(LPM_MAX_WAITING + 1)]

    def fail(_: Waiting) -> int:
        raise AssertionError("matched")

    assert order_waiting(SchedulePolicy.LPM, waiting[::-1], fail, 0) == waiting


def test_a_prompt_is_cut_at_a_page_and_nothing_joins_after_it() -> None:
    adder = PrefillAdder(limits(), num_running=0, reserved_tokens=0)
    first = adder.plan(rest=6, load=0, new_tokens=2, free_tokens=100)
    assert first == AddPlan(AddOutcome.ADDED, 6)
    adder.commit(first, reserve=2)
    second = adder.plan(rest=30, load=0, new_tokens=2, free_tokens=100)
    assert second == AddPlan(AddOutcome.CHUNKED, 8), "10 tokens are left, 2 whole pages of 4"
    adder.commit(second, reserve=24)
    assert adder.plan(1, 0, 1, 100).outcome is AddOutcome.NO_BUDGET


def test_without_chunks_a_long_prompt_has_a_batch_to_itself() -> None:
    adder = PrefillAdder(limits(chunk=None, max_prefill=8), 0, 0)
    plan = adder.plan(50, 0, 1, 100)
    assert plan == AddPlan(AddOutcome.ADDED, 50)
    adder.commit(plan, reserve=1)
    assert adder.plan(4, 0, 1, 100).outcome is AddOutcome.NO_BUDGET


@pytest.mark.parametrize(
    ("rest", "load", "new", "free", "outcome"),
    [
        pytest.param(8, 0, 4, 12, AddOutcome.ADDED, id="fits-exactly"),
        pytest.param(8, 0, 5, 15, AddOutcome.NO_MEMORY, id="pages-round-up"),
        pytest.param(8, 4, 4, 15, AddOutcome.NO_MEMORY, id="loads-need-slots-too"),
        pytest.param(8, 4, 4, 16, AddOutcome.ADDED, id="load-fits"),
    ],
)
def test_all_pages_fit(rest: int, load: int, new: int, free: int, outcome: AddOutcome) -> None:
    assert PrefillAdder(limits(), 0, 0).plan(rest, load, new, free).outcome is outcome


def test_what_runs_keeps_its_reserve_and_each_addition_adds_to_it() -> None:
    adder = PrefillAdder(limits(), num_running=1, reserved_tokens=8)
    assert adder.plan(4, 0, 4, 15).outcome is AddOutcome.NO_MEMORY
    plan = adder.plan(4, 0, 4, 16)
    adder.commit(plan, reserve=4)
    assert adder.plan(4, 0, 4, 19).outcome is AddOutcome.NO_MEMORY
    assert adder.plan(4, 0, 4, 20).outcome is AddOutcome.ADDED


def test_the_last_token_of_a_cached_prompt_is_computed_and_takes_no_slot() -> None:
    adder = PrefillAdder(limits(), num_running=0, reserved_tokens=0)
    assert adder.plan(0, 0, 4, 3).outcome is AddOutcome.NO_MEMORY
    assert adder.plan(0, 0, 4, 4) == AddPlan(AddOutcome.ADDED, 1)
    assert adder.plan(0, 8, 4, 11).outcome is AddOutcome.NO_MEMORY
    plan = adder.plan(0, 8, 4, 12)
    assert plan == AddPlan(AddOutcome.ADDED, 1)
    adder.commit(plan, reserve=4)
    # The batch has room for one token less.
    assert adder.plan(30, 0, 2, 100).extend_tokens == limits().chunk_tokens - 4  # type: ignore[operator]


def test_a_batch_with_one_token_too_many_is_full() -> None:
    """A draft layer has the last token of a cached prefix computed again."""
    adder = PrefillAdder(limits(), num_running=0, reserved_tokens=0)
    plan = adder.plan(rest=16, load=0, new_tokens=1, free_tokens=100)
    again = AddPlan(plan.outcome, plan.extend_tokens + 1)
    adder.commit(again, reserve=1)
    assert adder.plan(30, 0, 1, 100) == AddPlan(AddOutcome.NO_BUDGET)


def test_no_more_requests_are_added_than_there_are_rows() -> None:
    adder = PrefillAdder(limits(rows=2), num_running=1, reserved_tokens=0)
    adder.commit(adder.plan(1, 0, 1, 100), reserve=1)
    assert adder.plan(1, 0, 1, 100).outcome is AddOutcome.NO_BUDGET


def test_the_next_chunk_needs_no_new_grant_of_memory() -> None:
    adder = PrefillAdder(limits(), 0, 0)
    assert adder.plan_extend(100) == AddPlan(AddOutcome.CHUNKED, 16)
    assert adder.plan_extend(16) == AddPlan(AddOutcome.ADDED, 16)


def test_the_longest_request_is_bounded_by_context_and_pool() -> None:
    assert (limits().max_request_tokens, limits().max_input_tokens) == (80, 79)


def test_the_estimate_relaxes_and_jumps_back() -> None:
    estimate = NewTokenEstimate(1.0)
    assert estimate.reserve(100) == 70
    for _ in range(10_000):
        estimate.on_decode_step()
    assert estimate.reserve(100) == 14
    assert estimate.reserve(1) == 1
    estimate.on_retraction(generated=1, wanted=10)
    assert estimate.reserve(100) == 70
    estimate.on_retraction(generated=9, wanted=10)
    assert estimate.reserve(100) == 90
    assert NewTokenEstimate(10.0).reserve(50) == 50
    assert NewTokenEstimate(1.0).reserve(10**9) < 4096


def test_decode_needs_a_page_where_the_last_one_is_full() -> None:
    assert pages_to_decode([4, 5, 7, 8], 4) == 2
    assert pages_to_decode([4, 5, 7, 8], 1) == 4


def test_the_slot_whose_loss_costs_least_is_given_up_that_of_the_newest_request_first() -> None:
    no_slots: Any = None
    counts = ((1, 0), (3, 0), (4, 64), (9, 512))
    spares = [Spare(*each, no_slots, is_next=False) for each in counts]
    empty_old, empty_new, short, long = spares
    spares = [long, empty_old, short, empty_new]
    order = []
    while spares:
        order.append(first_to_give_up(spares))
        spares.remove(order[-1])
    assert order == [empty_new, empty_old, short, long]


def test_a_state_is_loaded_if_a_slot_to_run_on_is_left() -> None:
    assert [states_to_load(*counts) for counts in ((0, 0, 0), (1, 0, 0), (0, 1, 1))] == [0, 0, 1]


def test_the_newest_gives_way() -> None:
    assert newest([Waiting(1), Waiting(7), Waiting(3)]).arrival_number == 7


def prefills_and_steps(
    policy: BatchPolicy, prefill: float, step: float, waiting: int
) -> tuple[int, int]:
    """Prefills that run in a row while `waiting` of them are wanted, and the decode steps before
    the next may run. A prefill takes `prefill` seconds, a decode step `step`."""
    now, prefills, steps = 100.0, 0, 0
    policy.on_prefill(now)
    while True:
        now, prefills = now + prefill, prefills + 1
        if prefills == waiting or not policy.may_prefill(now):
            break
        policy.on_prefill(now)
    while steps == 0 or not policy.may_prefill(now):
        policy.on_decode()
        now, steps = now + step, steps + 1
        assert steps <= 10000
    return prefills, steps


def test_a_server_that_has_just_started_may_prefill() -> None:
    assert BatchPolicy(None).may_prefill(5.0)
    assert BatchPolicy(0.001).may_prefill(5.0)


def test_without_a_target_prefills_and_decode_steps_alternate() -> None:
    assert prefills_and_steps(BatchPolicy(None), prefill=0.2, step=0.01, waiting=3) == (1, 1)
    assert prefills_and_steps(BatchPolicy(None), prefill=20.0, step=0.01, waiting=3) == (1, 1)


@pytest.mark.parametrize(
    ("target", "waiting", "steps"),
    [(0.5, 1, 1), (0.21, 1, 1), (0.05, 1, 5), (0.03, 1, 10), (0.03, 3, 30), (0.02, 4, 80)],
)
def test_prompts_go_in_a_row_and_then_steps_until_the_mean_is_the_target(
    target: float, waiting: int, steps: int
) -> None:
    slack = 1e-6  # the same sums, added up in another order
    policy = BatchPolicy(target + slack)
    assert prefills_and_steps(policy, prefill=0.2, step=0.01, waiting=waiting) == (waiting, steps)


def test_neither_a_queue_nor_a_target_that_decoding_misses_starves_the_other() -> None:
    prefills, steps = prefills_and_steps(BatchPolicy(0.005), prefill=0.2, step=0.01, waiting=1000)
    assert prefills == MAX_PREFILLS_IN_A_ROW
    assert steps == MAX_PREFILLS_IN_A_ROW * MAX_DECODE_STEPS_A_PREFILL
