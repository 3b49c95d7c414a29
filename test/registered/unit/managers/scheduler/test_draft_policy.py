"""Which steps verify drafts: the kind that was measured to give tokens faster."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sglang.srt.managers.scheduler.draft_policy import DraftPolicy
from sglang.srt.managers.scheduler.launched_step import LaunchedStep
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


class Clock:
    """Ticks of a server whose verifications give `accepted` drafts of each request."""

    def __init__(self, policy: DraftPolicy) -> None:
        self.policy = policy
        self.now = 100.0
        self.plain_s = dict.fromkeys(range(100), 1.0)
        self.verify_s = 2.0
        self.accepted = 2
        self.is_for_nothing = False
        """True if all requests had ended before the results of a verification."""

    def run(self, size: int, steps: int, *, prefill_every: int = 0) -> list[int]:
        """Run `steps` of `size` requests. Returns their widths."""
        widths = []
        for number in range(steps):
            if prefill_every and number % prefill_every == 0:
                self.policy.on_tick(self.now, _step(0, 1))
                self.now += 50.0
            width = self.policy.width(size)
            step = _step(size, width)
            self.policy.on_tick(self.now, step)
            if width > 1:
                going_on = 0 if self.is_for_nothing else size
                self.policy.on_verified(step, (1 + self.accepted) * going_on, going_on)
            self.now += self.verify_s if width > 1 else self.plain_s[size]
            widths.append(width)
        return widths


def _step(size: int, width: int) -> LaunchedStep:
    reqs: list[Any] = [None] * size
    return cast(LaunchedStep, SimpleNamespace(works=[None] * (not size), reqs=reqs, width=width))


@pytest.fixture
def clock() -> Clock:
    return Clock(DraftPolicy(4, always=False))


def test_verifications_for_nothing_are_no_reason_to_verify(clock: Clock) -> None:
    """Their requests had ended. A batch size may have no other verifications."""
    clock.is_for_nothing = True
    widths = clock.run(1, 3000)
    assert widths.count(4) < 150
    view = clock.policy.describe()
    assert view is not None
    assert [one["tokens"] for one in view["sizes"]] == [None]


def test_an_operator_sees_what_was_measured_and_chosen(clock: Clock) -> None:
    clock.policy.width(0)
    clock.run(1, 10)
    clock.plain_s[40] = 0.1
    clock.run(40, 3000)
    assert clock.policy.describe() == {
        "num_drafts": 3,
        "always": False,
        "largest_batch": 64,
        "sizes": [
            {"first": 1, "last": 1, "verifies": True, "plain_ms": None, "verification_ms": 2000.0,
             "tokens": 3.0},
            {"first": 32, "last": 63, "verifies": False, "plain_ms": 100.0,
             "verification_ms": 2000.0, "tokens": 3.0},
        ],
    }  # fmt: skip
    assert DraftPolicy(1, always=False).describe() is None


def test_drafts_stay_where_they_pay(clock: Clock) -> None:
    widths = clock.run(5, 3000)
    assert set(widths[:60]) == {4}
    assert 10 < widths.count(1) < 60, "the trials alone"
    assert set(widths[100:2000]) == {4}


def test_drafts_end_where_they_do_not_pay(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    clock.verify_s = 3.5
    with caplog.at_level(logging.INFO):
        clock.run(5, 100)
    assert "Batches of 4 to 7 requests decode without drafts" in caplog.text
    assert "takes 3500.00 ms and gives 3.00 tokens of a request" in caplog.text
    assert "a plain step takes 1000.00 ms" in caplog.text
    assert set(clock.run(6, 1000)) == {1}, "another size of the class"
    assert set(clock.run(3, 60)) == {4}, "another class is not known yet"
    clock.verify_s = 2.0
    with caplog.at_level(logging.INFO):
        widths = clock.run(5, 3000)
    assert widths[0] == 1
    assert widths[-1] == 4, "tried again, and found to pay"
    assert "Batches of 4 to 7 requests decode with drafts" in caplog.text


def test_wrong_drafts_do_not_pay(clock: Clock) -> None:
    clock.accepted, clock.verify_s = 0, 1.1
    assert clock.run(1, 100)[-1] == 1


def test_steps_beside_prefills_are_not_timed(clock: Clock) -> None:
    """A prefill's time is not that of the step before it."""
    clock.run(5, 600, prefill_every=3)
    assert set(clock.run(5, 500)) == {4}
    alone = Clock(DraftPolicy(4, always=False))
    assert set(alone.run(5, 300, prefill_every=1)) == {4}, "no step was timed, and none tried"


def test_large_batches_are_never_verified(clock: Clock) -> None:
    assert (clock.policy.width(64), clock.policy.width(65)) == (4, 1)
    assert DraftPolicy(4, always=True).width(65) == 1


def test_nothing_is_measured_if_asked_to_speculate_always() -> None:
    clock = Clock(DraftPolicy(4, always=True))
    clock.verify_s = 10.0
    assert set(clock.run(5, 300)) == {4}


def test_a_server_without_drafts_has_plain_steps() -> None:
    assert set(Clock(DraftPolicy(1, always=False)).run(5, 300)) == {1}
