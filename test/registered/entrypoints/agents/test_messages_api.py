"""`/v1/messages` with the real `anthropic` client; the echo says what the last message says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import anthropic
import httpx
import pytest

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


def tool(name: str, **properties: Any) -> Any:
    return {"name": name, "input_schema": {"type": "object", "properties": properties}}


F, G = tool("f"), tool("g", x={"type": "integer"})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontServer]:
    template = write_template(tmp_path_factory.mktemp("last"), LAST_MESSAGE)
    with front_server(
        chat_template=template,
        tool_call_parser="llama3",
        reasoning_parser="qwen3",
        api_key="secret",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: FrontServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as made:
        yield made


def said(text: str, **fields: Any) -> Any:
    """Arguments that make the model say `text`."""
    messages = [{"role": "user", "content": text}]
    return {"model": "echo", "messages": messages, "max_tokens": 100, **fields}


CLEAR_TOOLS, CLEAR_THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"
COMPACT = "compact_20260112"


def edits(*given: dict[str, Any]) -> dict[str, Any]:
    return {"context_management": {"edits": [*given]}}


def tokens(value: int) -> dict[str, Any]:
    return {"type": "input_tokens", "value": value}


def uses(value: int) -> dict[str, Any]:
    return {"type": "tool_uses", "value": value}


def prompt_of(server: FrontServer, **body: Any) -> str:
    """The prompt that a body makes."""
    reply = httpx.post(f"{server.url}/v1/messages", json=said("a", **{"max_tokens": 1, **body}))
    assert reply.status_code == 200, reply.text
    return str(server.engine.tokenizer.decode(server.requests[-1].input_ids))


def test_a_text_has_blocks_a_stop_reason_and_usage(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(**said("abc"))
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", "echo")
    [block] = reply.content
    assert (block.type, block.text) == ("text", "abc")
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    usage = reply.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (1, 3, 4)


def test_what_ends_an_answer(client: anthropic.Anthropic) -> None:
    cut = client.messages.create(**said("abc", max_tokens=2))
    assert (cut.content[0].text, cut.stop_reason) == ("ab", "max_tokens")
    stopped = client.messages.create(**said("abc", stop_sequences=["x", "c"]))
    assert (stopped.content[0].text, stopped.stop_reason) == ("ab", "stop_sequence")
    assert stopped.stop_sequence == "c"


def test_blocks_come_in_order(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(**said(FULL, tools=[F, G]))
    thought, text, first, second = reply.content
    assert (thought.type, thought.thinking) == ("thinking", "h")
    assert (text.type, text.text) == ("text", "So.")
    assert (first.type, first.name, first.input) == ("tool_use", "f", {})
    assert (second.name, second.input) == ("g", {"x": 7})
    assert first.id != second.id
    assert reply.stop_reason == "tool_use"


def test_a_stream_gathers_to_the_same_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**said(FULL, tools=[F, G]))
    with client.messages.stream(**said(FULL, tools=[F, G])) as stream:
        kinds = [event.type for event in stream]
        message: Any = stream.get_final_message()
    starts = [kind for kind in kinds if kind in ("content_block_start", "content_block_stop")]
    assert starts == ["content_block_start", "content_block_stop"] * 4
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    thought, text, *calls = message.content
    assert (thought.thinking, text.text) == ("h", "So. ")
    assert [(call.name, call.input) for call in calls] == [("f", {}), ("g", {"x": 7})]
    assert (message.stop_reason, message.usage) == (whole.stop_reason, whole.usage)


def test_the_bytes_of_a_stream(client: anthropic.Anthropic, server: FrontServer) -> None:
    reply = httpx.post(
        f"{server.url}/v1/messages", json=said("ab", stream=True), headers={"x-api-key": "secret"}
    )
    frames = [frame.split("\n", 1) for frame in reply.text.strip().split("\n\n")]
    for name, data in frames:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert frames[-1][0] == "event: message_stop"


@pytest.mark.parametrize(
    ("choice", "names"), [({"type": "any"}, ["f", "g"]), ({"type": "tool", "name": "g"}, ["g"])]
)
def test_a_call_that_must_be_made(
    client: anthropic.Anthropic, server: FrontServer, choice: Any, names: list[str]
) -> None:
    text = '{"name": "g", "parameters": {"x": 3}}'
    reply = client.messages.create(**said(text, tools=[F, G], tool_choice=choice))
    [call] = reply.content
    assert (call.name, call.input) == ("g", {"x": 3})
    schema = json.loads(server.requests[-1].sampling_params.json_schema or "")
    branches = schema.get("anyOf", [schema])
    assert [branch["properties"]["name"]["const"] for branch in branches] == names


def test_one_call_if_others_are_not_wanted(client: anthropic.Anthropic) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    reply = client.messages.create(**said(CALLS, tools=[F, G], tool_choice=choice))
    assert [block.name for block in reply.content] == ["f"]


def test_a_tool_round_trip(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": CALLS}]
    first = client.messages.create(**said("", messages=messages, tools=[F, G]))
    calls = [block for block in first.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": f"is {call.name}"}
        for call in calls
    ]
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    second = client.messages.create(**said("", messages=messages, tools=[F, G]))
    assert (second.content[0].text, second.stop_reason) == ("is g", "end_turn")


def test_a_schema_constrains_the_output(client: anthropic.Anthropic, server: FrontServer) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    reply = client.messages.create(**said('{"x": 5}', output_config=config))
    assert reply.content[0].text == '{"x": 5}'
    assert json.loads(server.requests[-1].sampling_params.json_schema or "") == schema


CONTROL: Final = {"cache_control": {"type": "ephemeral"}}


def test_blocks_are_turns_of_the_template(shown: FrontServer) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "add", **CONTROL}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
                {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "one"},
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "content": [{"type": "text", "text": "two"}],
                    "is_error": True,
                },
                {"type": "text", "text": "go on", **CONTROL},
            ],
        },
    ]
    system = [{"type": "text", "text": "rules", **CONTROL}]
    prompt = prompt_of(shown, system=system, messages=messages, tools=[{**F, **CONTROL}])
    assert prompt == (
        'f;[system:rules][user:add][assistant:<hm>soc1=f{"a": 1}c2=g{}]'
        "[tool:onec1][tool:twoc2][user:go on]"
    )


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"thinking": {"type": "disabled"}}, "False[user:a]"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "True[user:a]"),
        ({"output_config": {"effort": "low"}}, "low[user:a]"),
        ({"system": "s", "tools": [F], "tool_choice": {"type": "none"}}, "[system:s][user:a]"),
        (
            {
                "metadata": {"user_id": "u"}, "service_tier": "auto", "speed": "fast",
                "cache_control": {"type": "ephemeral"}, "container": None,
            },
            "[user:a]",
        ),
    ],
)  # fmt: skip
def test_fields_reach_the_prompt(shown: FrontServer, fields: dict[str, Any], prompt: str) -> None:
    assert prompt_of(shown, **fields) == prompt


def test_an_answer_goes_on_where_the_last_message_ends(shown: FrontServer) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert prompt_of(shown, messages=messages) == "[user:a][assistant:b"


def test_tokens_are_counted_as_a_message_has_them(
    client: anthropic.Anthropic, server: FrontServer
) -> None:
    fields: Any = {"system": "rules", "tools": [F], "messages": [{"role": "user", "content": "ab"}]}
    counted = client.messages.count_tokens(model="echo", **fields)
    usage = client.messages.create(model="echo", max_tokens=1, **fields).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    long = "a" * (server.context.manager.limits.max_text_chars + 1)
    with pytest.raises(anthropic.BadRequestError, match="messages has"):
        client.messages.count_tokens(model="echo", messages=[{"role": "user", "content": long}])


def use(name: str, call_id: str) -> list[dict[str, Any]]:
    """A turn that thinks and uses a tool, and the tool's result."""
    call = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    result = {"type": "tool_result", "tool_use_id": call_id, "content": "ok"}
    return [
        {"role": "assistant", "content": [thought, call]},
        {"role": "user", "content": [result]},
    ]


