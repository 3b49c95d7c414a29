"""The breaker: opens at a failure, probes after a pause that grows, closes at a success."""

from __future__ import annotations

import pytest

from sglang.srt.mem_cache.circuit_breaker import CircuitBreaker
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


class Store:
    """A clock and a store that a test turns by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.works = False
        self.probes = 0
        self.breaker = CircuitBreaker(self._probe, clock=lambda: self.now)

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
    assert store.breaker.times_opened == 1


def test_a_failure_after_recovery_starts_with_a_short_pause() -> None:
    store = Store()
    for _ in range(4):
        store.breaker.trip()
    store.breaker.reset()
    store.breaker.trip()
    store.now, store.works = 1.0, True
    assert store.breaker.allow()
    assert store.breaker.times_opened == 2


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
