"""The breaker: opens at a failure, probes after a pause that grows, closes at a success.

Pages whose transfer has timed out are left alone for a while.
"""

from __future__ import annotations

import itertools
import threading
from typing import Final

import pytest

from sglang.srt.mem_cache.l3 import circuit_breaker
from sglang.srt.mem_cache.l3.circuit_breaker import PERIOD_S, CircuitBreaker, RecentTimeouts
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
from sglang.srt.mem_cache.tree.radix_key import PageHash
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


OPENED: Final = HiCacheMetrics(None).breaker_open


class Store:
    """A store that a test turns by hand. Its breaker's thread is the test's: where the thread would
    sleep, the time passes, and where it would sleep for good, it ends."""

    def __init__(self, *answers: bool) -> None:
        self.now = 0.0
        self.probes = list(answers)
        """Answers to the probes that are left."""
        self.slept: list[float] = []
        self.breaker = CircuitBreaker(lambda: self.probes.pop(0), OPENED, clock=lambda: self.now)
        self.breaker._changed = Sleep(self)

    def run(self) -> None:
        """Run the thread until the breaker is closed, or no probe is left."""
        self.breaker._has_ended = False
        self.breaker.run()


class Sleep(threading.Condition):
    """See `Store`."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def wait(self, timeout: float | None = None) -> bool:
        store = self._store
        if timeout is None or not store.probes:
            store.breaker._has_ended = True
            return True
        store.slept.append(timeout)
        store.now += timeout
        return False


class Waits(threading.Condition):
    """Tells when its thread begins to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.begun.set()
        return super().wait(timeout)


def test_a_failure_and_the_end_wake_the_thread() -> None:
    probed = threading.Event()

    def probe() -> bool:
        probed.set()
        return True

    breaker = CircuitBreaker(probe, OPENED, clock=itertools.count(step=100.0).__next__)
    breaker._changed = waits = Waits()
    thread = threading.Thread(target=breaker.run)
    thread.start()
    assert waits.begun.wait(20)
    waits.begun.clear()
    breaker.trip()
    assert probed.wait(20) and waits.begun.wait(20)
    assert not breaker.is_open
    breaker.end()
    thread.join(20)
    assert not thread.is_alive()


def test_closed_until_something_fails() -> None:
    store = Store()
    assert not store.breaker.is_open
    store.breaker.trip()
    assert store.breaker.is_open


def test_pauses_double_to_half_a_minute() -> None:
    store = Store(*[False] * 7, True)
    store.breaker.trip()
    store.run()
    assert store.slept == [1, 2, 4, 8, 16, 30, 30, 30]
    assert not store.breaker.is_open


def test_a_failure_while_it_is_open_doubles_the_pause_too() -> None:
    store = Store(True)
    store.breaker.trip()
    store.now = 0.5
    store.breaker.trip()
    store.run()
    assert store.slept == [2]


def test_a_failure_after_recovery_starts_with_a_short_pause() -> None:
    store = Store(True)
    for _ in range(4):
        store.breaker.trip()
    store.breaker.reset()
    assert not store.breaker.is_open
    store.breaker.trip()
    store.run()
    assert store.slept == [1]


def test_a_closed_one_does_not_probe() -> None:
    store = Store(True)
    store.run()
    assert store.probes == [True]


def test_nobody_waits_for_a_probe() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def probe() -> bool:
        begun.set()
        return goes_on.wait(30)

    breaker = CircuitBreaker(probe, OPENED, clock=lambda: 0.0)
    breaker.trip()
    breaker._retry_at = 0.0
    thread = threading.Thread(target=breaker.run)
    thread.start()
    assert begun.wait(30)
    assert breaker.is_open
    breaker.reset()
    breaker.trip()
    assert breaker.is_open
    breaker.end()
    goes_on.set()
    thread.join(30)
    assert not thread.is_alive()
    assert not breaker.is_open, "the probe has succeeded"


@pytest.mark.parametrize("is_open", [False, True])
def test_its_thread_ends_also_in_a_pause(is_open: bool) -> None:
    breaker = CircuitBreaker(lambda: False, OPENED, clock=lambda: 0.0)
    if is_open:
        breaker.trip()
    thread = threading.Thread(target=breaker.run)
    thread.start()
    breaker.end()
    thread.join(30)
    assert not thread.is_alive()


def test_pages_are_left_alone_for_a_period() -> None:
    now = 0.0
    timeouts = RecentTimeouts(clock=lambda: now)
    first, second, third = (PageHash(name) for name in "abc")
    timeouts.add([second])
    assert timeouts.leading_allowed([first, second, third]) == 1
    assert timeouts.leading_allowed([third]) == 1
    now = PERIOD_S / 2
    timeouts.add([third])
    now = PERIOD_S
    assert timeouts.leading_allowed([first, second, third]) == 2
    now = 2 * PERIOD_S
    assert timeouts.leading_allowed([first, second, third]) == 3


def test_a_page_that_times_out_again_is_left_alone_for_a_whole_period() -> None:
    now = 0.0
    timeouts = RecentTimeouts(clock=lambda: now)
    first, second = (PageHash(name) for name in "ab")
    timeouts.add([first, second])
    now = PERIOD_S / 2
    timeouts.add([first])
    now = PERIOD_S
    assert timeouts.leading_allowed([second, first]) == 1, "the earliest is the first to end"


def test_the_oldest_of_too_many_pages_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_breaker, "_MAX_PAGES", 2)
    timeouts = RecentTimeouts(clock=lambda: 0.0)
    first, second, third = (PageHash(name) for name in "abc")
    timeouts.add([first, second, third])
    assert timeouts.leading_allowed([first, second, third]) == 1
