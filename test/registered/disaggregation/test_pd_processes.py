"""A prefill or a decode scheduler is killed or stopped while requests are in every state.

The other fails those that need it within the silence bound, says why, frees their pages, and serves
on: with the same server once it runs again, with another in its place.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from rigs.disaggregation.pd_pair import NEVER_ASKED
from rigs.disaggregation.pd_processes import RoleProcess
from rigs.schedulers import checkable_model
from rigs.schedulers.scheduler_rig import greedy, prompt
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.messages.io_struct import AbortReq, Bootstrap, TokenizedGenerateReqInput
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=27, suite="base-b-test-cpu")

SILENT_S = 6
"""A busy machine may pause for seconds."""
ENV = {
    "MOONCAKE_PROTOCOL": "tcp",
    "SGLANG_DISAGGREGATION_UNKNOWN_ROOM_TIMEOUT": "300",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "1",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": str(SILENT_S),
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
}
ARGS: dict[str, Any] = {
    "page_size": 4,
    "pool_tokens": 512,
    "max_requests": 16,
    "chunked_prefill_size": 16,
}
LONG, SHORT = 400, 20
"""Tokens that decode, so that a request is still there when others have failed."""
SILENT = f"has not answered for {SILENT_S} s"
UNHEARD = f"the decode server has not been heard of for {SILENT_S} s"
numbers = itertools.count(1)


def start(mode: DisaggregationMode) -> RoleProcess:
    """A decode process has slots for all that a test sends."""
    more = {"pool_tokens": 2048} if mode == DisaggregationMode.DECODE else {}
    return RoleProcess(mode, ENV, **{**ARGS, **more})


@pytest.fixture
def prefill() -> Iterator[RoleProcess]:
    with start(DisaggregationMode.PREFILL) as process:
        yield process


@pytest.fixture
def decode(prefill: RoleProcess) -> Iterator[RoleProcess]:
    with start(DisaggregationMode.DECODE) as process:
        process.set(endpoint=prefill.endpoint)
        yield process


def make(
    rid: str, length: int = 40, wanted: int = SHORT, at: RoleProcess | None = None
) -> TokenizedGenerateReqInput:
    """A request; `at`: its prefill server, in place of the decode process's own."""
    number = next(numbers)
    return TokenizedGenerateReqInput(
        rid=rid,
        input_ids=token_array(prompt(number, length, 1000)),
        sampling_params=greedy(wanted),
        seed=number,
        bootstrap=Bootstrap(LOOPBACK if at is None else at.endpoint, NEVER_ASKED, number),
    )


def assert_right(process: RoleProcess, message: TokenizedGenerateReqInput) -> None:
    ended = process.end_of(message.rid)
    wanted = message.sampling_params.max_new_tokens
    assert ended.reason.type == "length", ended
    assert ended.output_ids == checkable_model.words(
        message.input_ids.tolist(), message.seed, wanted
    )


def assert_free(process: RoleProcess) -> None:
    """Assert that it comes to rest, and that every page has one owner."""
    process.until(lambda facts: facts.is_idle and not facts.num_reads)
    process.check()


def assert_serves(prefill: RoleProcess, decode: RoleProcess) -> None:
    message = make(f"serves {next(numbers)}")
    prefill.send(message)
    decode.send(message)
    assert_right(decode, message)
    for process in (prefill, decode):
        assert_free(process)


