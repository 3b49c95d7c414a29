"""A call inside a reasoning that was not closed, in chat, messages and responses; the echo says
what the last message says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import httpx
import pytest

from rigs.servers import fake_engine
from rigs.servers.fake_engine import LAST_MESSAGE, FrontServer, front_server, write_template
from rigs.written_calls import WRITERS
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-b-test-cpu")

PARSERS: Final = {
    "glm45": "glm45",
    "glm47": "glm45",
    "kimi_k2": "kimi_k2",
    "qwen3_coder": "qwen3",
}
"""Parsers of calls, and the parser of reasoning of the same model."""
PARAMETERS: Final = {"type": "object", "properties": {"x": {"type": "string"}}}
FUNCTION: Final = {"name": "f", "parameters": PARAMETERS}
TOOLS: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"type": "function", "function": FUNCTION},
    "/v1/responses": {"type": "function", **FUNCTION},
    "/v1/messages": {"name": "f", "input_schema": PARAMETERS},
}
ENDPOINTS: Final = pytest.mark.parametrize("path", list(TOOLS))


@pytest.fixture(scope="module", params=list(PARSERS))
def parser(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(parser: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontServer]:
    template = write_template(tmp_path_factory.mktemp("last"), LAST_MESSAGE)
    settings: dict[str, Any] = {"tool_call_parser": parser, "reasoning_parser": PARSERS[parser]}
    with (
        mock.patch.object(fake_engine, "CONTEXT_LEN", 400),
        front_server(chat_template=template, **settings) as running,
    ):
        yield running


def body_of(path: str, text: str, *, stream: bool) -> dict[str, Any]:
    """A body that makes the model say `text`."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    messages = "input" if path == "/v1/responses" else "messages"
    return {
        "model": "echo",
        messages: [{"role": "user", "content": text}],
        limit: 190,
        "tools": [TOOLS[path]],
        "stream": stream,
    }


def facts(path: str, answer: dict[str, Any]) -> tuple[str, dict[str, Any], str]:
    """Reasoning, arguments of the only call, and why the answer ended."""
    if path == "/v1/chat/completions":
        [choice] = answer["choices"]
        message = choice["message"]
        [call] = message["tool_calls"]
        assert (message["content"], call["function"]["name"]) == (None, "f")
        arguments = json.loads(call["function"]["arguments"])
        return message["reasoning_content"], arguments, choice["finish_reason"]
    if path == "/v1/responses":
        thought, call = answer["output"]
        assert (call["type"], call["name"]) == ("function_call", "f")
        return thought["content"][0]["text"], json.loads(call["arguments"]), answer["status"]
    thought, call = answer["content"]
    assert (call["type"], call["name"]) == ("tool_use", "f")
    return thought["thinking"], call["input"], answer["stop_reason"]


ENDS: Final = {
    "/v1/chat/completions": "tool_calls",
    "/v1/responses": "completed",
    "/v1/messages": "tool_use",
}


@ENDPOINTS
def test_the_answer_has_the_call(server: FrontServer, parser: str, path: str) -> None:
    text = "<think>need it" + WRITERS[parser](("f", {"x": "1"}))
    reply = httpx.post(server.url + path, json=body_of(path, text, stream=False))
    assert reply.status_code == 200, reply.text
    assert facts(path, reply.json()) == ("need it", {"x": "1"}, ENDS[path])
    if path == "/v1/responses":
        details = reply.json()["usage"]["output_tokens_details"]
        assert details == {"reasoning_tokens": len("<think>need it")}


@ENDPOINTS
def test_the_stream_has_the_call(server: FrontServer, parser: str, path: str) -> None:
    text = "<think>need it" + WRITERS[parser](("f", {"x": "1"}))
    reply = httpx.post(server.url + path, json=body_of(path, text, stream=True))
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert facts(path, gathered(path, events)) == ("need it", {"x": "1"}, ENDS[path])


def gathered(path: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer that a stream adds up to."""
    if path == "/v1/responses":
        answer: dict[str, Any] = events[-1]["response"]
        return answer
    if path == "/v1/messages":
        blocks = [one["content_block"] for one in events if one["type"] == "content_block_start"]
        for event in events:
            if event["type"] == "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                block["thinking"] = block.get("thinking", "") + delta.get("thinking", "")
                block["json"] = block.get("json", "") + delta.get("partial_json", "")
        for block in blocks:
            block["input"] = json.loads(block["json"] or "{}")
        return {"content": blocks, **events[-2]["delta"]}
    choices = [event["choices"][0] for event in events]
    deltas = [choice["delta"] for choice in choices]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    message = {
        "content": "".join(delta.get("content", "") for delta in deltas) or None,
        "reasoning_content": "".join(delta["reasoning_content"] or "" for delta in deltas),
        "tool_calls": calls,
    }
    return {"choices": [{"message": message, "finish_reason": choices[-1]["finish_reason"]}]}
