"""Choice between reading a prompt from L3 and computing it."""

from __future__ import annotations

from itertools import accumulate

import pytest

from sglang.srt.mem_cache.l3.prefetch_cost import (
    PendingRead,
    is_rejected,
    slower_reads,
)
from sglang.srt.mem_cache.l3.store_calls import RateEstimate
from sglang.srt.mem_cache.tree.tick_sync import Rates
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

EQUAL = Rates(reads=1000, prefills=1000)


def prompt(tokens: int, *, spared: bool = False) -> PendingRead:
    """A prompt that the store has whole, and nothing of which has been read."""
    return PendingRead(tokens, tokens, tokens, spared)


def cuts(*reads: int, rates: Rates = EQUAL, waiting: int = 0, ahead: int = 0) -> str:
    """A letter for each prompt of that many tokens: r, it is read, or c, it is computed."""
    later = slower_reads([prompt(one) for one in reads], rates, ahead=ahead, waiting=waiting)
    return "".join("rc"[one] for one in later)


# ---- the rule ------------------------------------------------------------------------------------


def test_a_burst_is_divided_between_the_two_queues() -> None:
    assert cuts(*[1000] * 7) == "rcrcrcr"
    # The faster one gets more of it.
    assert cuts(*[1000] * 8, rates=Rates(1000, 3000)).count("c") == 6
    assert cuts(*[1000] * 8, rates=Rates(3000, 1000)).count("c") == 1


@pytest.mark.parametrize("rates", [Rates(700, 1000), Rates(1000, 1000), Rates(1000, 400)])
def test_both_queues_of_a_burst_end_nearly_together(rates: Rates) -> None:
    sizes = [1000] * 40
    way = cuts(*sizes, rates=rates)
    read_s = 1000 * way.count("r") / rates.reads
    compute_s = 1000 * way.count("c") / rates.prefills
    assert compute_s <= read_s <= 1.25 * (compute_s + 1000 / rates.prefills) + 0.01
    alone_s = min(sum(sizes) / rates.reads, sum(sizes) / rates.prefills)
    assert max(read_s, compute_s) < 0.8 * alone_s


def test_what_waits_to_be_computed_gives_time_to_read() -> None:
    slow = Rates(reads=100, prefills=1000)
    assert cuts(1000, rates=slow) == "c"
    assert cuts(1000, rates=slow, waiting=6900) == "c"
    assert cuts(1000, rates=slow, waiting=7100) == "r"


def test_what_is_read_before_for_nobody_takes_time_too() -> None:
    assert cuts(1000, ahead=200) == "r"
    assert cuts(1000, ahead=300) == "c"


def test_one_that_is_cut_is_not_read_before_the_next_but_computed_before_it() -> None:
    def third(second: PendingRead) -> str:
        reads = [prompt(1000), second, prompt(3000)]
        return "".join("rc"[one] for one in slower_reads(reads, EQUAL, ahead=0, waiting=0))[1:]

    assert third(prompt(1000, spared=True)) == "rc"
    assert third(prompt(1000)) == "cr"
    # A cut request also computes the tokens that the store lacks, and the next one waits for that.
    assert cuts(1000, 1000, ahead=2000) == "cc"
    longer = [PendingRead(1000, 1000, 4000), prompt(1000)]
    assert slower_reads(longer, EQUAL, ahead=2000, waiting=0) == [True, False]


@pytest.mark.parametrize(
    ("reads_per_s", "way"),
    [
        pytest.param(1000, "r", id="as-fast"),
        pytest.param(800, "r", id="within-the-margin"),
        pytest.param(780, "c", id="beyond-it"),
    ],
)
def test_alone_it_may_take_a_quarter_longer(reads_per_s: int, way: str) -> None:
    assert cuts(1000, rates=Rates(reads_per_s, 1000)) == way


def test_a_read_that_is_nearly_done_is_not_cut_for_nothing() -> None:
    slow = Rates(reads=1000, prefills=10_000)
    assert cuts(11, rates=slow) == "r", "it costs less than ten milliseconds"
    assert cuts(13, rates=slow) == "c"


def test_a_call_under_way_is_half_done_but_brings_nothing_if_it_is_cut() -> None:
    slow = Rates(reads=600, prefills=1000)
    assert slower_reads([PendingRead(1000, 1000, 1000)], slow, ahead=0, waiting=0) == [True]
    assert slower_reads([PendingRead(500, 1000, 1000)], slow, ahead=0, waiting=0) == [False]


def test_the_spared_one_is_read_and_the_others_know_it() -> None:
    reads = [prompt(1000), prompt(1000, spared=True), prompt(1000)]
    assert slower_reads(reads, EQUAL, ahead=0, waiting=0) == [False, False, True]


@pytest.mark.parametrize("rates", [Rates(), Rates(reads=1), Rates(prefills=10**6)])
def test_nothing_is_cut_before_both_rates_are_known(rates: Rates) -> None:
    assert cuts(*[10**6] * 4, rates=rates) == "rrrr"
    assert not is_rejected(10**6, rates, ahead=10**6, waiting=0)


def test_a_read_is_not_begun_where_computing_is_more_than_twice_as_fast() -> None:
    def hopeless(reads: int, ahead: int = 0, waiting: int = 0) -> bool:
        return is_rejected(1000, Rates(reads, 1000), ahead=ahead, waiting=waiting)

    assert not hopeless(500)
    assert hopeless(490)
    assert not hopeless(490, waiting=1000), "it can be read while others are computed"
    assert hopeless(490, waiting=1000, ahead=1000)


# ---- the rates -----------------------------------------------------------------------------------


def rate_of(*samples: tuple[int, float]) -> float:
    estimate = RateEstimate()
    for tokens, seconds in samples:
        estimate.add(tokens, seconds)
    return estimate.tokens_per_s


def test_rates_are_known_from_the_fourth_measurement_on() -> None:
    reads, prefills = RateEstimate(), RateEstimate()
    for count in range(4):
        assert (reads.known, prefills.known) == (0, 0), count
        reads.add(100, 1.0)
        prefills.add(1000, 1.0)
    assert (reads.known, prefills.known) == (100, 1000)


def test_nothing_is_learned_from_nothing() -> None:
    reads = RateEstimate()
    reads.add(0, 1.0)
    reads.add(10, 0.0)
    assert reads.samples == 0


def test_tiny_prefills_say_little_about_large_ones() -> None:
    tiny, large = (64, 0.02), (8192, 0.2)
    assert rate_of(*[tiny] * 4) == pytest.approx(3200)
    assert rate_of(*[tiny] * 4, large) > 0.95 * 40960
    assert rate_of(*[large] * 4, *[tiny] * 40) > 0.85 * 40960
    assert rate_of(*[tiny, large] * 20) > 0.95 * 40960


def test_a_change_is_noticed_within_a_few_measurements_of_its_size() -> None:
    before = [(1000, 1.0)] * 20
    assert rate_of(*before, *[(1000, 0.1)] * 8) > 8500
    assert rate_of(*before, *[(1000, 10.0)] * 8) < 250
    # Calls of a store may shrink for good: the largest of them is forgotten.
    small = [(100, 1.0)] * 400
    assert rate_of(*before, *small) == pytest.approx(100, rel=0.05)


def test_equal_measurements_fade_as_fast_as_they_should() -> None:
    weights = list(accumulate([1000.0] * 50, lambda sum_, one: sum_ - sum_ / 4 + one))
    assert 1000 / weights[-1] == pytest.approx(0.25, rel=0.01)
    steady = [(1000, 1.0)] * 50
    assert rate_of(*steady, (1000, 0.5)) == pytest.approx(1250, rel=0.01)
