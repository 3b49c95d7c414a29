"""A call in a thread of its own: its result, its exceptions, and discarding abandoned results."""

from __future__ import annotations

import threading

import pytest

from sglang.srt.utils.background_call import BackgroundCall
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


class Gate:
    """Work that waits for a signal, and the results that were discarded."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.discarded: list[int] = []
        self.has_discarded = threading.Event()

    def work(self) -> int:
        assert self.opened.wait(30)
        return 7

    def discard(self, result: int) -> None:
        self.discarded.append(result)
        self.has_discarded.set()


def test_the_result_is_kept() -> None:
    gate = Gate()
    call = BackgroundCall("work", gate.work, discard=gate.discard)
    assert not call.ended
    assert not call.wait(0.001)
    gate.opened.set()
    assert call.wait(30)
    assert (call.ended, call.error, call.result, gate.discarded) == (True, None, 7, [])


@pytest.mark.parametrize("raised", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_any_exception_ends_only_the_thread(
    raised: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> int:
        raise raised

    call = BackgroundCall("work", work, expected=(ValueError,))
    assert call.wait(30)
    assert call.error is raised
    is_expected = isinstance(raised, ValueError)
    assert ("work failed" in caplog.text) is not is_expected, "a traceback for what is not expected"


@pytest.mark.parametrize("ends_first", [True, False])
def test_an_abandoned_result_is_discarded(ends_first: bool) -> None:
    gate = Gate()
    call = BackgroundCall("work", gate.work, discard=gate.discard)
    if ends_first:
        gate.opened.set()
        assert call.wait(30)
    call.abandon()
    gate.opened.set()
    assert gate.has_discarded.wait(30)
    assert gate.discarded == [7]


def test_a_failing_discard_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> int:
        return 7

    def discard(result: int) -> None:
        done.set()
        raise SystemExit(result)

    done = threading.Event()
    call = BackgroundCall("work", work, discard=discard)
    assert call.wait(30)
    call.abandon()
    assert done.wait(30)
    for thread in threading.enumerate():
        if thread.name == "work":
            thread.join(30)
    assert "work could not be undone" in caplog.text


def test_without_a_thread_the_call_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, done = Gate(), Gate()
    done.opened.set()
    ended = BackgroundCall("work", done.work, discard=done.discard)
    assert ended.wait(10)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    call = BackgroundCall("work", gate.work, discard=gate.discard)
    assert call.ended and str(call.error) == "can't start new thread"
    call.abandon()
    ended.abandon()
    assert not gate.discarded and not done.discarded, "it is not undone, and nothing is raised"
