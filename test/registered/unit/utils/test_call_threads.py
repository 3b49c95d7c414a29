"""Threads for calls that may hang: reused when idle, never waited for."""

from __future__ import annotations

import threading

import pytest

from rigs.servers.scarce_threads import NO_THREAD, no_threads
from sglang.srt.utils.background_call import CallThreads
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_idle_threads_are_taken_again() -> None:
    threads = CallThreads("reuse")
    seen: list[int] = []
    for count in range(1, 6):
        threads.submit(lambda: seen.append(threading.get_ident()))
        assert wait_until(lambda: not threads.num_busy, 30)
        assert len(seen) == count
    assert len(set(seen)) == 1
    threads.close()
    assert wait_until(lambda: not named("reuse"), 30)


def test_a_thread_is_prepared_once_before_its_work() -> None:
    seen: list[tuple[str, int]] = []
    threads = CallThreads("prepared", lambda: seen.append(("enter", threading.get_ident())))
    for count in range(1, 4):
        threads.submit(lambda: seen.append(("work", threading.get_ident())))
        assert wait_until(lambda: not threads.num_busy, 30)
        assert len(seen) == count + 1
    assert [what for what, _ in seen] == ["enter", "work", "work", "work"]
    assert len({thread for _, thread in seen}) == 1
    threads.close()


def test_work_that_hangs_holds_up_nothing() -> None:
    threads = CallThreads("hang")
    go_on, ran = threading.Event(), threading.Event()

    def wait() -> None:
        go_on.wait(60)

    for _ in range(20):
        threads.submit(wait)
    threads.submit(ran.set)
    assert ran.wait(30)
    assert threads.num_busy >= 20
    go_on.set()
    assert wait_until(lambda: threads.num_busy == 0, 30)
    assert wait_until(lambda: len(named("hang")) <= 8, 30), "no more stay than may be of use"
    threads.close()
    threads.close()
    assert wait_until(lambda: not named("hang"), 30)


def test_work_without_a_thread_is_refused_and_does_not_count() -> None:
    threads = CallThreads("scarce")
    ran = threading.Event()
    with no_threads("scarce"), pytest.raises(RuntimeError, match=NO_THREAD):
        threads.submit(ran.set)
    assert threads.num_busy == 0
    threads.submit(ran.set)
    assert ran.wait(30)
    threads.close()
