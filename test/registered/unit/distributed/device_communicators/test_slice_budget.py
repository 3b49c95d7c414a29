"""The budget of slices in flight: bounded, in order, given back."""

from __future__ import annotations

import random
import threading
import time

import pytest

from sglang.srt.distributed.device_communicators.transfer_types import MAX_SLICES, SliceBudget
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


def test_two_threads_never_exceed_the_budget() -> None:
    budget = SliceBudget(100)
    over: list[int] = []
    held = 0
    lock = threading.Lock()

    def work(seed: int) -> None:
        nonlocal held
        rng = random.Random(seed)
        for _ in range(300):
            slices = rng.randint(1, 100)
            with budget.hold(slices):
                with lock:
                    held += slices
                    if held > 100:
                        over.append(held)
                with lock:
                    held -= slices

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not over
    assert budget.in_flight == 0
    assert 0 < budget.peak <= 100


def test_a_large_batch_is_not_starved_by_small_ones() -> None:
    budget = SliceBudget(10)
    order: list[str] = []

    def large() -> None:
        with budget.hold(10):
            order.append("large")

    def small() -> None:
        with budget.hold(1):
            order.append("small")

    def waiting(count: int) -> None:
        deadline = time.monotonic() + 60
        while len(budget._waiting) < count:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    with budget.hold(5):
        threads = [threading.Thread(target=large), threading.Thread(target=small)]
        threads[0].start()
        waiting(1)
        threads[1].start()
        waiting(2)
        assert order == []
    for thread in threads:
        thread.join(30)
    assert order == ["large", "small"]


def test_what_can_never_fit_is_refused_and_failures_give_back() -> None:
    budget = SliceBudget()
    with pytest.raises(ValueError, match="1025 slices"), budget.hold(MAX_SLICES + 1):
        pass
    with pytest.raises(RuntimeError), budget.hold(MAX_SLICES):
        raise RuntimeError
    assert budget.in_flight == 0


def test_who_waits_no_longer_leaves_the_line() -> None:
    budget = SliceBudget(10)
    assert budget.acquire(8)
    assert not budget.acquire(5, time.monotonic() - 1)
    assert not budget.acquire(5, time.monotonic() + 0.01)
    assert budget.acquire(2, time.monotonic()), "it is first in the line, and there is room"
    budget.release(8)
    assert budget.acquire(8, time.monotonic())
    assert budget.in_flight == 10


def test_the_next_in_the_line_goes_on_when_the_first_gives_up() -> None:
    budget = SliceBudget(10)
    assert budget.acquire(8)
    passed = threading.Event()

    def small() -> None:
        with budget.hold(2):
            passed.set()

    thread = threading.Thread(target=small)

    def start_when_the_first_waits() -> None:
        while not budget._waiting:
            time.sleep(0.001)
        thread.start()

    starter = threading.Thread(target=start_when_the_first_waits)
    starter.start()
    assert not budget.acquire(5, time.monotonic() + 1.0)
    assert passed.wait(30)
    starter.join(30)
    thread.join(30)
    assert budget.in_flight == 8


def test_another_thread_may_give_back() -> None:
    budget = SliceBudget(10)
    assert budget.acquire(10)
    thread = threading.Thread(target=budget.release, args=(10,))
    thread.start()
    assert budget.acquire(10, time.monotonic() + 10)
    thread.join(30)
