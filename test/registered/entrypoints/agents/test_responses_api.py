"""`/v1/responses` with the real `openai` client; the echo says what the last message says."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator
from typing import Any, Final

import httpx
import msgspec
import openai
import pytest
from pydantic import BaseModel

from rigs.servers.fake_engine import (
    CALLS,
    FULL,
    LAST_MESSAGE,
    FrontServer,
    front_server,
    write_template,
)
from sglang.srt.messages.io_struct import abort_reason
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-b-test-cpu")

THOUGHT: Final = "<think>two and two</think>four"


def tool(name: str, **properties: Any) -> Any:
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"type": "function", "name": name, "parameters": schema, "strict": False}


F, G = tool("f"), tool("g", x={"type": "integer"})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontServer]:
    template = write_template(tmp_path_factory.mktemp("last"), LAST_MESSAGE)
    with front_server(
        chat_template=template, tool_call_parser="llama3", reasoning_parser="qwen3"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: FrontServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    """The response of a model that says `text`."""
    return client.responses.create(model="echo", input=text, **fields)


def prompt_of(server: FrontServer, **body: Any) -> str:
    """The prompt that a body makes."""
    reply = httpx.post(f"{server.url}/v1/responses", json={"max_output_tokens": 1, **body})
    assert reply.status_code == 200, reply.text
    return str(server.engine.tokenizer.decode(server.requests[-1].input_ids))


def test_a_text_has_items_echoed_fields_and_usage(client: openai.OpenAI) -> None:
    reply = ask(client, "abc", metadata={"k": "v"}, temperature=0.5)
    assert (reply.output_text, reply.status, reply.incomplete_details) == ("abc", "completed", None)
    assert (reply.object, reply.model, reply.error) == ("response", "echo", None)
    assert (reply.metadata, reply.temperature, reply.top_p) == ({"k": "v"}, 0.5, 1.0)
    assert (reply.store, reply.background, reply.previous_response_id) == (False, False, None)
    [item] = reply.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    usage = reply.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (4, 4, 8)
    assert usage.input_tokens_details.cached_tokens == 3
    assert usage.output_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_text_is_incomplete(client: openai.OpenAI, stream: bool) -> None:
    reply = ask(client, "abc", max_output_tokens=2, stream=stream)
    if stream:
        events = [*reply]
        assert events[-1].type == "response.incomplete"
        assert events[-2].item.status == "incomplete"
        reply = events[-1].response
    assert (reply.output[0].content[0].text, reply.output[0].status) == ("ab", "incomplete")
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_reasoning_text_and_calls_are_items_in_this_order(client: openai.OpenAI) -> None:
    reply = ask(client, FULL, tools=[F, G])
    thought, text, first, second = reply.output
    assert [one.type for one in reply.output] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    assert thought.content[0].text == "h"
    assert text.content[0].text == "So."
    assert (first.name, first.arguments) == ("f", "{}")
    assert (second.name, json.loads(second.arguments)) == ("g", {"x": 7})
    assert len({item.id for item in reply.output} | {first.call_id, second.call_id}) == 6


def test_reasoning_tokens_are_counted_up_to_the_answer(client: openai.OpenAI) -> None:
    usage = ask(client, THOUGHT).usage
    # One token is one character.
    assert usage.output_tokens_details.reasoning_tokens == len("<think>two and two</think>")
    assert usage.output_tokens == len(THOUGHT) + 1


def test_without_parallel_calls_only_the_first_is_told(client: openai.OpenAI) -> None:
    reply = ask(client, CALLS, tools=[F, G], parallel_tool_calls=False)
    assert [item.name for item in reply.output] == ["f"]


def test_a_strict_call_that_may_be_made(client: openai.OpenAI, server: FrontServer) -> None:
    """No grammar holds calls in this server's format."""
    strict: Any = {**G, "strict": True}
    assert [one.name for one in ask(client, CALLS, tools=[F, strict]).output] == ["f", "g"]
    assert server.requests[-1].sampling_params.constraint is None


