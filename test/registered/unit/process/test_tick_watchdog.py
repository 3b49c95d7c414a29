"""The watchdog notices a tick that hangs, and only that."""

from __future__ import annotations

import threading

import pytest

from sglang.srt.process.tick_watchdog import TickWatchdog
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.readings = 0

    def __call__(self) -> float:
        self.readings += 1
        return self.now


def test_a_hang_is_noticed_and_a_long_idle_time_is_none() -> None:
    hung = threading.Event()
    clock = Clock()
    # Looks every 10 ms of real time at a clock of ours.
    watchdog = TickWatchdog(0.04, hung.set, clock)
    with watchdog.guard():
        clock.now += 0.03
    clock.now += 1000.0
    with watchdog.guard():
        readings = clock.readings
        assert wait_until(lambda: clock.readings > readings + 1, timeout=30)
        assert not hung.is_set(), "the time between ticks does not count"
        clock.now += 0.05
        assert hung.wait(30)
    watchdog.close()


def test_a_tick_that_raises_is_over() -> None:
    hung = threading.Event()
    clock = Clock()
    watchdog = TickWatchdog(0.04, hung.set, clock)
    with pytest.raises(ValueError, match="boom"), watchdog.guard():
        raise ValueError("boom")
    clock.now += 1000.0
    assert not hung.wait(0.2), "it has looked several times since"
    watchdog.close()
    watchdog.close()
