"""DP groups in the server process: which of them gets a request, and joined answers."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import pytest

from sglang.srt.managers.tokenizer import group_prefixes
from sglang.srt.managers.tokenizer.dp_groups import DPGroups, Place, joined, sums_of
from sglang.srt.managers.tokenizer.generate_request import (
    EngineUnavailable,
    GenerateRequest,
    InvalidRequest,
    expand_samples,
)
from sglang.srt.managers.tokenizer.group_prefixes import GroupPrefixes
from sglang.srt.managers.tokenizer.request_limits import RequestLimits, check_request
from sglang.srt.managers.tokenizer.server_channel import ControlClient
from sglang.srt.mem_cache.tree.radix_key import RadixKey, hash_str_to_int64, token_array
from sglang.srt.messages.cache_key import combine_extra_key
from sglang.srt.messages.io_struct import (
    Bootstrap,
    ControlReq,
    ControlReqOutput,
    FlushCacheReqInput,
    HeldPagesReport,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


PAGE: Final = 4


def place(groups: DPGroups, tokens: int | Sequence[int] = 10, **fields: Any) -> Place:
    """Where a request is, which stays; `tokens` are a prompt or its length."""
    ids = [1] * tokens if isinstance(tokens, int) else tokens
    return groups.enter(GenerateRequest(**fields), token_array(ids), {})


def enter(groups: DPGroups, tokens: int | Sequence[int] = 10, **fields: Any) -> int:
    return place(groups, tokens, **fields).dp_rank


def by_prefix(size: int, **more: Any) -> DPGroups:
    return DPGroups(size, "auto", GroupPrefixes(size, PAGE, **more))


def hold(groups: DPGroups, dp_rank: int, prompt: Sequence[int], key: str | None = None) -> None:
    """A group has the whole pages of `prompt`."""
    groups.note_pages(HeldPagesReport(dp_rank=dp_rank, stored=pages_of(prompt, key)))


def pages_of(prompt: Sequence[int], key: str | None = None) -> bytes:
    hashes = RadixKey(prompt, key).page_hashes(PAGE)
    return array("q", map(hash_str_to_int64, hashes)).tobytes()


def test_round_robin_takes_turns_but_where_a_client_names_a_group() -> None:
    groups = DPGroups(3, "round_robin")
    assert [enter(groups) for _ in range(4)] == [0, 1, 2, 0]
    assert enter(groups, dp_rank=2) == 2
    assert enter(groups) == 1, "a named group takes no turn"


@pytest.mark.parametrize(
    ("method", "found"),
    [("total_requests", [0, 1, 0, 1]), ("total_tokens", [1, 1, 1, 1]), ("auto", [1, 1, 1, 1])],
)
def test_the_least_loaded_group_is_chosen(method: str, found: list[int]) -> None:
    groups = DPGroups(2, method)
    long = place(groups, 100)
    other = enter(groups)
    assert (long.dp_rank, other) == (0, 1)
    assert [enter(groups) for _ in found] == found
    groups.leave(long)
    assert enter(groups) == 0, "the load of a request ends with it"


def test_total_tokens_counts_prompts_and_auto_what_is_to_be_computed() -> None:
    prompt = [*range(40)]
    for groups, found in ((DPGroups(2, "total_tokens"), 1), (by_prefix(2), 0)):
        hold(groups, 0, prompt)
        assert enter(groups, prompt) == 0
        assert enter(groups, [7] * 30) == 1
        assert enter(groups, [8] * 20) == found


def test_loads_end_at_nothing() -> None:
    groups = by_prefix(2)
    hold(groups, 1, [1] * 8)
    places = [place(groups, 20, dp_rank=1), place(groups, 5, dp_rank=1), place(groups, [9] * 5)]
    assert [one.uncomputed for one in places] == [12, 1, 5]
    groups.computed(places[0])
    assert [load.uncomputed for load in groups._loads] == [5, 1]
    groups.computed(places[0])
    for one in places:
        groups.leave(one)
    assert [(one.requests, one.tokens, one.uncomputed) for one in groups._loads] == [(0, 0, 0)] * 2


def test_samples_are_where_their_prompt_is_computed_and_compute_nothing() -> None:
    groups = DPGroups(4, "round_robin")
    params = SamplingParams(n=3)
    prompts = [GenerateRequest(rid=rid, text="a", sampling_params=params) for rid in "ab"]
    of_body: dict[str, int] = {}
    tokens = token_array([1] * 5)
    places = [groups.enter(one, tokens, of_body) for one in expand_samples(prompts)]
    assert [one.dp_rank for one in places] == [0, 0, 0, 1, 1, 1]
    assert [one.uncomputed for one in places] == [5, 0, 0] * 2


@pytest.mark.parametrize("method", ["follow_bootstrap_room", "round_robin"])
def test_requests_of_a_room_are_in_one_group(method: str) -> None:
    """It refuses all but the first; another group would not know that they are further ones."""
    groups = DPGroups(4, method)
    rooms = [Bootstrap("a", 1, number) for number in (6, 9)]
    first, other = (place(groups, bootstrap=room) for room in rooms)
    follows = method == "follow_bootstrap_room"
    assert [first.dp_rank, other.dp_rank] == ([2, 1] if follows else [0, 1])
    again = place(groups, bootstrap=rooms[0], dp_rank=3)
    assert again.dp_rank == first.dp_rank
    groups.leave(again)
    assert groups.of_room(6) == first.dp_rank, "its first request is still open"
    groups.leave(first)
    assert groups.of_room(6) == 0
    assert place(groups, bootstrap=rooms[0], dp_rank=3).dp_rank == 3, "the client names it"
    assert groups.of_room(6) == 3


def test_samples_follow_the_room_of_their_prompt() -> None:
    groups = DPGroups(4, "follow_bootstrap_room")
    one = GenerateRequest(
        text="a", sampling_params=SamplingParams(n=3), bootstrap=Bootstrap("a", 1, 7)
    )
    of_body: dict[str, int] = {}
    samples = expand_samples([one])
    places = [groups.enter(sample, token_array([1]), of_body) for sample in samples]
    assert [one.dp_rank for one in places] == [3] * 3
    assert len({one.room for one in places}) == 3


def test_a_request_goes_to_the_longest_prefix() -> None:
    groups = by_prefix(3)
    prompt = [*range(20)]
    hold(groups, 1, prompt[:8])
    hold(groups, 2, prompt[:17])
    for prefix, found in ((prompt, 2), (prompt[:6], 1), ([9] * 20, 0)):
        one = place(groups, prefix)
        assert one.dp_rank == found
        groups.leave(one)
    one = place(groups, prompt)
    assert one.uncomputed == 4, "16 tokens are in whole pages"
    groups.leave(one)
    assert enter(groups, prompt, dp_rank=0) == 0, "a client's choice comes first"


def test_a_session_changes_nothing_for_its_prefix_tells_more() -> None:
    groups = by_prefix(2)
    prompt = [*range(20)]
    hold(groups, 1, prompt)
    for session_id in ("s", "t", "u", "v"):
        one = place(groups, prompt, session_id=session_id)
        assert one.dp_rank == 1
        groups.leave(one)
    assert [enter(groups, session_id="s") for _ in range(4)] == [0, 1, 0, 1]


def test_a_group_that_is_overloaded_loses_the_request_to_the_next() -> None:
    groups = by_prefix(2)
    prompt = [*range(16)]
    hold(groups, 1, prompt)
    # A repeated prompt computes nothing: the number of requests alone limits the group.
    found = [enter(groups, prompt) for _ in range(40)]
    assert found[:8] == [1] * 8
    assert 0 in found
    counts = Counter(found)
    assert counts[1] < 1.25 * 41 / 2 + 4 + 1


def test_a_group_with_much_to_compute_loses_the_request_to_the_next() -> None:
    groups = by_prefix(2)
    prompt = [*range(16)]
    hold(groups, 1, prompt)
    busy = place(groups, [9] * 40, dp_rank=1)
    assert enter(groups, prompt) == 1, "40 tokens wait, of 3 x 16 that another would compute"
    waits = place(groups, [8] * 20, dp_rank=1)
    assert enter(groups, prompt) == 0
    groups.computed(waits)
    groups.computed(busy)
    assert enter(groups, prompt) == 1, "they are computed"


def test_equal_prompts_with_other_keys_are_other_prefixes() -> None:
    groups = by_prefix(2)
    prompt = [*range(16)]
    hold(groups, 1, prompt, combine_extra_key("a", "b"))
    for fields, found in (
        ({"extra_key": "a", "cache_salt": "b"}, 1),
        ({"extra_key": "a"}, 0),
        ({}, 0),
    ):
        one = place(groups, prompt, **fields)
        assert one.dp_rank == found
        groups.leave(one)


def test_evicted_prefixes_are_forgotten() -> None:
    groups = by_prefix(2)
    prompt = [*range(16)]
    hold(groups, 1, prompt)
    groups.note_pages(HeldPagesReport(dp_rank=1, removed=pages_of(prompt)[8:]))
    one = place(groups, prompt)
    assert (one.dp_rank, one.uncomputed) == (1, 12)
    groups.leave(one)
    report = HeldPagesReport(dp_rank=1, is_cleared=True, stored=pages_of([5] * 8))
    groups.note_pages(report)
    assert enter(groups, prompt) == 0, "a flush"
    assert enter(groups, [5] * 8) == 1, "what came after it"


def test_full_knowledge_keeps_beginnings_and_learns_again_when_pages_leave() -> None:
    prefixes = GroupPrefixes(2, PAGE, most_pages=6)
    first, second = [*range(8)], [*range(50, 66)]
    for prompt in (first, second):
        prefixes.apply(HeldPagesReport(dp_rank=1, stored=pages_of(prompt)))
    assert prefixes.lengths(token_array(first), None) == [0, 8]
    assert prefixes.lengths(token_array(second), None) == [0, 4], "its share is three pages"
    prefixes.apply(HeldPagesReport(dp_rank=1, removed=pages_of(first)))
    prefixes.apply(HeldPagesReport(dp_rank=1, stored=pages_of(second)[8:]))
    assert prefixes.lengths(token_array(second), None) == [0, 12]
    prefixes.apply(HeldPagesReport(dp_rank=0, stored=pages_of(second)))
    assert prefixes.lengths(token_array(second), None) == [12, 12], "each group has its share"


def test_prompts_alone_teach_nothing_and_are_hashed_no_further_than_they_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = by_prefix(8)
    prompt = [*range(400)]
    for dp_rank in range(8):
        hold(groups, dp_rank, prompt[: 4 * dp_rank])
    hashed: list[int] = []

    def counted(data: bytes = b"") -> Any:
        hashed.append(len(data))
        return real(data)

    real = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", counted)
    place(groups, prompt)
    assert len(hashed) == 8, "once for each page that any of eight groups has, and one more"
    hashed.clear()
    for seed in range(100):
        place(groups, [seed + 1000] * 400)
    assert len(hashed) == 100
    prefixes = groups._prefixes
    assert prefixes is not None
    assert sum(map(len, prefixes._held)) == sum(range(8)), "a stranger teaches nothing"


def test_a_prompt_of_many_small_pages_is_looked_up_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_prefixes, "_MOST_HASHED", 3)
    groups = by_prefix(2)
    hold(groups, 1, [1] * 40)
    one = place(groups, 40)
    assert (one.dp_rank, one.uncomputed) == (1, 28)


def test_a_server_of_one_group_counts_nothing() -> None:
    groups = DPGroups()
    one = place(groups, session_id="s")
    assert one.dp_rank == 0
    groups.leave(one)
    assert place(groups) is one
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


def test_a_question_that_cannot_leave_waits_for_no_answer() -> None:
    def send(message: object, dp_rank: int) -> None:
        raise EngineUnavailable("the engine has been shut down")

    async def run() -> None:
        client = ControlClient(send, 2)
        with pytest.raises(EngineUnavailable, match="shut down"):
            await client.ask(FlushCacheReqInput())
        assert not client._waiting

    asyncio.run(run())