def test_a_call_that_must_be_made(client: openai.OpenAI, server: FrontServer) -> None:
    text = '{"name": "g", "parameters": {"x": 3}}'
    strict: Any = {**G, "strict": True}
    for choice in ("required", {"type": "function", "name": "g"}):
        [call] = ask(client, text, tools=[strict], tool_choice=choice).output
        assert (call.name, call.arguments) == ("g", '{"x": 3}')
        schema = json.loads(server.requests[-1].sampling_params.json_schema or "")
        assert schema["properties"]["parameters"] == G["parameters"]


class Point(BaseModel):
    x: int


def test_parse_sends_a_schema_and_reads_it(client: openai.OpenAI, server: FrontServer) -> None:
    reply = client.responses.parse(model="echo", input='{"x": 5}', text_format=Point)
    assert reply.output_parsed == Point(x=5)
    schema = json.loads(server.requests[-1].sampling_params.json_schema or "")
    assert schema["properties"]["x"]["type"] == "integer"


EVENTS: Final = """
    created in_progress
    output_item.added content_part.added reasoning_text.delta reasoning_text.done
    content_part.done output_item.done
    output_item.added content_part.added output_text.delta output_text.done
    content_part.done output_item.done
    output_item.added function_call_arguments.delta function_call_arguments.done output_item.done
    output_item.added function_call_arguments.delta function_call_arguments.done output_item.done
    completed
""".split()


def test_events_come_in_order(client: openai.OpenAI) -> None:
    events = [*ask(client, FULL, tools=[F, G], stream=True)]
    kinds = [event.type.removeprefix("response.") for event in events]
    # Runs of deltas count once.
    runs = [k for i, k in enumerate(kinds) if i == 0 or k != kinds[i - 1]]
    assert runs == EVENTS
    assert [event.sequence_number for event in events] == [*range(len(events))]
    last = events[-1].response
    whole = ask(client, FULL, tools=[F, G])
    assert [_bare(item) for item in last.output] == [
        {**_bare(item), **_text_of_stream(item)} for item in whole.output
    ]
    assert last.usage == whole.usage
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.output


def _bare(item: Any) -> dict[str, Any]:
    return item.model_dump(exclude={"id", "call_id"})  # type: ignore[no-any-return]


def _text_of_stream(item: Any) -> dict[str, Any]:
    """A stream has sent the blank before a call when the call begins."""
    if item.type != "message":
        return {}
    [part] = item.content
    return {"content": [{**part.model_dump(), "text": part.text + " "}]}


