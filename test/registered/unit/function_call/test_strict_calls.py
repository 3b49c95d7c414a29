"""Grammars of strict tools: text is free, and calls fit the schemas, as the parser reads them."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

import sglang
from sglang.srt.constrained.constraint import MAX_CONSTRAINT_BYTES, Constraint, ConstraintKind
from sglang.srt.constrained.grammar import (
    Grammar,
    GrammarLimits,
    Vocabulary,
    compile_constraint,
    make_compiler,
)
from sglang.srt.constrained.schema_check import prepare_json_schema, prepare_structural_tag
from sglang.srt.entrypoints.http.errors import ApiError
from sglang.srt.entrypoints.openai.chat_prompt import ToolUse, tool_use
from sglang.srt.entrypoints.openai.protocol import ChatBody, Tool
from sglang.srt.function_call.function_call_parser import TOOL_CALL_PARSERS, make_call_parser
from sglang.srt.managers.tokenizer.chat_template import ChatTemplate
from sglang.srt.utils.hf_tokenizer import get_tokenizer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

BAR = "\uff5c"
BEGIN, END = f"<{BAR}tool▁call▁begin{BAR}>", f"<{BAR}tool▁call▁end{BAR}>"
FENCED = f"{BEGIN}function<{BAR}tool▁sep{BAR}>%s\n```json\n%s\n```{END}"
WRITTEN = {
    "qwen25": '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
    "deepseekv3": FENCED,
    "deepseekv31": f"{BEGIN}%s<{BAR}tool▁sep{BAR}>%s{END}",
}
"""A call, with places for its name and arguments."""
SECTION = {"qwen25": "", "deepseekv3": f"<{BAR}tool▁calls▁begin{BAR}>"}
SECTION["deepseekv31"] = SECTION["deepseekv3"]
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
NESTED = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/point"}, "tags": {"type": "array", "uniqueItems": True}},
    "required": ["at", "tags"],
    "additionalProperties": False,
    "$defs": {"point": POINT | {"additionalProperties": False}},
}
"""A schema such as the Agents SDK generates for nested types."""


def tool(name: str, parameters: dict[str, Any] | None, *, strict: bool | None) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


TOOLS = [tool("go", NESTED, strict=True), tool("say-it_2.0", POINT, strict=None)]


@lru_cache
def tokenizer() -> Any:
    return get_tokenizer(str(Path(sglang.__file__).parent / "builtin_model"))


def use_of(parser: str, tools: list[dict[str, Any]]) -> ToolUse:
    body = ChatBody(messages=[], tools=msgspec.convert(tools, list[Tool]))
    template = ChatTemplate(tokenizer())
    template.takes_tools = True
    use = tool_use(body, parser, template)
    assert use is not None and use.json_schema is None
    return use


@lru_cache
def grammar(parser: str) -> Grammar:
    tag = use_of(parser, TOOLS).structural_tag
    assert tag is not None
    vocabulary = Vocabulary.from_tokenizer(tokenizer(), 2176, (2,))
    constraint = Constraint(ConstraintKind.STRUCTURAL_TAG, prepare_structural_tag(tag))
    compiled = compile_constraint(make_compiler(vocabulary), constraint, any_whitespace=True)
    return Grammar(compiled, constraint.kind, vocabulary, GrammarLimits())


def may_end_with(parser: str, text: str) -> bool:
    """True if an output may be `text`."""
    matcher = grammar(parser).matcher()
    ids = tokenizer().encode(text, add_special_tokens=False)
    return all(map(matcher.accept_token, [*ids, 2])) and matcher.is_terminated()


@pytest.mark.parametrize("parser", WRITTEN)
@pytest.mark.parametrize(
    ("name", "arguments", "fits"),
    [
        ("go", '{"at": {"x": 3}, "tags": [1, 1]}', True),
        ("go", '{"at":{"x":-12},\n "tags":[]}', True),
        ("go", '{"at": {"x": "3"}, "tags": []}', False),
        ("go", '{"at": {"x": 3}}', False),
        ("go", '{"at": {"x": 3}, "tags": [], "more": 1}', False),
        ("go", "{}", False),
        ("say-it_2.0", '{"anything": [{"x": "3"}]}', True),
        ("say-it_2.0", '"x"', False),
        ("other", "{}", False),
    ],
)
def test_calls_of_strict_tools_fit(parser: str, name: str, arguments: str, fits: bool) -> None:
    call = WRITTEN[parser] % (name, arguments)
    for text in (
        SECTION[parser] + call,
        f"{{Let me see}} <b>\n\n{SECTION[parser]}{call}\n{call}",
        f"<think>So</think> then {SECTION[parser]}{call}",
    ):
        assert may_end_with(parser, text) is fits, text
        if fits:
            _, calls = make_call_parser(TOOLS, parser).parse_non_stream(text)
            assert {one.name for one in calls} == {name} and len(calls) == text.count(call)
            assert json.loads(calls[0].parameters) == json.loads(arguments)


@pytest.mark.parametrize("parser", WRITTEN)
def test_other_text_is_free_and_a_call_is_whole(parser: str) -> None:
    frame = TOOL_CALL_PARSERS[parser].call_frame
    assert frame is not None
    assert may_end_with(parser, '{"name": "go", "arguments": {}} <tool_response> é 漢')
    assert not may_end_with(parser, frame.begin)
    assert not may_end_with(parser, f"The marker is {frame.begin}.")
    call = WRITTEN[parser] % ("say-it_2.0", "{}")
    assert not may_end_with(parser, call.removesuffix(frame.end))


@pytest.mark.parametrize(
    "parser", [name for name, of in TOOL_CALL_PARSERS.items() if of.call_frame is None]
)
def test_other_formats_take_strict_tools_with_one_warning(
    parser: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert use_of(parser, TOOLS).structural_tag is None
    assert sum(f"--tool-call-parser {parser}." in line for line in caplog.messages) == 1


def test_without_strict_tools_nothing_is_constrained(caplog: pytest.LogCaptureFixture) -> None:
    wrong = tool("f", {"type": "object", "properties": {"x": []}}, strict=False)
    for parser in TOOL_CALL_PARSERS:
        assert use_of(parser, [wrong]).structural_tag is None
    assert not caplog.messages


def test_schemas_that_are_too_large_are_not_enforced(caplog: pytest.LogCaptureFixture) -> None:
    enum = {"type": "string", "enum": ["a" * 1000]}
    large = [
        tool(f"t{i}", {"type": "object", "properties": {"x": enum}}, strict=True) for i in range(70)
    ]
    assert use_of("qwen25", large).structural_tag is None
    assert f"larger than {MAX_CONSTRAINT_BYTES} bytes" in caplog.text
    tag = use_of("qwen25", large[:40]).structural_tag
    assert tag is not None and len(tag) <= MAX_CONSTRAINT_BYTES


TREE = {
    "type": "object",
    "properties": {"child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["child"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("names", [["go", "say", "tree"], ["go"], ["tree"]])
def test_calls_that_must_be_made_may_have_references(names: list[str]) -> None:
    tools = [
        tool("go", NESTED, strict=None),
        tool("say", POINT, strict=True),
        tool("tree", TREE, strict=True),
    ]
    some = [one for one in tools if one["function"]["name"] in names]
    body = ChatBody(messages=[], tools=msgspec.convert(some, list[Tool]), tool_choice="required")
    use = tool_use(body, None, ChatTemplate(tokenizer()))
    assert use is not None and use.json_schema is not None
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, prepare_json_schema(use.json_schema))
    vocabulary = Vocabulary.from_tokenizer(tokenizer(), 2176, (2,))
    compiled = compile_constraint(make_compiler(vocabulary), constraint, any_whitespace=True)
    made = Grammar(compiled, constraint.kind, vocabulary, GrammarLimits())
    for name, arguments, fits in (
        ("go", '{"at": {"x": 3}, "tags": [1]}', True),
        ("go", '{"at": {"x": "3"}, "tags": [1]}', False),
        ("go", '{"at": {}, "tags": [1]}', False),
        ("say", '{"x": 3}', True),
        ("say", '{"x": "3"}', False),
        ("tree", '{"child": {"child": null}}', True),
        ("tree", '{"child": {"name": "tree", "parameters": {}}}', False),
    ):
        matcher = made.matcher()
        text = f'{{"name": "{name}", "parameters": {arguments}}}'
        ids = tokenizer().encode(text, add_special_tokens=False)
        assert all(map(matcher.accept_token, [*ids, 2])) is (fits and name in names), text


def test_a_strict_schema_that_is_none_is_refused_by_name() -> None:
    wrong = tool("f", {"type": "object", "properties": {"x": []}}, strict=True)
    with pytest.raises(ApiError, match=r"tools\[0\].function.parameters: #/properties/x must be"):
        use_of("qwen25", [wrong])
