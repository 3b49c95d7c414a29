"""Conversations as gpt-oss's template reads them: nothing is lost, and nothing is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rigs.harmony_text import TEMPLATE, harmony_tokenizer
from sglang.srt.entrypoints.http.errors import ApiError
from sglang.srt.entrypoints.openai.chat_prompt import chat_prompt
from sglang.srt.entrypoints.openai.protocol import ChatBody
from sglang.srt.entrypoints.openai.responses_protocol import ResponsesBody, chat_body
from sglang.srt.managers.tokenizer.chat_template import ChatTemplate
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


def template(text: str = TEMPLATE) -> ChatTemplate:
    tokenizer = harmony_tokenizer()
    tokenizer.chat_template = text
    return ChatTemplate(tokenizer)


def prompt(messages: list[Any], **fields: Any) -> str:
    body = msgspec.convert({"messages": messages, **fields}, ChatBody)
    return chat_prompt(body, template(), None, 10_000)


def messages_of(text: str) -> list[str]:
    """The prompt's messages behind the first, with short marks."""
    text = text.replace("<|channel|>", "|").replace("<|message|>", ":")
    parts = text.replace("<|end|>", "").replace("<|call|>", "!").split("<|start|>")
    return [part for part in parts[2:] if part]


def call(name: str, call_id: str | None = None) -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": '{"a": 1}'}}


USER = {"role": "user", "content": "hi"}
BEGIN = "assistant"
CALL_F = 'assistant to=functions.f|commentary json:{"a": 1}!'
CALL_G = 'assistant to=functions.g|commentary json:{"a": 1}!'


def result(text: str, call_id: str | None = None) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


@pytest.mark.parametrize(
    ("turn", "analysis"),
    [
        ({"reasoning_content": "hm"}, "hm"),
        ({"reasoning": "hm"}, "hm"),
        ({"content": "so"}, "so"),
        ({"content": "so", "reasoning_content": "hm"}, "hm\n\nso"),
        ({"content": ""}, None),
        ({"reasoning_content": ""}, None),
    ],
)
def test_what_comes_before_a_call_is_its_reasoning(turn: Any, analysis: str | None) -> None:
    turn = {"role": "assistant", **turn, "tool_calls": [call("f", "c1")]}
    got = messages_of(prompt([USER, turn, result("one", "c1")]))
    thought = [] if analysis is None else [f"assistant|analysis:{analysis}"]
    assert got == ["user:hi", *thought, CALL_F, "functions to=assistant|commentary:one", BEGIN]


@pytest.mark.parametrize(
    ("results", "shown"),
    [
        ([("one", "c1"), ("two", "c2")], [CALL_F, "one", CALL_G, "two"]),
        ([("two", "c2"), ("one", "c1")], [CALL_F, "one", CALL_G, "two"]),
        ([("two", "c2"), ("x", "c9"), ("one", "c1")], [CALL_F, "one", CALL_G, "two", "x"]),
        ([("one", "c1")], [CALL_F, "one", CALL_G]),
        ([], [CALL_F, CALL_G]),
    ],
)
def test_each_of_several_calls_is_shown_with_its_result(
    results: list[tuple[str, str]], shown: list[str]
) -> None:
    calls = [call("f", "c1"), call("g", "c2")]
    turn = {"role": "assistant", "reasoning_content": "hm", "tool_calls": calls}
    got = messages_of(prompt([USER, turn, *(result(*one) for one in results)]))
    told = [one if one.startswith("assistant") else one.rpartition(":")[2] for one in got]
    assert told == ["hi", "assistant|analysis:hm", *shown, BEGIN]


def test_a_text_before_a_call_is_joined_to_it() -> None:
    before = {"role": "assistant", "content": "so", "reasoning_content": "a"}
    turn = {"role": "assistant", "reasoning_content": "b", "tool_calls": [call("f")]}
    got = messages_of(prompt([USER, before, turn]))
    assert got == ["user:hi", "assistant|analysis:a\n\nso\n\nb", CALL_F, BEGIN]
    # A turn of calls is no text.
    got = messages_of(prompt([USER, turn, {**turn, "tool_calls": [call("g")]}]))
    assert got == [
        "user:hi", "assistant|analysis:b", CALL_F, "assistant|analysis:b", CALL_G, BEGIN,
    ]  # fmt: skip


def test_all_instructions_are_shown_first() -> None:
    rules = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}]
    got = messages_of(prompt([*rules, USER, {"role": "system", "content": "c"}]))
    assert got == ["developer:a\n\nb\n\nc", "user:hi", BEGIN]


def test_answers_stay_as_they_are() -> None:
    turns = [USER, {"role": "assistant", "content": "yes", "reasoning_content": "hm"}, USER]
    assert messages_of(prompt(turns)) == ["user:hi", "assistant|final:yes", "user:hi", BEGIN]
    shown = template("{{ messages | tojson }}{# <|channel|> #}")
    body = msgspec.convert({"messages": turns}, ChatBody)
    assert '"thinking": "hm"' in chat_prompt(body, shown, None, 100)


def test_items_of_responses_are_shown() -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
        {"role": "assistant", "content": "so"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
    ]
    body = chat_body(ResponsesBody(input=items, instructions="rules"))
    got = messages_of(chat_prompt(body, template(), None, 10_000))
    assert got == [
        "developer:rules", "user:hi", "assistant|analysis:a\n\nso\n\nb", CALL_F,
        "functions to=assistant|commentary:one", BEGIN,
    ]  # fmt: skip


def test_efforts_are_checked() -> None:
    for effort in ("low", "medium", "high"):
        assert f"Reasoning: {effort}<" in prompt([USER], reasoning_effort=effort)
        given = {"reasoning_effort": effort}
        assert f"Reasoning: {effort}<" in prompt([USER], chat_template_kwargs=given)
    assert "Reasoning: medium<" in prompt([USER])
    wrong: list[dict[str, Any]] = [{"chat_template_kwargs": {"reasoning_effort": ["low"]}}]
    for other in ("none", "minimal", "low<|end|>"):
        wrong.append({"reasoning_effort": other})
        wrong.append({"chat_template_kwargs": wrong[-1]})
    for fields in wrong:
        with pytest.raises(ApiError, match="must be one of low, medium, high"):
            prompt([USER], **fields)


def test_a_result_without_a_call_stays_where_it_is() -> None:
    got = messages_of(prompt([USER, result("one", "c1")]))
    assert got == ["user:hi", "functions to=assistant|commentary:one", BEGIN]
