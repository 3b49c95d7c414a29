"""Samples of counts: one every five seconds, none lost at a pause, five minutes of them."""

from __future__ import annotations

from sglang.srt.observability.flow_history import FlowHistory
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


class Counts:
    """A history over one count, with the samples as (age, count)."""

    def __init__(self) -> None:
        self.tokens = 0
        self.num_read = 0
        self.history = FlowHistory(self.read)

    def read(self) -> dict[str, int]:
        self.num_read += 1
        return {"tokens": self.tokens}

    def latest(self, now: float) -> list[tuple[float, int]]:
        return [(one["age_s"], one["counts"]["tokens"]) for one in self.history.latest(now)]


def test_a_busy_scheduler_is_sampled_every_five_seconds() -> None:
    one = Counts()
    for tick in range(1001):
        one.tokens = tick
        one.history.on_tick(1000 + tick / 100)
    assert one.num_read == 3
    assert one.latest(1010.0) == [(10.0, 0), (5.0, 500), (0.0, 1000), (0.0, 1000)]


def test_tokens_before_a_pause_are_not_spread_over_it() -> None:
    one = Counts()
    for now, tokens in ((1000.0, 0), (1002.0, 70)):
        one.tokens = tokens
        one.history.on_tick(now)
    one.history.on_tick(1100.0)  # The first tick after the pause; nothing has happened yet.
    one.tokens = 90
    assert one.latest(1101.0) == [(101.0, 0), (99.0, 70), (1.0, 70), (0.0, 90)]


def test_the_number_of_samples_is_bounded() -> None:
    one = Counts()
    for step in range(1000):
        one.history.on_tick(1000.0 + 5 * step)
    assert len(one.latest(6000.0)) == 61