def test_stream_of_the_client_gathers_what_was_sent(client: openai.OpenAI) -> None:
    """The client's own bookkeeping follows the events."""
    with client.responses.stream(model="echo", input='{"x": 5}', text_format=Point) as stream:
        texts = [e.delta for e in stream if e.type == "response.output_text.delta"]
        point = stream.get_final_response()
    assert "".join(texts) == '{"x": 5}'
    assert (point.output_parsed, point.status) == (Point(x=5), "completed")
    with client.responses.stream(model="echo", input=CALLS, tools=[F, G]) as stream:
        final = stream.get_final_response()
    calls = [item for item in final.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [("f", "{}"), ("g", '{"x":7}')]


def test_items_are_turns_of_the_template(shown: FrontServer) -> None:
    items = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "add"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "so", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2",
         "output": [{"type": "input_text", "text": "two"}]},
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": "y"},
    ]  # fmt: skip
    prompt = prompt_of(shown, input=items, instructions="rules", tools=[F, G])
    assert prompt == (
        "f;g;[system:rules\n\nbe brief][user:add]"
        '[assistant:<hm>soc1=f{"a": 1}c2=g{}][tool:onec1][tool:twoc2][assistant:x][assistant:y]'
    )
    items[2] = {"type": "reasoning", "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "hm"}]}  # fmt: skip
    assert prompt_of(shown, input=items, instructions="rules", tools=[F, G]) == prompt
    assert prompt_of(shown, input="a", reasoning={"effort": "low"}) == "low[user:a]"
    assert prompt_of(shown, input="a", tools=[F], tool_choice="none") == "[user:a]"


def test_the_output_is_the_next_input(client: openai.OpenAI, shown: FrontServer) -> None:
    reply = ask(client, FULL, tools=[F, G])
    dumped = [item.model_dump(mode="json") for item in reply.output]
    calls = [item for item in reply.output if item.type == "function_call"]
    prompt = prompt_of(shown, input=[{"role": "user", "content": "a"}, *dumped])
    first, second = (call.call_id for call in calls)
    assert prompt == f'[user:a][assistant:<h>So.{first}=f{{}}{second}=g{{"x": 7}}]'


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"previous_response_id": "resp_1"}, ["previous_response_id", "input items"]),
        ({"conversation": "conv_1"}, ["conversation", "input items"]),
        ({"background": True}, ["background", "connection"]),
        ({"prompt": {"id": "p"}}, ["prompt", "instructions"]),
        ({"top_logprobs": 3}, ["top_logprobs", "/v1/chat/completions"]),
        ({"include": ["message.output_text.logprobs"]}, ["include", "logprobs"]),
        ({"tools": [{"type": "web_search"}]}, ["tools[0].type='web_search'", "function"]),
        ({"tools": [F, F]}, ["tools[1].name", "twice"]),
        ({"tools": [{"type": "function"}]}, ["tools[0].name", "required"]),
        ({"tools": [F], "tool_choice": {"type": "function", "name": "z"}}, ["tool_choice.name"]),
        ({"tools": [F], "tool_choice": {"type": "function"}}, ["tool_choice.name"]),
        ({"tools": [F], "tool_choice": {"type": "allowed_tools"}}, ["tool_choice.type"]),
        ({"text": {"format": {"type": "xml"}}}, ["text.format.type"]),
        ({"text": {"format": {"type": "json_schema"}}}, ["text.format.schema is missing"]),
        ({"text": {"format": {"type": "json_object"}}, "tools": [F]}, ["text.format", "tools"]),
        ({"max_output_tokens": 0}, ["max_output_tokens=0"]),
        ({"max_output_tokens": 100_000}, ["max_output_tokens=100000"]),
        ({"temperature": 3}, ["temperature"]),
        ({"truncation": "middle"}, ["truncation", "auto or disabled"]),
        ({"metadata": {"k": "v" * 513}}, ["metadata.k", "512"]),
        ({"metadata": {str(i): "" for i in range(17)}}, ["metadata", "16"]),
        ({"input": []}, ["input is empty"]),
        ({"input": "x" * 250}, ["input has 251 tokens"]),
        ({"input": [{"role": "king", "content": "x"}]}, ["input[0].role='king'"]),
        ({"input": [{"type": ["message"]}]}, ["input[0].type"]),
        ({"input": [{"role": "user"}]}, ["input[0].content", "required"]),
        ({"input": [{"type": "item_reference", "id": "a"}]}, ["input[0].type='item_reference'"]),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            ["input[0].content[0].type='input_image'", "text alone"],
        ),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "gAAA"}]},
            ["encrypted_content", "content"],
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
            ["arguments", "JSON object"],
        ),
        ({"messages": []}, ["messages", "input"]),
        ({"rid": "r"}, ["rid", "request_id"]),
        ({"request_id": ""}, ["request_id must have 1 to 256 characters"]),
        ({"request_id": "HEALTH_CHECK_1"}, ["request_id begins with HEALTH_CHECK"]),
        ({"top_k": 0}, ["top_k=0"]),
        ({"repetition_penalty": 0}, ["repetition_penalty=0"]),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    server: FrontServer, fields: dict[str, Any], names: list[str]
) -> None:
    reply = httpx.post(f"{server.url}/v1/responses", json={"input": "x", **fields})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    for name in names:
        assert name in error["message"]
    assert error["param"]
    assert "messages" not in error["message"] or "messages" in fields


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def is_too_deep(depth: int) -> bool:
    try:
        msgspec.json.decode(nested(depth))
    except RecursionError:
        return True
    return False


