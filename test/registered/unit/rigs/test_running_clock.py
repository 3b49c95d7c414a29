"""A clock that stands still while the process does."""

from __future__ import annotations

from rigs.disaggregation.desk_rig import Clock
from rigs.running_clock import LONGEST_STEP_S, RunningClock
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


def test_a_pause_counts_half_a_second_at_most() -> None:
    real = Clock()
    clock = RunningClock(real)
    real.now += 0.25
    assert clock() == 0.25
    real.now += 100
    assert clock() == 0.25 + LONGEST_STEP_S


def test_it_goes_on_though_nobody_reads_it() -> None:
    with RunningClock() as clock:
        assert wait_until(lambda: clock._seconds > LONGEST_STEP_S, 60), "more than one step"
