"""DP groups in the server process: which of them gets a request, and joined answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from sglang.srt.managers.tokenizer.dp_groups import DPGroups, joined, sums_of
from sglang.srt.managers.tokenizer.generate_request import (
    EngineUnavailable,
    GenerateRequest,
    InvalidRequest,
    expand_samples,
)
from sglang.srt.managers.tokenizer.request_limits import RequestLimits, check_request
from sglang.srt.managers.tokenizer.server_channel import ControlClient
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.messages.io_struct import ControlReq, ControlReqOutput, FlushCacheReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


def enter(groups: DPGroups, tokens: int = 10, **fields: Any) -> int:
    """The group of one request, which stays."""
    (place,) = groups.enter([GenerateRequest(**fields)], [token_array([1] * tokens)])
    return place.dp_rank


def test_round_robin_takes_turns_but_where_a_client_names_a_group() -> None:
    groups = DPGroups(3, "round_robin")
    assert [enter(groups) for _ in range(4)] == [0, 1, 2, 0]
    assert enter(groups, dp_rank=2) == 2
    assert enter(groups) == 1, "a named group takes no turn"


@pytest.mark.parametrize(
    ("method", "found"),
    [
        ("total_requests", [0, 1, 1, 0, 1]),
        ("total_tokens", [0, 1, 1, 1, 1]),
        ("auto", [0, 1] + [1] * 3),
    ],
)
def test_the_least_loaded_group_is_chosen(method: str, found: list[int]) -> None:
    groups = DPGroups(2, method)
    long = groups.enter([GenerateRequest()], [token_array([1] * 100)])
    assert [long[0].dp_rank, *(enter(groups) for _ in range(4))] == (
        [0, 1, 0, 1, 0] if method == "total_requests" else found
    )
    groups.leave(long)
    assert enter(groups) == 0, "the load of a request ends with it"


def test_loads_end_at_nothing_and_texts_count_by_their_length() -> None:
    groups = DPGroups(2, "total_tokens")
    bodies = [
        groups.enter([GenerateRequest(text="a" * 4000)], [None]),
        groups.enter([GenerateRequest(dp_rank=1)] * 3, [token_array([1] * 5)] * 3),
    ]
    assert [[place.tokens for place in body] for body in bodies] == [[1000], [5, 5, 5]]
    for body in bodies:
        groups.leave(body)
    assert [(load.requests, load.tokens) for load in groups._loads] == [(0, 0)] * 2


def test_samples_are_where_their_prompt_is_computed() -> None:
    groups = DPGroups(4, "round_robin")
    params = SamplingParams(n=3)
    prompts = [GenerateRequest(rid=rid, text="a", sampling_params=params) for rid in "ab"]
    samples = expand_samples(prompts)
    places = groups.enter(samples, [None] * 6)
    assert [place.dp_rank for place in places] == [0, 0, 0, 1, 1, 1]


def test_a_session_comes_back_to_its_group_while_that_has_its_share_of_the_load() -> None:
    groups = DPGroups(4)
    names = [f"session {number}" for number in range(400)]
    own = {}
    for name in names:
        places = groups.enter([GenerateRequest(session_id=name)], [token_array([1])])
        own[name] = places[0].dp_rank
        groups.leave(places)
    assert all(60 < count < 140 for count in Counter(own.values()).values()), "spread evenly"
    first = own[names[0]]
    stay = [enter(groups, session_id=names[0]) for _ in range(40)]
    assert stay[0] == first
    counts = Counter(stay)
    assert max(counts.values()) <= 13, "at most 1.25 times the mean"
    assert counts[first] == 13
    assert enter(DPGroups(4, "round_robin"), session_id=names[0]) == 0, "auto alone knows sessions"


def test_a_server_of_one_group_counts_nothing() -> None:
    groups = DPGroups()
    places = groups.enter([GenerateRequest(session_id="s")] * 3, [None] * 3)
    assert {place.dp_rank for place in places} == {0}
    groups.leave(places[:1])
    assert groups._loads[0].requests == 0


@pytest.mark.parametrize(
    ("size", "dp_rank", "words"),
    [
        (1, 1, "^routed_dp_rank=1 must be 0, the only group"),
        (2, 2, "^routed_dp_rank=2 must be from 0 to 1"),
        (4, -1, "^routed_dp_rank=-1 must be from 0 to 3"),
        (2, 10**300 // 7, r"^routed_dp_rank=1428571\d{25} must be from 0 to 1"),
    ],
)
def test_a_group_that_is_not_there_is_refused(size: int, dp_rank: int, words: str) -> None:
    limits = RequestLimits(
        vocab_size=9, context_len=9, max_input_len=8, max_queued_requests=9, num_dp_groups=size
    )
    check_request(GenerateRequest(text="a", dp_rank=size - 1), limits)
    with pytest.raises(InvalidRequest, match=words) as caught:
        check_request(GenerateRequest(text="a", dp_rank=dp_rank), limits)
    assert caught.value.field == "routed_dp_rank"


def answer(success: bool, message: str = "", **data: Any) -> ControlReqOutput:
    return ControlReqOutput(req_id="r", success=success, message=message, data=data)


def test_an_answer_of_all_groups_is_a_success_if_all_are() -> None:
    one = answer(True, "done", a=1)
    assert joined([one]) is one
    both = joined([one, answer(True, "done", a=2)])
    assert both.success and both.message == "done"
    assert both.data == {"a": 1, "dp_groups": [{"a": 1}, {"a": 2}]}
    half = joined([one, answer(False, "busy: running 1")])
    assert not half.success
    assert half.message == "dp_rank 1: busy: running 1; the other groups have done it"
    none = joined([answer(False, "x"), answer(False, "y")])
    assert none.message == "dp_rank 0: x; dp_rank 1: y"


def test_sums_are_over_all_groups() -> None:
    states: list[dict[str, Any]] = [
        {"num_running_reqs": 1, "used_tokens": 5},
        {"num_running_reqs": 2, "other": "x"},
    ]
    sums = sums_of(states)
    assert (sums["num_running_reqs"], sums["used_tokens"], sums["num_waiting_reqs"]) == (3, 5, 0)


def test_every_group_is_asked_and_the_silent_one_is_named() -> None:
    async def run() -> None:
        sent: list[tuple[int, str]] = []
        silent: set[int] = set()

        def send(message: object, dp_rank: int) -> None:
            assert isinstance(message, ControlReq)
            sent.append((dp_rank, message.req_id))
            if dp_rank not in silent:
                client.deliver(
                    ControlReqOutput(req_id=message.req_id, success=True, data={"dp_rank": dp_rank})
                )

        client = ControlClient(send, 3)
        each = await client.ask_each(FlushCacheReqInput())
        assert [one.data["dp_rank"] for one in each] == [0, 1, 2]
        assert [dp_rank for dp_rank, _ in sent] == [0, 1, 2]
        assert len({req_id for _, req_id in sent}) == 3
        assert (await client.ask_one(FlushCacheReqInput(), 2)).data == {"dp_rank": 2}
        silent.add(1)
        with pytest.raises(EngineUnavailable, match="scheduler of dp_rank 1 did not answer Flush"):
            await client.ask(FlushCacheReqInput(), 0.05)
        assert not client._waiting

    asyncio.run(run())