TALK: Final = [*use("f", "1"), *use("g", "2"), {"role": "user", "content": "ab"}]
"""Its prompt is `ab` and the end: three tokens, seven bytes."""


@pytest.mark.parametrize(
    ("edit", "is_due"),
    [
        ({"type": COMPACT}, False),
        ({"type": COMPACT, "trigger": tokens(3)}, False),
        ({"type": COMPACT, "trigger": tokens(2), "instructions": "be short"}, True),
        ({"type": CLEAR_THINKING}, True),
        ({"type": CLEAR_THINKING, "keep": "all"}, False),
        ({"type": CLEAR_THINKING, "keep": {"type": "all"}}, False),
        ({"type": CLEAR_THINKING, "keep": {"type": "thinking_turns", "value": 2}}, False),
        ({"type": CLEAR_THINKING, "keep": {"type": "thinking_turns", "value": 1}}, True),
        ({"type": CLEAR_TOOLS}, False),
        ({"type": CLEAR_TOOLS, "trigger": tokens(2)}, False),
        ({"type": CLEAR_TOOLS, "trigger": tokens(2), "keep": uses(1)}, True),
        ({"type": CLEAR_TOOLS, "trigger": tokens(3), "keep": uses(1)}, False),
        ({"type": CLEAR_TOOLS, "trigger": uses(1), "keep": uses(0)}, True),
        ({"type": CLEAR_TOOLS, "trigger": uses(2), "keep": uses(0)}, False),
        (
            {"type": CLEAR_TOOLS, "trigger": uses(1), "keep": uses(1), "exclude_tools": ["f"]},
            False,
        ),
        ({"type": CLEAR_TOOLS, "trigger": uses(1), "keep": uses(1), "exclude_tools": ["g"]}, True),
    ],
)
def test_context_management_is_accepted_until_an_edit_is_due(
    server: FrontServer, client: anthropic.Anthropic, edit: dict[str, Any], is_due: bool
) -> None:
    never = {"type": COMPACT, "trigger": tokens(10**6)}
    body = {"model": "echo", "messages": TALK, **edits(never, edit)}
    whole, parts = {**body, "max_tokens": 9}, {**body, "max_tokens": 9, "stream": True}
    replies = [
        httpx.post(f"{server.url}{path}", json=one, headers={"x-api-key": "secret"})
        for path, one in (
            ("/v1/messages/count_tokens", body), ("/v1/messages", whole), ("/v1/messages", parts)
        )
    ]  # fmt: skip
    if is_due:
        for reply in replies:
            assert reply.status_code == 400
            assert f"context_management.edits[1], {edit['type']}," in reply.text
        return
    counted, answered, streamed = replies
    assert counted.json() == {"input_tokens": 3, "context_management": {"original_input_tokens": 3}}
    assert answered.json()["content"] == [{"type": "text", "text": "ab"}]
    assert answered.json()["context_management"] == {"applied_edits": []}
    assert '"context_management":{"applied_edits":[]}' in streamed.text
    reply = client.beta.messages.create(**whole)
    assert reply.context_management is not None
    assert reply.context_management.applied_edits == []


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"messages": []}, ["messages is empty"]),
        ({"messages": [{"role": "tool", "content": "x"}]}, ["messages[0].role='tool'"]),
        ({"messages": [{"role": "user", "content": []}]}, ["messages[0].content is empty"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            ["messages[0].content[0].type='image'", "text alone"],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            ["messages[0].content[0].tool_use_id", "required"],
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
                    }
                ]
            },
            ["messages[0]", "tool_result"],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": ["text"]}]}]},
            ["messages[0].content[0].type"],
        ),
        ({"max_tokens": 0}, ["max_tokens=0"]),
        ({"max_tokens": 100_000}, ["max_tokens=100000"]),
        ({"max_tokens": None}, ["max_tokens"]),
        ({"temperature": 3}, ["temperature"]),
        ({"stop_sequences": [""]}, ["stop_sequences"]),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, ["tools[0].type", "input_schema"]),
        ({"tools": [F, F]}, ["tools[1].name", "twice"]),
        (
            {"tools": [tool("f", x=[])], "tool_choice": {"type": "any"}},
            ["tools[0].input_schema: #/properties/x must be an object"],
        ),
        ({"tools": [F], "tool_choice": {"type": "tool", "name": "z"}}, ["tool_choice.name", "z"]),
        ({"tool_choice": {"type": "some"}}, ["tool_choice.type='some'"]),
        ({"thinking": {"type": "between_tools"}}, ["thinking.type"]),
        ({"thinking": {"type": "enabled", "display": "omitted"}}, ["display"]),
        ({"mcp_servers": [{"url": "x"}]}, ["mcp_servers", "tools"]),
        ({"container": {"id": "x"}}, ["container"]),
        ({"stop": "x"}, ["stop", "stop_sequences"]),
        ({"nonsense": 1}, ["nonsense"]),
        (edits({"type": "shorten"}), ["context_management.edits[0].type='shorten'", "compact"]),
        (edits({"type": COMPACT, "trigger": tokens(0)}), [f"edits[0], {COMPACT},", "shorten"]),
        (edits({"type": COMPACT, "trigger": {"type": "turns", "value": 1}}), ["trigger.type"]),
        (edits({"type": COMPACT, "trigger": {"type": "input_tokens"}}), ["trigger.value"]),
        (edits({"type": CLEAR_TOOLS, "keep": tokens(3)}), ["keep.type", "tool_uses"]),
        (edits(*[{"type": COMPACT}] * 17), ["context_management.edits has 17"]),
        ({"context_management": {"edit": []}}, ["context_management.edit", "unknown field"]),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    server: FrontServer, fields: dict[str, Any], names: list[str]
) -> None:
    reply = httpx.post(
        f"{server.url}/v1/messages", json=said("x", **fields), headers={"x-api-key": "secret"}
    )
    assert reply.status_code == 400, reply.text
    body = reply.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    for name in names:
        assert name in body["error"]["message"]


