"""The breaker: opens at a failure, probes after a pause that grows, closes at a success.

Pages whose transfer has timed out are left alone for a while.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import pytest

from sglang.srt.mem_cache.l3.circuit_breaker import PERIOD_S, CircuitBreaker, RecentTimeouts
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
from sglang.srt.mem_cache.tree.radix_key import PageHash
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


OPENED: Final = HiCacheMetrics(None).breaker_open


class Store:
    """A clock and a store that a test turns by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.works = False
        self.probes = 0
        self.breaker = CircuitBreaker(self._probe, OPENED, clock=lambda: self.now)

    def _probe(self) -> bool:
        self.probes += 1
        return self.works


def test_closed_until_something_fails() -> None:
    store = Store()
    assert store.breaker.allow()
    store.breaker.trip()
    assert store.breaker.is_open
    assert not store.breaker.allow()
    assert store.probes == 0


def test_pauses_double_to_half_a_minute() -> None:
    store = Store()
    store.breaker.trip()
    pauses = []
    for _ in range(8):
        began = store.now
        while not store.probes:
            store.now += 0.5
            store.breaker.allow()
        pauses.append(store.now - began)
        store.probes = 0
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]


def test_a_probe_that_succeeds_closes_it() -> None:
    store = Store()
    store.breaker.trip()
    store.now, store.works = 1.0, True
    assert store.breaker.allow()
    assert not store.breaker.is_open


def test_a_failure_after_recovery_starts_with_a_short_pause() -> None:
    store = Store()
    for _ in range(4):
        store.breaker.trip()
    store.breaker.reset()
    store.breaker.trip()
    store.now, store.works = 1.0, True
    assert store.breaker.allow()
    assert store.probes == 1


def test_who_asks_during_a_probe_is_refused_and_does_not_probe_too() -> None:
    probes: list[str] = []
    goes_on = threading.Event()

    def probe() -> bool:
        probes.append("probe")
        return goes_on.wait(30)

    breaker = CircuitBreaker(probe, OPENED, clock=lambda: float(len(probes) * 100))
    breaker.trip()
    probes.append("time passes")
    answers: list[bool] = []
    first = threading.Thread(target=lambda: answers.append(breaker.allow()))
    first.start()
    while len(probes) < 2:
        first.join(0.001)
    assert not breaker.allow()
    goes_on.set()
    first.join()
    assert answers == [True]
    assert probes == ["time passes", "probe"]


@pytest.mark.parametrize("works", [False, True])
def test_a_probe_has_ended_only_when_its_result_counts(works: bool) -> None:
    """A caller between the end of a probe and its result's effect gets the answer of before."""
    store = Store()
    store.breaker.trip()
    store.now, store.works = 1.0, works
    answers: list[bool] = []
    gate = Gate(store.breaker._lock, lambda: answers.append(store.breaker.allow()))
    store.breaker._lock = gate  # type: ignore[assignment]
    assert store.breaker.allow() is works
    assert answers == [False]
    assert store.probes == 1


class Gate:
    """A lock that lets another caller in first when it is taken the second time, for a probe's
    result."""

    def __init__(self, lock: threading.Lock, somebody: Callable[[], None]) -> None:
        self._lock = lock
        self._somebody = somebody
        self._taken = 0

    def __enter__(self) -> None:
        self._taken += 1
        if self._taken == 2:
            self._somebody()
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


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
