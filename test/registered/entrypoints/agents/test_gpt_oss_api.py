"""gpt-oss's messages in chat, responses and messages, with the real `openai` client; the echo says
what the last message says, with the special tokens of the family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import httpx
import openai
import pytest

from rigs.harmony_text import (
    ECHO,
    MARKS,
    NEXT,
    TEMPLATE,
    call,
    final,
    gpt_oss,
    harmony_engine,
    preamble,
    thought,
)
from rigs.servers import fake_engine
from rigs.servers.fake_engine import FrontServer, front_server, write_template
from sglang.srt.constrained.constraint import Reasoning
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-b-test-cpu")

PARAMETERS: Final = {"type": "object", "properties": {"x": {"type": "integer"}}}
FUNCTION: Final = {"name": "f", "parameters": PARAMETERS}
CHAT_TOOL: Final[Any] = {"type": "function", "function": FUNCTION}
TOOL: Final[Any] = {"type": "function", **FUNCTION}
STREAMS: Final = pytest.mark.parametrize("stream", [False, True])
ANSWER: Final = thought("two é") + NEXT + final("four")
CALLING: Final = (
    thought("hm") + NEXT + preamble("Wait.") + NEXT + thought("so") + NEXT + call("f", {"x": 7})
)


@pytest.fixture(autouse=True, scope="module")
def enough_context() -> Iterator[None]:
    with mock.patch.object(fake_engine, "CONTEXT_LEN", 400):
        yield


def serving(folder: Path, text: str = ECHO, **settings: Any) -> Any:
    settings = settings or {"tool_call_parser": "gpt-oss", "reasoning_parser": "gpt-oss"}
    template = write_template(folder, text)
    return front_server(make_engine=harmony_engine, chat_template=template, **settings)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontServer]:
    with serving(tmp_path_factory.mktemp("echo")) as running:
        yield running


def client_of(server: FrontServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)


def chat(server: FrontServer, text: str, *, stream: bool = False, **fields: Any) -> dict[str, Any]:
    """The message, with the reason of its end; of a stream the sum of its deltas."""
    with client_of(server) as client:
        reply: Any = client.chat.completions.create(
            model="echo",
            messages=[{"role": "user", "content": text}],
            stream=stream,
            **{"max_tokens": 190, **fields},
        )
        chunks = [*reply] if stream else [reply]
    made: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for chunk in chunks:
        [choice] = chunk.choices
        part = choice.delta if stream else choice.message
        made["content"] += part.content or ""
        made["reasoning"] += getattr(part, "reasoning_content", None) or ""
        for one in part.tool_calls or []:
            if one.function.name is not None:
                made["calls"].append((one.function.name, ""))
            name, arguments = made["calls"].pop()
            made["calls"].append((name, arguments + one.function.arguments))
        made["end"] = choice.finish_reason
    return made


def told(content: str, reasoning: str = "", calls: Any = (), end: str = "stop") -> dict[str, Any]:
    return {"content": content, "reasoning": reasoning, "calls": [*calls], "end": end}


@STREAMS
@pytest.mark.parametrize("skip", [None, True, False])
def test_reasoning_and_answer(server: FrontServer, stream: bool, skip: bool | None) -> None:
    extra = {} if skip is None else {"skip_special_tokens": skip}
    got = chat(server, ANSWER, stream=stream, extra_body=extra)
    assert got == told("four", "two é")
    assert server.requests[-1].sampling_params.skip_special_tokens is False


@STREAMS
def test_a_call_whose_end_stops_the_model(server: FrontServer, stream: bool) -> None:
    got = chat(server, CALLING, stream=stream, tools=[CHAT_TOOL])
    assert got == told("Wait.", "hm\n\nso", [("f", '{"x": 7}')], "tool_calls")


@STREAMS
def test_the_end_of_a_call_that_is_shown_is_no_text(server: FrontServer, stream: bool) -> None:
    for text, calls in ((CALLING, [("f", '{"x": 7}')]), (ANSWER, [])):
        extra = {"no_stop_trim": True}
        got = chat(server, text, stream=stream, tools=[CHAT_TOOL], extra_body=extra)
        assert got["calls"] == calls
        assert not any(mark in got["content"] + got["reasoning"] for mark in MARKS)


@STREAMS
@pytest.mark.parametrize("parallel", [True, False])
def test_several_calls(server: FrontServer, stream: bool, parallel: bool) -> None:
    text = call("f", {"x": 1}, "<|end|>") + NEXT + call("f", {"x": 2})
    got = chat(server, text, stream=stream, tools=[CHAT_TOOL], parallel_tool_calls=parallel)
    calls = [("f", '{"x": 1}'), ("f", '{"x": 2}')]
    assert got == told("", "", calls if parallel else calls[:1], "tool_calls")


@STREAMS
def test_calls_of_other_tools_are_text_without_marks(server: FrontServer, stream: bool) -> None:
    text = thought("hm") + NEXT + call("rm", {"x": 1})
    expected = told('commentary to=functions.rm json\n{"x": 1}', "hm")
    assert chat(server, text, stream=stream, tools=[CHAT_TOOL]) == expected
    assert chat(server, text, stream=stream) == expected
    assert chat(server, text, stream=stream, tools=[CHAT_TOOL], tool_choice="none") == expected


@STREAMS
def test_an_output_that_the_length_cuts(server: FrontServer, stream: bool) -> None:
    limit = len("..analysis.tw")
    got = chat(server, ANSWER, stream=stream, max_tokens=limit)
    assert got == told("", "two", end="length")
    got = chat(server, CALLING, stream=stream, max_tokens=3)
    assert got == told("", end="length")
    begun = final("a <|mess", "")
    limit = len(".final.a <|mess")
    assert chat(server, begun + "y", stream=stream, max_tokens=limit) == told("a ", end="length")
    assert chat(server, begun, stream=stream) == told("a <|mess")
    with client_of(server) as client:
        reply: Any = client.responses.create(
            model="echo", input=begun + "y", stream=stream, max_output_tokens=limit
        )
        reply = [*reply][-1].response if stream else reply
        assert reply.output_text == "a "


@STREAMS
def test_reasoning_may_stay_in_the_content(server: FrontServer, stream: bool) -> None:
    extra = {"separate_reasoning": False}
    assert chat(server, ANSWER, stream=stream, extra_body=extra) == told("two é\n\nfour")


def test_reasoning_may_come_in_one_piece(server: FrontServer) -> None:
    with client_of(server) as client:
        stream = client.chat.completions.create(
            model="echo",
            messages=[{"role": "user", "content": ANSWER}],
            stream=True,
            max_tokens=190,
            extra_body={"stream_reasoning": False},
        )
        pieces = [getattr(one.choices[0].delta, "reasoning_content", None) for one in stream]
    assert [piece for piece in pieces if piece] == ["two é"]


@STREAMS
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"reasoning_parser": "gpt-oss"}, told("four", "two é")),
        ({"tool_call_parser": "gpt-oss"}, told("two é\n\nfour")),
        ({"tool_call_parser": "qwen25"}, told("analysistwo éassistantfinalfour")),
    ],
)
def test_one_parser_or_none(
    tmp_path: Path, settings: dict[str, str], expected: dict[str, Any], stream: bool
) -> None:
    with serving(tmp_path, **settings) as running:
        assert chat(running, ANSWER, stream=stream) == expected


@STREAMS
def test_a_constraint_holds_in_the_answer(server: FrontServer, stream: bool) -> None:
    text = thought("hm") + NEXT + final('{"x": 1}')
    wanted: Any = {"type": "json_object"}
    assert chat(server, text, stream=stream, response_format=wanted) == told('{"x": 1}', "hm")
    params = server.requests[-1].sampling_params
    assert (params.reasoning, params.json_schema) == (Reasoning.MESSAGES, '{"type":"object"}')
    assert prompt_of(server).endswith("<|return|><eos>")


@pytest.mark.parametrize(
    ("fields", "separates"),
    [
        ({"response_format": {"type": "json_object"}}, False),
        ({"extra_body": {"regex": "a"}}, False),
        ({"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}}, True),
    ],
)
def test_where_reasoning_has_no_place_the_prompt_begins_the_answer(
    server: FrontServer, fields: dict[str, Any], separates: bool
) -> None:
    extra = {**fields.get("extra_body", {}), "separate_reasoning": separates}
    got = chat(server, "yes", max_tokens=3, **{**fields, "extra_body": extra})
    assert got["content"] == "yes"
    assert server.requests[-1].sampling_params.reasoning is Reasoning.NONE
    assert prompt_of(server) == "yes<eos><|channel|>final<|message|>"


def prompt_of(server: FrontServer) -> str:
    ids = server.requests[-1].input_ids.tolist()
    return str(server.engine.tokenizer.decode(ids, skip_special_tokens=False))


@STREAMS
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_call_that_must_be_made_is_the_answer(
    server: FrontServer, choice: Any, stream: bool
) -> None:
    text = thought("hm") + NEXT + final('{"name": "f", "parameters": {"x": 3}}')
    got = chat(server, text, stream=stream, tools=[CHAT_TOOL], tool_choice=choice)
    assert got == told("", "hm", [("f", '{"x": 3}')], "tool_calls")
    assert server.requests[-1].sampling_params.reasoning is Reasoning.MESSAGES


def test_strict_tools_are_not_refused(server: FrontServer) -> None:
    strict: Any = {"type": "function", "function": {**FUNCTION, "strict": True}}
    assert chat(server, CALLING, tools=[strict])["calls"] == [("f", '{"x": 7}')]
    assert not server.requests[-1].sampling_params.has_constraint


def test_several_constraints_are_refused(server: FrontServer) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "regex": "a", "ebnf": 'root ::= "a"'}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert "regex and ebnf are given together" in reply.json()["error"]["message"]


def test_an_answer_that_the_client_began_is_continued(tmp_path: Path) -> None:
    with serving(tmp_path, TEMPLATE, reasoning_parser="gpt-oss") as running:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so"}]
        body = {"messages": turns, "continue_final_message": True, "max_tokens": 14}
        url = f"{running.url}/v1/chat/completions"
        message = httpx.post(url, json=body).json()["choices"][0]["message"]
        assert prompt_of(running).endswith("<|start|>assistant<|channel|>final<|message|>so")
        # The echo says the begin of its prompt, in the message that the prompt has begun.
        assert (message["content"], message["reasoning_content"]) == ("Reason", None)
        constrained = {**body, "response_format": {"type": "json_object"}}
        assert httpx.post(url, json=constrained).status_code == 200
        assert prompt_of(running).endswith("<|message|>so")


@STREAMS
def test_blocks_of_responses_keep_the_order(server: FrontServer, stream: bool) -> None:
    with client_of(server) as client:
        reply: Any = client.responses.create(
            model="echo", input=CALLING, tools=[TOOL], stream=stream, max_output_tokens=190
        )
        if stream:
            events = [*reply]
            reply = events[-1].response
            done = [one.item for one in events if one.type == "response.output_item.done"]
            assert done == reply.output
    kinds = ["reasoning", "message", "reasoning", "function_call"]
    assert [one.type for one in reply.output] == kinds
    first, text, second, made = reply.output
    assert [one.content[0].text for one in (first, text, second)] == ["hm", "Wait.", "so"]
    assert (made.name, made.arguments, reply.status) == ("f", '{"x": 7}', "completed")
    thoughts = CALLING[: CALLING.index("<|end|>" + NEXT + "<|channel|>commentary to")] + "<|end|>"
    ids = server.engine.tokenizer.encode(thoughts, add_special_tokens=False)
    assert reply.usage.output_tokens_details.reasoning_tokens == len(ids)


def test_reasoning_that_the_length_cuts_is_counted(server: FrontServer) -> None:
    with client_of(server) as client:
        reply = client.responses.create(model="echo", input=ANSWER, max_output_tokens=12)
    assert (reply.status, reply.output[0].type) == ("incomplete", "reasoning")
    assert reply.usage is not None
    assert reply.usage.output_tokens_details.reasoning_tokens == 12


def test_items_of_responses_go_round(server: FrontServer, tmp_path: Path) -> None:
    with client_of(server) as client:
        reply = client.responses.create(
            model="echo", input=CALLING, tools=[TOOL], max_output_tokens=190
        )
    items: list[Any] = [{"role": "user", "content": "hi"}]
    items += [item.model_dump(mode="json", exclude_none=True) for item in reply.output]
    items += [{"type": "function_call_output", "call_id": reply.output[-1].call_id, "output": "8"}]
    with serving(tmp_path, TEMPLATE) as running, client_of(running) as client:
        client.responses.create(
            model="echo", input=items, reasoning={"effort": "low"}, max_output_tokens=1
        )
        assert prompt_of(running) == (
            "<|start|>system<|message|>Reasoning: low<|end|><|start|>user<|message|>hi<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>hm\n\nWait.\n\nso<|end|>"
            '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": 7}'
            "<|call|><|start|>functions to=assistant<|channel|>commentary<|message|>8<|end|>"
            "<|start|>assistant"
        )


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "none"}, "reasoning_effort"),
        ("/v1/responses", {"reasoning": {"effort": "xhigh"}}, "reasoning.effort"),
        ("/v1/messages", {"output_config": {"effort": "max"}}, "output_config.effort"),
    ],
)
def test_other_efforts_are_refused_by_name(
    server: FrontServer, path: str, body: dict[str, Any], field: str
) -> None:
    turns = [{"role": "user", "content": "hi"}]
    asked = {"input" if path == "/v1/responses" else "messages": turns, **body}
    if path == "/v1/messages":
        asked |= {"max_tokens": 5, "model": "echo"}
    reply = httpx.post(server.url + path, json=asked)
    assert reply.status_code == 400, reply.text
    message = reply.json()["error"]["message"]
    assert message.startswith(f"{field}=") and "low, medium, high" in message


@STREAMS
def test_blocks_of_messages(server: FrontServer, stream: bool) -> None:
    tool = {"name": "f", "input_schema": PARAMETERS}
    body = {
        "model": "echo",
        "max_tokens": 190,
        "messages": [{"role": "user", "content": CALLING}],
        "tools": [tool],
        "stream": stream,
    }
    reply = httpx.post(f"{server.url}/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    if not stream:
        answer = reply.json()
        assert answer["stop_reason"] == "tool_use"
        assert [one["type"] for one in answer["content"]] == [
            "thinking", "text", "thinking", "tool_use",
        ]  # fmt: skip
        assert answer["content"][-1]["input"] == {"x": 7}
        return
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    begun = [one["content_block"]["type"] for one in events if "content_block" in one]
    assert begun == ["thinking", "text", "thinking", "tool_use"]
    texts = ["", "", "", ""]
    for event in events:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            [text] = [delta[name] for name in ("thinking", "text", "partial_json") if name in delta]
            texts[event["index"]] += text
    assert texts == ["hm", "Wait.", "so", '{"x": 7}']


def test_calls_one_after_the_other_without_an_end(server: FrontServer) -> None:
    text = gpt_oss(("f", {"x": 1}), ("f", {"x": 2}))
    # The first end of a call stops the model.
    assert chat(server, text, tools=[CHAT_TOOL])["calls"] == [("f", '{"x": 1}')]
