"""Logprobs in answers of `/generate`: how often in a stream, and at what cost."""

from __future__ import annotations

import asyncio
from typing import Any

from sglang.srt.entrypoints.http.sse import json_bytes
from sglang.srt.entrypoints.native_routes import FREE_ENTRIES, AnswerWriter
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.managers.tokenizer.request_state import RequestState
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.messages.io_struct import (
    FinishReason,
    RequestOutput,
    TextOutput,
    TopLogprobs,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


class Tokens:
    def __init__(self) -> None:
        self.shown: list[int] = []

    def decode(self, token_ids: list[int]) -> str:
        self.shown += token_ids
        return chr(token_ids[0])


def state_with_prompt(request: GenerateRequest, num_tokens: int) -> RequestState:
    """A state whose prompt has come with its logprobs."""
    state = RequestState(request, 0.0)
    state.note_sent(token_array([65] * num_tokens), request.logprob_start_len)
    tops: TopLogprobs = [(-1.0, 65), (-2.0, 66)][: request.top_logprobs_num]
    state.input_logprobs = [-1.0] * (num_tokens - 1)
    state.input_top_logprobs = [tops] * (num_tokens - 1)
    return state


def events(request: GenerateRequest, prompt_tokens: int, output_tokens: int) -> list[Any]:
    """`meta_info` of each event of a stream that comes token by token."""

    async def run() -> list[Any]:
        state = state_with_prompt(request, prompt_tokens)
        writer = AnswerWriter(request, Tokens())
        metas = []
        for index in range(output_tokens):
            ended = index == output_tokens - 1
            output = RequestOutput(
                rid=request.rid,
                output_ids=[65],
                output_logprobs=[-1.0],
                output_top_logprobs=[[(-1.0, 65), (-2.0, 66)]]
                if request.top_logprobs_num
                else None,
                finish_reason=FinishReason(type="length", length=index) if ended else None,
            )
            state.apply(TextOutput(output=output, text="A"))
            meta = (await writer.answer(state))["meta_info"]
            metas.append({name: list(value) for name, value in meta.items() if "logprobs" in name})
        return metas

    return asyncio.run(run())


def test_a_token_that_is_shown_often_is_decoded_once() -> None:
    request = GenerateRequest(
        text="x", return_logprob=True, top_logprobs_num=2, logprob_start_len=0
    )
    tokens = Tokens()
    writer = AnswerWriter(request, tokens, text_in_logprobs=True)
    meta = asyncio.run(writer.answer(state_with_prompt(request, 1000)))["meta_info"]
    assert meta["input_token_logprobs"][:2] == [(None, 65, "A"), (-1.0, 65, "A")]
    assert meta["input_top_logprobs"][-1] == [(-1.0, 65, "A"), (-2.0, 66, "B")]
    assert sorted(tokens.shown) == [65, 66]


def test_a_stream_with_prompt_logprobs_is_as_long_as_two_answers() -> None:
    request = GenerateRequest(
        text="x", stream=True, return_logprob=True, top_logprobs_num=2, logprob_start_len=0
    )
    metas = events(request, prompt_tokens=2000, output_tokens=300)
    whole = len(json_bytes(metas[-1]))
    assert whole > 100_000
    prompt = [len(json_bytes(meta["input_token_logprobs"])) for meta in metas]
    assert [index for index, size in enumerate(prompt) if size > 2] == [0, 299]
    assert [len(meta["input_top_logprobs"]) for meta in metas] == [2000, *[0] * 298, 2000]


def test_logprobs_of_a_long_output_are_repeated_a_bounded_number_of_times() -> None:
    request = GenerateRequest(text="x", stream=True, return_logprob=True)
    for number in (FREE_ENTRIES // 2, 8 * FREE_ENTRIES):
        told = [len(meta["output_token_logprobs"]) for meta in events(request, 1, number)]
        free = told[:FREE_ENTRIES]
        assert free == [*range(1, len(free) + 1)], "cumulative as long as they are few"
        assert told[-1] == number, "and all in the last event"
        repeated = told[FREE_ENTRIES:-1]
        assert sum(repeated) <= 5 * number
        assert [count for count in repeated if count] == sorted(
            count for count in repeated if count
        )


def test_formatting_gives_the_event_loop_its_turns() -> None:
    async def run() -> int:
        request = GenerateRequest(
            text="x", return_logprob=True, top_logprobs_num=2, logprob_start_len=0
        )
        state = state_with_prompt(request, 20_000)
        work = asyncio.ensure_future(AnswerWriter(request, Tokens()).answer(state))
        turns = 0
        while not work.done():
            turns += 1
            await asyncio.sleep(0)
        assert len((await work)["meta_info"]["input_top_logprobs"]) == 20_000
        return turns

    assert asyncio.run(run()) >= 60_000 // 2048
