"""Where a request is: ids in use, the queue, and what a long queue costs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from sglang.srt.managers.messages.io_struct import (
    AbortReq,
    FinishReason,
    TokenizedGenerateReqInput,
    ToScheduler,
)
from sglang.srt.managers.scheduler.req import Req
from sglang.srt.managers.scheduler.request_queues import RequestQueues
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scheduler_rig import SchedulerRig, greedy, prompt

register_cpu_ci(est_time=6, suite="base-a-test-cpu")


@pytest.fixture(scope="module", name="model")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("model")


def req(rid: str) -> Req:
    message = TokenizedGenerateReqInput(
        rid=rid, input_ids=token_array([1, 2]), sampling_params=greedy(), seed=0
    )
    return Req.from_message(message, arrival_number=0, max_request_tokens=8, eos_token_ids=[])


def test_an_id_is_in_use_from_arrival_to_end() -> None:
    queues = RequestQueues()
    a, b = req("a"), req("b")
    queues.arrive(a)
    queues.arrive(b)
    queues.admit(a)
    assert (list(queues.waiting), list(queues.alive)) == ([b], [a, b])
    queues.retract(a)
    assert queues.waiting_ids() == {"a", "b"}
    queues.admit(a)
    queues.end(a)
    assert queues.find("a") is None
    assert queues.find("b") is b
    queues.end(b)
    assert (len(queues.waiting), len(queues.alive), queues.num_admitted) == (0, 0, 2)


def test_the_digest_is_of_who_waits_and_who_was_admitted_in_whatever_order() -> None:
    queues, other = RequestQueues(), RequestQueues()
    for rid in "abc":
        queues.arrive(req(rid))
    for rid in "cba":
        other.arrive(req(rid))
    seen = [queues.digest]
    assert other.digest == queues.digest != 0
    a = queues.find("a")
    assert a is not None
    for change in (queues.admit, queues.retract, queues.admit, queues.end):
        change(a)
        seen.append(queues.digest)
    assert seen[2] == seen[0] and seen[3] == seen[1]
    assert len(set(seen)) == 3
    assert queues.describe() == {"request b": "waits", "request c": "waits"}
    b = queues.find("b")
    assert b is not None
    queues.admit(b)
    assert queues.describe() == {"request b": "has been admitted", "request c": "waits"}


def test_who_is_aborted_is_known_until_the_end_with_the_first_reason() -> None:
    queues = RequestQueues()
    for name in "abc":
        queues.arrive(req(name))
    a = queues.find("a")
    assert a is not None
    first, second = (FinishReason(type="abort", message=text) for text in ("first", "second"))
    queues.abort(a, first)
    queues.abort(a, second)
    assert list(queues.aborted) == [a]
    assert a.to_abort is first
    queues.end(a)
    assert not queues.aborted


def test_no_request_is_in_two_places() -> None:
    queues = RequestQueues()
    a = req("a")
    queues.arrive(a)
    with pytest.raises(AssertionError, match="here already"):
        queues.arrive(req("a"))
    queues.admit(a)
    queues.end(a)
    with pytest.raises(AssertionError, match="has ended"):
        queues.retract(a)


def python_work(action: Callable[[], object]) -> int:
    """Byte codes that `action` executes in this thread."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("kind", ["no message", "arrival", "abort"])
def test_a_step_and_a_message_cost_the_same_however_many_wait(model: Path, kind: str) -> None:
    def messages(rig: SchedulerRig, first: int) -> list[ToScheduler]:
        if kind == "arrival":
            return [rig.request(f"r{first + n}", prompt(n, 5)) for n in range(10)]
        return [AbortReq(rid=f"gone{n}") for n in range(10)] if kind == "abort" else []

    def work_of_a_tick(num_waiting: int) -> int:
        rig = SchedulerRig(model, max_requests=1)
        rig.step(rig.request("runs", prompt(1, 5), greedy(400)))
        rig.step(*(rig.request(f"r{n}", prompt(n, 5)) for n in range(num_waiting)))
        rig.step()
        asked = messages(rig, num_waiting)
        return python_work(lambda: rig.step(*asked))

    assert work_of_a_tick(1000) < 1.3 * work_of_a_tick(10)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
