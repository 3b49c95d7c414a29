"""State of a request, transitions between states, and the cost of a long queue."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.managers.scheduler.requests.req import Req
from sglang.srt.managers.scheduler.requests.request_queues import RequestQueues, RequestState
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.messages.io_struct import (
    AbortReq,
    FinishReason,
    TokenizedGenerateReqInput,
    ToScheduler,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


STATES: Final = tuple(RequestState)
WAITING, COMPUTING, DECODING, HELD, ENDED = STATES
REASON: Final = FinishReason(type="abort", message="because")


def make_req(rid: str) -> Req:
    message = TokenizedGenerateReqInput(
        rid=rid, input_ids=token_array([1, 2]), sampling_params=greedy(), seed=0
    )
    return Req(message, max_new_tokens=6)


def test_a_request_goes_from_queue_to_queue() -> None:
    queues = RequestQueues()
    a, b = make_req("a"), make_req("b")
    queues.arrive(a)
    queues.arrive(b)
    assert (list(queues.waiting), queues.num_holders, b.turn) == ([a, b], 0, 1)
    queues.cut(a)
    assert (queues.partial, list(queues.computing), list(queues.waiting)) == (a, [a], [b])
    queues.cut(a)
    queues.admit(a)
    queues.admit(b)
    assert (queues.partial, list(queues.computing), queues.num_admitted) == (None, [a, b], 2)
    queues.join(b)
    queues.join(a)
    assert (list(queues.decoding), list(queues.holders()), queues.num_joined) == ([b, a], [b, a], 2)
    queues.retract(b)
    assert (list(queues.alive), list(queues.waiting), queues.num_holders) == ([a, b], [b], 1)
    queues.finish(b, REASON)
    queues.finish(a, REASON)
    assert (len(queues.alive), queues.num_holders, a.progress.finish_reason) == (0, 0, REASON)


def test_an_id_is_in_use_from_arrival_to_end() -> None:
    queues = RequestQueues()
    first, second = make_req("a"), make_req("a")
    queues.arrive(first)
    with pytest.raises(AssertionError, match="a is here already"):
        queues.arrive(second)
    assert (queues.find("a"), queues.state_of(second)) == (first, ENDED)
    queues.finish(first, REASON)
    assert queues.find("a") is None
    with pytest.raises(AssertionError, match="a has ended"):
        queues.arrive(first)
    queues.arrive(second)
    assert (queues.find("a"), queues.state_of(first)) == (second, ENDED)
    for act in (queues.admit, queues.cut, queues.join, queues.hold, queues.retract):
        with pytest.raises(AssertionError, match="request a is ended"):
            act(first)
    assert queues.state_of(second) is WAITING


def test_the_first_reason_to_abort_counts_in_whatever_state() -> None:
    queues = RequestQueues()
    a = make_req("a")
    with pytest.raises(AssertionError, match="a has ended"):
        queues.abort(a, REASON)
    queues.arrive(a)
    queues.abort(a, REASON)
    queues.admit(a)
    queues.abort(a, FinishReason(type="abort", message="second"))
    assert (list(queues.aborted), a.progress.to_abort) == ([a], REASON)
    assert queues.state_of(a) is COMPUTING
    queues.finish(a, REASON)
    assert not queues.aborted


def test_one_prompt_at_a_time_is_computed_in_parts() -> None:
    queues = RequestQueues()
    a, b = make_req("a"), make_req("b")
    queues.arrive(a)
    queues.arrive(b)
    assert [queues.is_prompt_ahead(rid) for rid in ("a", "b", "c", None)] == [True, True] + 2 * [
        False
    ]
    queues.cut(a)
    with pytest.raises(AssertionError, match="one prompt at a time"):
        queues.cut(b)
    with pytest.raises(AssertionError, match="not complete"):
        queues.join(a)
    assert queues.is_prompt_ahead("a")
    queues.admit(a)
    assert not queues.is_prompt_ahead("a")
    with pytest.raises(AssertionError, match="retract: the prompt of request a is in flight"):
        queues.retract(a)


def test_slots_of_a_held_request_may_outlast_it() -> None:
    queues = RequestQueues()
    first, second = make_req("a"), make_req("a")
    queues.arrive(first)
    with pytest.raises(AssertionError, match="finish: request a is waiting"):
        queues.finish(first, REASON, lingers=True)
    queues.hold(first)
    digest_of_none = RequestQueues().digest
    queues.finish(first, REASON, lingers=True)
    assert (queues.state_of(first), queues.find("a"), queues.digest) == (
        ENDED,
        None,
        digest_of_none,
    )
    assert (list(queues.lingering), list(queues.holders()), queues.num_holders) == (
        [first],
        [first],
        1,
    )
    # Its id is free, also for one that comes to the same end.
    queues.arrive(second)
    queues.hold(second)
    queues.finish(second, REASON, lingers=True)
    queues.let_go(first)
    assert (list(queues.holders()), queues.num_holders) == ([second], 1)
    with pytest.raises(AssertionError, match="request a does not linger"):
        queues.let_go(first)
    queues.let_go(second)
    assert queues.num_holders == 0


TRANSITIONS: Final = ("arrive", "admit", "cut", "join", "hold", "retract", "finish", "abort")


def allowed_end(act: str, state: RequestState, partial: str | None, rid: str) -> Any:
    """State of a request after the transition `act` from `state`; None: `act` is not allowed.

    Args:
        partial: The request whose prompt is computed in parts.
    """
    is_partial = partial == rid
    match act, state:
        case "admit", _ if is_partial or state is WAITING:
            return COMPUTING
        case "cut", _ if is_partial or (state is WAITING and partial is None):
            return COMPUTING
        case "join", _ if (state is COMPUTING and not is_partial) or state is HELD:
            return DECODING
        case "hold", _ if state is WAITING or (state is COMPUTING and not is_partial):
            return HELD
        case "retract", _ if is_partial or state in (DECODING, HELD):
            return WAITING
        case "finish", _ if state is not ENDED:
            return ENDED
        case "abort", _ if state is not ENDED:
            return state
    return None


@settings(max_examples=150, deadline=None)
@example([("arrive", "a"), ("admit", "a"), ("hold", "a"), ("join", "a")])
@example([("arrive", "a"), ("cut", "a"), ("hold", "a")])
@given(st.lists(st.tuples(st.sampled_from(TRANSITIONS), st.sampled_from("abc")), max_size=30))
def test_any_transitions_leave_each_request_in_the_state_of_a_simple_model(
    steps: list[tuple[str, str]],
) -> None:
    queues = RequestQueues()
    model: dict[str, RequestState] = {}
    latest = {rid: make_req(rid) for rid in "abc"}
    partial: str | None = None
    aborted: set[str] = set()
    for act, rid in steps:
        state = model.get(rid, ENDED)
        if act == "arrive":
            # An id may come again after its end, with a new request.
            latest[rid] = make_req(rid) if state is ENDED else latest[rid]
            end = WAITING if state is ENDED else None
        else:
            end = allowed_end(act, state, partial, rid)
        arguments = (latest[rid], REASON) if act in ("finish", "abort") else (latest[rid],)
        if end is None:
            with pytest.raises(AssertionError):
                getattr(queues, act)(*arguments)
        else:
            getattr(queues, act)(*arguments)
            model[rid] = end
            if act == "cut":
                partial = rid
            elif rid == partial and act != "abort":
                partial = None
            aborted = (aborted | {rid}) if act == "abort" else aborted
            aborted = (aborted - {rid}) if act == "finish" else aborted
        assert_is(queues, latest, model, partial, aborted)


def assert_is(
    queues: RequestQueues,
    latest: dict[str, Req],
    model: dict[str, RequestState],
    partial: str | None,
    aborted: set[str],
) -> None:
    """The queues are where `model` says that each request is."""
    for rid, req in latest.items():
        assert queues.state_of(req) is model.get(rid, ENDED)
    for state, members in (
        (WAITING, queues.waiting),
        (COMPUTING, queues.computing),
        (DECODING, queues.decoding),
        (HELD, queues.held),
    ):
        assert {req.rid for req in members} == {rid for rid in model if model[rid] is state}
    holders = {rid for rid in model if model[rid] in (COMPUTING, DECODING, HELD)}
    assert {req.rid for req in queues.holders()} == holders
    assert queues.num_holders == len(holders) == len(list(queues.holders()))
    assert {req.rid for req in queues.alive} == {rid for rid in model if model[rid] is not ENDED}
    assert {req.rid for req in queues.aborted} == aborted
    assert (None if queues.partial is None else queues.partial.rid) == partial


def test_slots_of_a_held_request_have_an_owner(model: Path) -> None:
    """A decode engine reserves them before anything has been scheduled."""
    rig = SchedulerRig(model, page_size=4, max_requests=2)
    state = rig.scheduler.state
    req = make_req("held")
    state.queues.arrive(req)
    slots = state.pools.allocator.alloc(4)
    assert slots is not None
    state.pools.req_to_token_pool.alloc([req.slots])
    state.pools.req_to_token_pool.write((req.slots.row, slice(0, 2)), slots[:2])
    req.slots.last_node = rig.tree.match_prefix(MatchPrefixParams(req.match_key())).last_device_node
    rig.tree.inc_lock_ref(req.slots.last_node)
    req.progress.kv_committed_len = 2
    with pytest.raises(AssertionError):
        rig.check()  # Slots that are neither free nor a holder's are lost.
    state.queues.hold(req)
    rig.check()
    assert state.queues.num_holders == 1
    assert rig.scheduler.poll_timeout_ms() == 1, "an engine that holds slots is not idle"
    rig.step(rig.request("a", prompt(1, 5)), rig.request("b", prompt(2, 5)))
    assert len(state.queues.waiting) == 1, "it has one of the two rows"
    rig.run(AbortReq(rid="held"))


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