def test_deep_values_that_an_answer_repeats_are_refused(server: FrontServer) -> None:
    statuses = set()
    limit = bisect.bisect_left(range(20_000), True, key=is_too_deep)  # By version of Python.
    for depth in (100, limit // 2, *range(limit - 60, limit + 10, 3)):
        schema = nested(depth)
        one = f'{{"type": "function", "name": "f", "parameters": {schema}}}'
        body = f'{{"input": "a", "max_output_tokens": 1, "tool_choice": "none", "tools": [{one}]}}'
        statuses.add(httpx.post(f"{server.url}/v1/responses", content=body).status_code)
    assert statuses == {200, 400}


def test_what_asks_for_nothing_is_accepted(shown: FrontServer) -> None:
    plain = prompt_of(shown, input="a")
    fields = {
        "store": True, "previous_response_id": None, "background": False, "truncation": "auto",
        "include": ["reasoning.encrypted_content"], "service_tier": "auto", "user": "me",
        "prompt_cache_key": "k", "stream_options": {"include_obfuscation": False}, "tools": [],
        "text": {"format": {"type": "text"}, "verbosity": "high"}, "tool_choice": "auto",
        "reasoning": {"summary": "auto"}, "max_tool_calls": 3,
    }  # fmt: skip
    assert prompt_of(shown, input="a", **fields) == plain


def test_sglangs_fields_reach_the_scheduler(server: FrontServer, client: openai.OpenAI) -> None:
    values = {
        "top_k": 5, "min_p": 0.25, "repetition_penalty": 1.5, "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
    }  # fmt: skip
    reply = ask(client, "abc", extra_body={**values, "request_id": "mine", "stop": ["c", "zz"]})
    assert (reply.id, reply.output_text, reply.status) == ("mine", "ab", "completed")
    request = server.requests[-1]
    assert request.rid == "mine"
    assert {name: getattr(request.sampling_params, name) for name in values} == values
    # Routers add these to every request.
    added = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "priority": 0, "store": True}
    reply = ask(client, "abc", extra_body=added)
    assert (reply.output_text, reply.store) == ("abc", False)
    assert reply.id.startswith("resp_")


def test_engine_failures_are_server_errors(client: openai.OpenAI, server: FrontServer) -> None:
    scheduler = server.scheduler
    scheduler.refuse_with = abort_reason("no memory", 503)
    try:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="no memory"):
                ask(client, "hi", stream=stream)
    finally:
        scheduler.refuse_with = None


def test_a_failure_within_a_stream_is_an_event(client: openai.OpenAI, server: FrontServer) -> None:
    server.scheduler.hold_after = 2
    try:
        stream = ask(client, "hello", stream=True)
        seen = [next(stream).type for _ in range(4)]
        assert seen[0] == "response.created"
        server.scheduler.refuse_with = abort_reason("no memory", 503)
        httpx.post(f"{server.url}/abort_request", json={"abort_all": True})
        last = [*stream][-1]
        assert (last.type, last.message) == ("error", "no memory")
    finally:
        server.scheduler.hold_after = server.scheduler.refuse_with = None


def test_an_aborted_response_says_so(client: openai.OpenAI, server: FrontServer) -> None:
    server.scheduler.hold_after = 2
    try:
        stream = ask(client, "hello", stream=True)
        next(stream)
        httpx.post(f"{server.url}/abort_request", json={"abort_all": True})
        last = [*stream][-1]
        assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    finally:
        server.scheduler.hold_after = None
