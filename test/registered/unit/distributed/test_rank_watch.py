"""The watch over the ranks: who counts as lost, and who does not."""

from __future__ import annotations

import threading

import pytest

from sglang.srt.distributed.rank_watch import RankWatch
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


class Store:
    """Counts of all ranks, in memory; may be out of reach, or not answer."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.is_gone = False
        self.answers = threading.Event()
        self.answers.set()

    def set(self, key: str, value: str, /) -> None:
        self._reach()
        self.values[key] = value.encode()

    def check(self, keys: list[str], /) -> bool:
        self._reach()
        return all(key in self.values for key in keys)

    def get(self, key: str, /) -> bytes:
        self._reach()
        return self.values[key]

    def _reach(self) -> None:
        self.answers.wait()
        if self.is_gone:
            raise RuntimeError("Connection reset by peer\nwith a trace")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watch_of(store: Store, clock: Clock, rank: int = 0, size: int = 3) -> RankWatch:
    """A watch whose own thread never checks."""

    def never(cause: str) -> None:
        raise AssertionError(cause)

    return RankWatch(store, rank, size, never, limit_s=8.0, period_s=1e6, clock=clock)


def join(watch: RankWatch) -> None:
    for thread in watch._threads:
        thread.join(30)
        assert not thread.is_alive()


def checks(watch: RankWatch, clock: Clock, seconds: int) -> list[str]:
    """Findings of a watch that checks once a second."""
    found = []
    for _ in range(seconds):
        clock.now += 1.0
        found.append(watch.check())
    return [cause for cause in found if cause is not None]


def test_ranks_that_count_are_there() -> None:
    store, clock = Store(), Clock()
    watches = [watch_of(store, clock, rank) for rank in range(3)]
    for _ in range(30):
        clock.now += 1.0
        assert [watch.check() for watch in watches] == [None] * 3


@pytest.mark.parametrize("has_counted", [False, True])
def test_a_rank_that_stops_counting_is_named(has_counted: bool) -> None:
    store, clock = Store(), Clock()
    mine, other, stuck = (watch_of(store, clock, rank) for rank in range(3))
    if has_counted:
        assert stuck.check() is None
    # Its count was new at the first check.
    for _ in range(9 + has_counted):
        clock.now += 1.0
        found = [other.check(), mine.check()]
    assert found == 2 * ["rank 2 has given no sign of life for 8 s"]


def test_a_rank_that_announced_its_silence_has_time() -> None:
    store, clock = Store(), Clock()
    mine, silent = (watch_of(store, clock, rank, size=2) for rank in range(2))
    silent.announce(60.0)
    assert checks(mine, clock, 60) == []
    assert checks(mine, clock, 2)[:1] == ["rank 1 has given no sign of life for 60 s"]


def test_a_rank_that_is_heard_again_has_no_more_time() -> None:
    store, clock = Store(), Clock()
    mine, silent = (watch_of(store, clock, rank, size=2) for rank in range(2))
    silent.announce(60.0)
    assert silent.check() is None, "its thread may beat before the silence"
    assert checks(mine, clock, 20) == []
    silent.announce(0.0)
    assert checks(mine, clock, 10)[:1] == ["rank 1 has given no sign of life for 8 s"]


def test_a_store_out_of_reach_is_rank_0() -> None:
    store, clock = Store(), Clock()
    watch = watch_of(store, clock, rank=1)
    assert watch.check() is None
    store.is_gone = True
    assert watch.check() == "rank 0 is gone or out of reach: Connection reset by peer"


def test_who_was_stopped_itself_gives_the_others_time_again() -> None:
    store, clock = Store(), Clock()
    watch = RankWatch(store, 0, 2, lambda cause: None, limit_s=8.0, period_s=1e6, clock=clock)
    watch._period_s = 1.0
    assert checks(watch, clock, 5) == []
    clock.now += 60.0
    assert watch.check() is None
    assert checks(watch, clock, 8) == []
    assert checks(watch, clock, 1) == ["rank 1 has given no sign of life for 8 s"]


def test_rank_0_that_does_not_answer_is_noticed_within_the_limit() -> None:
    store, clock = Store(), Clock()
    watch = RankWatch(store, 1, 2, lambda cause: None, limit_s=8.0, period_s=1e6, clock=clock)
    watch._period_s = 1.0
    for _ in range(30):
        watch.check()
        assert watch.guard() is None, "checks end"
    assert [watch.guard() for _ in range(7)] == [
        *[None] * 6,
        "rank 0 is stuck or out of reach: no answer from it for 7 s",
    ]
    watch.check()
    assert watch.guard() is None


def test_the_guard_tells_of_a_call_that_does_not_return() -> None:
    store, told, done = Store(), list[str](), threading.Event()

    def lost(cause: str) -> None:
        told.append(cause)
        done.set()

    store.answers.clear()
    watch = RankWatch(store, 1, 2, lost, limit_s=0.1, period_s=0.01)
    assert done.wait(30)
    store.is_gone = True
    store.answers.set()
    join(watch)
    assert len(told) == 1, "the check fails, and reports nothing more"
    assert "rank 0 is stuck or out of reach" in told[0]


def test_the_thread_tells_once_and_ends() -> None:
    store, told, done = Store(), list[str](), threading.Event()

    def lost(cause: str) -> None:
        told.append(cause)
        done.set()

    store.is_gone = True
    watch = RankWatch(store, 1, 2, lost, limit_s=1.0, period_s=0.01)
    assert done.wait(30)
    join(watch)
    assert len(told) == 1


def test_a_closed_watch_tells_nothing() -> None:
    store, told = Store(), list[str]()
    watch = RankWatch(store, 1, 2, told.append, limit_s=1.0, period_s=0.01)
    watch.close()
    join(watch)
    store.is_gone = True
    assert told == []