def test_keys_and_paths_are_refused_in_the_clients_form(server: FrontServer) -> None:
    with (
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as wrong,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        wrong.messages.create(**said("a"))
    assert refused.value.type == "authentication_error"
    with anthropic.Anthropic(base_url=server.url, auth_token="secret", max_retries=0) as bearer:
        assert bearer.messages.create(**said("a")).content[0].text == "a"
    headers = {"x-api-key": "secret"}
    assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    unknown = httpx.post(f"{server.url}/v1/messages/batches", headers=headers)
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")


def test_engine_failures_are_overloads(client: anthropic.Anthropic, server: FrontServer) -> None:
    scheduler = server.scheduler
    scheduler.refuse_with = abort_reason("no memory", 503)
    try:
        for stream in (False, True):
            with pytest.raises(anthropic.APIStatusError, match="no memory") as failed:
                client.messages.create(**said("hi", stream=stream))
            assert (failed.value.status_code, failed.value.type) == (503, "overloaded_error")
    finally:
        scheduler.refuse_with = None


@pytest.mark.parametrize("reason", [abort_reason("no memory", 503), None])
def test_a_stream_that_breaks_off_raises(
    client: anthropic.Anthropic, server: FrontServer, reason: Any
) -> None:
    server.scheduler.hold_after = 2
    try:
        stream = client.messages.create(**said("hello", stream=True))
        assert next(stream).type == "message_start"
        server.scheduler.refuse_with = reason
        httpx.post(
            f"{server.url}/abort_request",
            json={"abort_all": True},
            headers={"x-api-key": "secret"},
        )
        message = "aborted by its client or an operator" if reason is None else "no memory"
        with pytest.raises(anthropic.APIStatusError, match=message):
            list(stream)
    finally:
        server.scheduler.hold_after = server.scheduler.refuse_with = None
