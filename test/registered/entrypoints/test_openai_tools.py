"""Tools and reasoning with the real `openai` client; the echo says what the last message says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from rigs.servers.fake_engine import FrontServer, byte_tokenizer, front_server
from sglang.srt.constrained.constraint import Reasoning
from sglang.srt.entrypoints.http.errors import ApiError
from sglang.srt.entrypoints.openai.chat_prompt import tool_use
from sglang.srt.entrypoints.openai.protocol import ChatBody, Tool
from sglang.srt.managers.tokenizer.chat_template import ChatTemplate
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-b-test-cpu")

END = "~"
"""Stops the echo."""
LAST_MESSAGE = "{{ messages[-1]['content'] }}{# it knows of tools #}"
BARE = "{{ messages[-1]['content'] }}"
"""The same, and the model sees no tools."""
QWEN_LIKE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}|{% endfor %}"
)


def tool(name: str, **parameters: Any) -> Any:
    schema = {"type": "object", "properties": parameters, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


F, G = tool("f"), tool("g", x={"type": "integer"})


@pytest.fixture(scope="module", name="templates")
def make_templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("templates")
    paths = {}
    for name, text in {"last": LAST_MESSAGE, "qwen": QWEN_LIKE, "bare": BARE}.items():
        path: Path = folder / f"{name}.jinja"
        path.write_text(text)
        paths[name] = str(path)
    return paths


@pytest.fixture(scope="module")
def qwen(templates: dict[str, str]) -> Iterator[FrontServer]:
    with front_server(
        chat_template=templates["last"], tool_call_parser="qwen25", reasoning_parser="qwen3"
    ) as running:
        yield running


def client_of(server: FrontServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)


def said(text: str) -> list[Any]:
    """A conversation that makes the echo say `text`."""
    return [{"role": "user", "content": text + END}]


def ask(server: FrontServer, text: str, **fields: Any) -> Any:
    """The answer, or all chunks of its stream."""
    with client_of(server) as client:
        reply = client.chat.completions.create(
            model="echo", messages=said(text), stop=END, **fields
        )
        return [*reply] if fields.get("stream") else reply


class Gathered:
    """Sum of the deltas of a stream."""

    def __init__(self, chunks: Any) -> None:
        self.content = self.reasoning = ""
        self.calls: list[list[str]] = []
        self.finish_reason: str | None = None
        self.num_chunks = 0
        ids = set()
        for chunk in chunks:
            self.num_chunks += 1
            [choice] = chunk.choices
            self.content += choice.delta.content or ""
            self.reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                if call.id is not None:
                    ids.add(call.id)
                    self.calls.append([call.function.name, ""])
                    assert call.index == len(self.calls) - 1
                self.calls[call.index][1] += call.function.arguments or ""
            self.finish_reason = choice.finish_reason or self.finish_reason
        assert len(ids) == len(self.calls)


CALL_G = '<tool_call>{"name":"g","arguments":{"x":7}}</tool_call>'


def test_a_call_is_parsed(qwen: FrontServer) -> None:
    reply = ask(qwen, "Hm. " + CALL_G, tools=[F, G])
    [choice] = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Hm."
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "g")
    assert json.loads(call.function.arguments) == {"x": 7}
    assert call.id.startswith("call_")


def test_a_call_is_streamed(qwen: FrontServer) -> None:
    got = Gathered(ask(qwen, "Hm." + CALL_G, tools=[F, G], stream=True))
    assert (got.content, got.calls) == ("Hm.", [["g", '{"x":7}']])
    assert got.finish_reason == "tool_calls"
    assert got.num_chunks >= 4, "role, content, call, end at least"


@pytest.mark.parametrize("stream", [False, True])
def test_without_tools_a_call_is_text(qwen: FrontServer, stream: bool) -> None:
    for fields in ({}, {"tools": [F, G], "tool_choice": "none"}):
        reply = ask(qwen, CALL_G, stream=stream, **fields)
        if stream:
            got = Gathered(reply)
            assert (got.content, got.calls, got.finish_reason) == (CALL_G, [], "stop")
        else:
            assert reply.choices[0].message.content == CALL_G
            assert reply.choices[0].message.tool_calls is None


def test_a_tool_round_trip(templates: dict[str, str], qwen: FrontServer) -> None:
    messages: list[Any] = said(CALL_G)
    with client_of(qwen) as client:
        first = client.chat.completions.create(model="echo", messages=messages, tools=[G], stop=END)
        [call] = first.choices[0].message.tool_calls or []
        messages.append(first.choices[0].message)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "it is 42" + END})
        second = client.chat.completions.create(
            model="echo", messages=messages, tools=[G], stop=END
        )
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == (
        "it is 42",
        "stop",
    )


def test_what_the_template_is_given(templates: dict[str, str]) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages: list[Any] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ]
    bare: Any = {"type": "function", "function": {"name": "f", "strict": False}}
    with (
        front_server(chat_template=templates["qwen"], tool_call_parser="qwen") as server,
        client_of(server) as client,
    ):
        client.chat.completions.create(model="echo", messages=messages, tools=[bare], max_tokens=1)
        [request] = server.requests
        assert server.engine.tokenizer.decode(request.input_ids) == (
            '{"type": "function", "function": {"name": "f"}}'
            'assistant:{"name": "f", "arguments": {"a": 1}}|tool:ok(c1)|'
        )


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_several_calls_are_told(templates: dict[str, str], stream: bool, parallel: bool) -> None:
    text = '{"name":"f","parameters":{}};{"name":"g","parameters":{"x":1}}'
    want = [["f", "{}"], ["g", '{"x":1}']][: 2 if parallel else 1]
    with front_server(chat_template=templates["last"], tool_call_parser="llama3") as server:
        reply = ask(server, text, tools=[F, G], stream=stream, parallel_tool_calls=parallel)
        if stream:
            got = Gathered(reply)
            assert (got.calls, got.content) == (want, "")
        else:
            message = reply.choices[0].message
            assert [[c.function.name, c.function.arguments] for c in message.tool_calls] == want
            assert message.content is None


@pytest.mark.parametrize("stream", [False, True])
def test_ids_of_kimi_and_its_special_tokens_are_kept(
    templates: dict[str, str], stream: bool
) -> None:
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>f:3<|tool_call_argument_begin|>{}"
        "<|tool_call_end|>"
    )
    with front_server(chat_template=templates["last"], tool_call_parser="kimi_k2") as server:
        reply = ask(server, text, tools=[F, G], stream=stream)
        if stream:
            [piece] = [one for chunk in reply for one in chunk.choices[0].delta.tool_calls or []]
        else:
            [piece] = reply.choices[0].message.tool_calls
        assert (piece.id, piece.function.arguments) == ("f:3", "{}")
        ask(server, text)
        ask(server, text, tools=[F, G], extra_body={"skip_special_tokens": True})
        skips = [one.sampling_params.skip_special_tokens for one in server.requests]
        # Routers add the field to every chat.
        assert skips == [False, True, False]


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", ["f", "g"]), ({"type": "function", "function": {"name": "g"}}, ["g"])],
)
def test_a_call_that_must_be_made_is_enforced(
    templates: dict[str, str], choice: Any, names: list[str]
) -> None:
    text = '{"name": "g", "parameters": {"x": 3}}'
    with front_server(chat_template=templates["last"]) as server:
        for stream in (False, True):
            reply = ask(server, text, tools=[F, G], tool_choice=choice, stream=stream)
            if stream:
                got = Gathered(reply)
                assert (got.calls, got.finish_reason) == ([["g", '{"x": 3}']], "tool_calls")
            else:
                [call] = reply.choices[0].message.tool_calls
                assert (call.function.name, call.function.arguments) == ("g", '{"x": 3}')
        request = server.requests[-1]
        schema = json.loads(request.sampling_params.json_schema or "")
        branches = schema.get("anyOf", [schema])
        assert [b["properties"]["name"]["const"] for b in branches] == names
        assert branches[-1]["properties"]["parameters"] == G["function"]["parameters"]


THOUGHT = "<think>two and two</think>four"


def test_reasoning_is_split_off(qwen: FrontServer) -> None:
    message = ask(qwen, THOUGHT).choices[0].message
    assert (message.content, message.reasoning_content) == ("four", "two and two")
    message = ask(qwen, "four").choices[0].message
    assert (message.content, message.reasoning_content) == ("four", None)
    whole = ask(qwen, THOUGHT, extra_body={"separate_reasoning": False}).choices[0].message
    assert whole.content == THOUGHT
    with_call = ask(qwen, "<think>hm</think>" + CALL_G, tools=[G]).choices[0].message
    assert (with_call.reasoning_content, with_call.content) == ("hm", None)
    assert len(with_call.tool_calls) == 1


def test_reasoning_is_streamed_or_held_until_complete(qwen: FrontServer) -> None:
    got = Gathered(ask(qwen, THOUGHT, stream=True))
    assert (got.content, got.reasoning) == ("four", "two and two")
    pieces = [
        chunk.choices[0].delta.reasoning_content
        for chunk in ask(qwen, THOUGHT, stream=True, extra_body={"stream_reasoning": False})
        if getattr(chunk.choices[0].delta, "reasoning_content", None)
    ]
    assert pieces == ["two and two"]


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"extra_body": {"regex": "a"}}]
)
def test_a_constraint_holds_after_the_reasoning(qwen: FrontServer, fields: Any) -> None:
    message = ask(qwen, THOUGHT, **fields).choices[0].message
    assert (message.content, message.reasoning_content) == ("four", "two and two")
    assert qwen.requests[-1].sampling_params.reasoning is Reasoning.POSSIBLE
    got = Gathered(ask(qwen, THOUGHT, stream=True, **fields))
    assert (got.content, got.reasoning) == ("four", "two and two")
    assert qwen.requests[-1].sampling_params.reasoning is Reasoning.POSSIBLE


def test_a_call_that_must_be_made_comes_after_the_reasoning(qwen: FrontServer) -> None:
    text = '<think>hm</think>{"name": "g", "parameters": {"x": 3}}'
    message = ask(qwen, text, tools=[G], tool_choice="required").choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", None)
    assert message.tool_calls[0].function.name == "g"
    assert qwen.requests[-1].sampling_params.reasoning is Reasoning.POSSIBLE


def test_where_reasoning_has_no_place_the_constraint_holds_from_the_first_token(
    qwen: FrontServer, templates: dict[str, str]
) -> None:
    wanted: Any = {"type": "json_object"}
    whole = ask(qwen, THOUGHT, response_format=wanted, extra_body={"separate_reasoning": False})
    assert whole.choices[0].message.content == THOUGHT
    assert qwen.requests[-1].sampling_params.reasoning is Reasoning.NONE
    with front_server(chat_template=templates["last"]) as plain:
        reply = ask(plain, THOUGHT, response_format=wanted)
        assert reply.choices[0].message.content == THOUGHT
        assert plain.requests[-1].sampling_params.reasoning is Reasoning.NONE
    body = {"text": "x", "sampling_params": {"regex": "a", "reasoning": "begun"}}
    refused = httpx.post(f"{qwen.url}/generate", json=body)
    assert refused.status_code == 400
    assert "sampling_params.reasoning is not supported" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("end", "reasoning"), [("<think>", "begun"), ("</think>", "none")])
def test_the_end_of_the_prompt_decides_whether_there_is_reasoning(
    tmp_path: Path, end: str, reasoning: str
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(LAST_MESSAGE + end)
    with front_server(chat_template=str(template), reasoning_parser="qwen3") as server:
        ask(server, "x", response_format={"type": "json_object"})
        assert server.requests[-1].sampling_params.reasoning == reasoning


def test_keywords_of_tools_that_are_not_held_are_dropped_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    date = {"type": "string", "format": "date"}
    given = tool("f", day={**date, "maxLength": 12}, **{f"p{i}": {"not": {}} for i in range(9)})
    for parameters in (given, given, tool("f", day={**date, "minLength": 2, "x": "other"})):
        body = ChatBody(
            messages=[],
            tools=[msgspec.convert(parameters, Tool)],
            tool_choice="required",
        )
        use = tool_use(body, None, ChatTemplate(byte_tokenizer()))
        assert use is not None
        held = json.loads(use.json_schema or "")["properties"]["parameters"]["properties"]
        assert not held["day"].keys() & {"minLength", "maxLength"}
        assert held["day"]["format"] == "date"
        assert held.get("p0", {}) == {}
        # The model sees the whole schema.
        assert use.shown[0]["function"]["parameters"] == parameters["function"]["parameters"]
    first, second = [record.getMessage() for record in caplog.records]
    assert "not enforced: maxLength, not: calls" in first
    assert "not enforced: minLength: calls" in second


def test_strict_tools_are_not_loosened() -> None:
    given = tool("f", day={"type": "string", "format": "date", "maxLength": 12})
    given["function"]["strict"] = True
    body = ChatBody(messages=[], tools=[msgspec.convert(given, Tool)], tool_choice="required")
    with pytest.raises(ApiError, match="parameters: #/properties/day/maxLength beside format"):
        tool_use(body, None, ChatTemplate(byte_tokenizer()))


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tools": [F, F]}, ["tools[1].function.name", "twice"]),
        ({"tools": [tool("")]}, ["tools[0].function.name", "empty"]),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, ["tools[0].type"]),
        ({"tools": [{"type": "function"}]}, ["tools[0].function", "required"]),
        ({"tools": [tool(f"t{i}") for i in range(129)]}, ["tools", "128"]),
        ({"tools": [F], "tool_choice": "any"}, ["tool_choice", "any"]),
        ({"tool_choice": "required"}, ["tool_choice", "no tools"]),
        (
            {"tools": [F], "tool_choice": {"type": "function", "function": {"name": "z"}}},
            ["tool_choice.function.name", "z"],
        ),
        ({"tools": [F], "response_format": {"type": "json_object"}}, ["response_format", "tools"]),
        ({"tools": [F], "regex": "a"}, ["regex", "tools"]),
        (
            {"tools": [F, tool("g", x={"$ref": 3})], "tool_choice": "required"},
            ["tools[1].function.parameters: #/properties/x/$ref"],
        ),
        (
            {"tools": [F, tool("g", x=[])], "tool_choice": "required"},
            ["tools[1].function.parameters: #/properties/x must be an object"],
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                    }
                ]
            },
            ["messages[0].tool_calls[0].function.arguments"],
        ),
        ({"functions": [{"name": "f"}]}, ["functions", "tools"]),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    qwen: FrontServer, fields: dict[str, Any], names: list[str]
) -> None:
    body = {"messages": said("x"), **fields}
    reply = httpx.post(f"{qwen.url}/v1/chat/completions", json=body)
    assert reply.status_code == 400, reply.text
    for name in names:
        assert name in reply.json()["error"]["message"]


def test_tools_that_the_model_may_call_need_a_parser(templates: dict[str, str]) -> None:
    with front_server(chat_template=templates["last"]) as server:
        body = {"messages": said("x"), "tools": [F]}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        assert reply.status_code == 400
        assert "--tool-call-parser auto" in reply.json()["error"]["message"]


STRICT: Any = {"type": "function", "function": {**F["function"], "strict": True}}


@pytest.mark.parametrize("stream", [False, True])
def test_optional_strict_tools_are_enforced(
    qwen: FrontServer, templates: dict[str, str], stream: bool
) -> None:
    """Clients such as the Agents SDK send `strict` by default, also where nothing enforces it."""
    strict: Any = {"type": "function", "function": {**G["function"], "strict": True}}
    reply = ask(qwen, f"so {CALL_G}", tools=[F, strict], stream=stream)
    if stream:
        got = Gathered(reply)
        assert (got.calls, got.content) == ([["g", '{"x":7}']], "so ")
    else:
        [call] = reply.choices[0].message.tool_calls
        assert call.function.name == "g"
    assert "<tool_call>" in (qwen.requests[-1].sampling_params.structural_tag or "")
    assert qwen.requests[-1].sampling_params.json_schema is None
    ask(qwen, CALL_G, tools=[F, G], stream=stream)
    assert qwen.requests[-1].sampling_params.structural_tag is None
    with front_server(chat_template=templates["last"], tool_call_parser="llama3") as server:
        ask(server, '{"name": "g", "parameters": {}}', tools=[strict], stream=stream)
        assert server.requests[-1].sampling_params.structural_tag is None


@pytest.mark.parametrize("parser", [None, "qwen"])
def test_a_template_without_tools_ignores_or_enforces_them(
    templates: dict[str, str], caplog: pytest.LogCaptureFixture, parser: str | None
) -> None:
    """Tools that the model may call are ignored; calls that it must make are enforced."""
    with front_server(chat_template=templates["bare"], tool_call_parser=parser) as server:
        for stream in (False, True):
            for fields in (
                {"tools": [F, STRICT | {"function": {**STRICT["function"], "name": "h"}}]},
                {"tools": [G], "tool_choice": "auto", "response_format": {"type": "json_object"}},
            ):
                reply = ask(server, CALL_G, stream=stream, **fields)
                got = Gathered(reply).content if stream else reply.choices[0].message.content
                assert got == CALL_G
        [line] = [one for one in caplog.messages if "Tools of requests are ignored" in one]
        assert "--chat-template" in line
        request = server.requests[-1]
        assert request.sampling_params.json_schema is not None
        reply = ask(server, '{"name": "g", "parameters": {}}', tools=[G], tool_choice="required")
        [call] = reply.choices[0].message.tool_calls
        assert call.function.name == "g"
        request = server.requests[-1]
        assert '"g"' in (request.sampling_params.json_schema or "")
        reply = httpx.post(
            f"{server.url}/v1/chat/completions", json={"messages": said("x"), "tools": [F, F]}
        )
        assert "twice" in reply.json()["error"]["message"]


def test_both_paths_tokenize_and_back(qwen: FrontServer) -> None:
    for prefix in ("", "/v1"):
        reply = httpx.post(f"{qwen.url}{prefix}/tokenize", json={"prompt": "ab"}).json()
        assert reply["count"] == 2
        back = httpx.post(f"{qwen.url}{prefix}/detokenize", json={"tokens": reply["tokens"]})
        assert back.json() == {"text": "ab"}