def scatter(prefill: RoleProcess, decode: RoleProcess) -> dict[str, TokenizedGenerateReqInput]:
    """One request in each state of a room, by its name: `decoding`, `reading`, `waiting` to be
    computed once another ends, and `unknown` to prefill. Prefill makes no further step."""
    made = {
        "decoding": make("decoding", wanted=LONG),
        "reading": make("reading"),
        "waiting": make("waiting", length=ARGS["pool_tokens"] - 32),
        "unknown": make("unknown"),
    }
    both = (prefill, decode)
    for process in both:
        process.send(made["decoding"])
    prefill.until(lambda facts: "decoding" in facts.ended)
    decode.set(hold=True)
    for process in both:
        process.send(made["reading"])
    decode.until(lambda facts: facts.num_reads == 1)
    for process in both:
        process.send(made["waiting"])
    # On a machine that is busy with other things the first may have all its words already. The
    # third has slots, so that prefill has begun to count it.
    decode.until(lambda facts: facts.num_holders + ("decoding" in facts.ended) >= 3)
    prefill.until(lambda facts: facts.num_waiting == 1 and not facts.num_unasked)
    prefill.set(pause=True)
    decode.send(made["unknown"])
    decode.until(lambda facts: facts.num_waiting == 1)
    return made


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_decode_goes_on(prefill: RoleProcess, decode: RoleProcess, how: signal.Signals) -> None:
    made = scatter(prefill, decode)
    prefill.signal(how)
    for rid in ("reading", "waiting", "unknown"):
        assert SILENT in decode.end_of(rid).why
    # Prompts that nobody reads free their slots now. The prompt being read frees its slots when the
    # transport has given up.
    facts = decode.until(lambda facts: facts.num_holders <= 2)
    assert facts.num_reads == 1 and facts.num_holders >= 1
    decode.set(hold=False)
    assert_right(decode, made["decoding"])
    assert_free(decode)
    # Decode serves on: requests that it computes itself, and those of another prefill server.
    alone = make("alone")
    decode.send(without_room(alone))
    assert_right(decode, alone)
    with start(DisaggregationMode.PREFILL) as other:
        decode.set(endpoint=other.endpoint)
        assert_serves(other, decode)
    if how is signal.SIGSTOP:
        prefill.signal(signal.SIGCONT)
        prefill.set(pause=False)
        for rid in ("reading", "waiting"):
            why = prefill.end_of(rid).why
            assert UNHEARD in why or "gave it up" in why
        assert_free(prefill)
        decode.set(endpoint=prefill.endpoint)
        again = make("serves again")
        prefill.send(again)
        decode.send(again)
        assert_right(decode, again)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_prefill_goes_on(prefill: RoleProcess, decode: RoleProcess, how: signal.Signals) -> None:
    made = scatter(prefill, decode)
    decode.signal(how)
    never = make("never asked for")
    prefill.set(pause=False)
    prefill.send(never)
    for rid in ("reading", "waiting"):
        assert prefill.end_of(rid).why == UNHEARD
    facts = prefill.until(lambda facts: not facts.num_holders)
    assert facts.num_waiting == 1, "a decode server may still come for it"
    with start(DisaggregationMode.DECODE) as other:
        other.set(endpoint=prefill.endpoint)
        other.send(never)
        assert_right(other, never)
        assert_serves(prefill, other)
    if how is signal.SIGSTOP:
        # Late reads are not used, though the bytes may be there.
        decode.signal(signal.SIGCONT)
        decode.set(hold=False)
        assert_right(decode, made["decoding"])
        for rid in ("reading", "waiting"):
            assert decode.end_of(rid).reason.status_code == 503
        # Prefill may yet get this one.
        decode.send(AbortReq(rid="unknown"))
        decode.end_of("unknown")
        assert_free(decode)
        assert_serves(prefill, decode)


def test_a_stuck_prefill_server_costs_its_own_requests_alone() -> None:
    """The stuck server knows twenty requests and computes none. No server knows twenty more."""
    env = {**ENV, "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "60"}
    with (
        RoleProcess(DisaggregationMode.PREFILL, env, **ARGS) as stuck,
        RoleProcess(DisaggregationMode.PREFILL, env, **ARGS) as healthy,
        RoleProcess(DisaggregationMode.DECODE, env, **ARGS) as decode,
    ):
        late = [make(f"late {n}", at=stuck) for n in range(20)]
        stuck.send(*late)
        stuck.until(lambda facts: facts.num_unasked == 20)
        stuck.set(pause=True)
        decode.send(*late, *(make(f"nobody's {n}", at=healthy) for n in range(20)))
        held = decode.until(lambda facts: facts.num_holders >= 5).num_holders
        for number in range(10):
            message = make(f"served {number}", at=healthy)
            healthy.send(message)
            decode.send(message)
            assert_right(decode, message)
        facts = decode.facts()
        assert sorted(facts.ended) == [f"served {n}" for n in range(10)], "no other has ended"
        assert held <= facts.num_holders < ARGS["max_requests"]
        # Once it goes on, each gets its words.
        stuck.set(pause=False)
        for message in late:
            assert_right(decode, message)


def without_room(message: TokenizedGenerateReqInput) -> TokenizedGenerateReqInput:
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    return TokenizedGenerateReqInput(**{**fields, "bootstrap": None})
