"""Parsers of calls between tags: what a call is, which types values get, any split of a stream."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rigs.written_calls import (
    ADD,
    SAY,
    TOOLS,
    WRITERS,
    Calls,
    bars,
    cut,
    deepseekv3,
    deepseekv31,
    deepseekv32,
    glm,
    kimi_k2,
    mistral_v11,
)
from sglang.srt.environ import envs
from sglang.srt.function_call.format_detector import FormatDetector, ToolCallItem, merge_calls
from sglang.srt.function_call.function_call_parser import make_call_parser
from sglang.srt.function_call.tagged_detectors import allowed_types, typed_value
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

FORMATS = pytest.mark.parametrize("name", list(WRITERS))


def parser_of(name: str) -> FormatDetector:
    return make_call_parser(TOOLS, name.split()[0])


def parse(name: str, text: str) -> tuple[str, Calls]:
    normal, calls = parser_of(name).parse_non_stream(text)
    assert [call.tool_index for call in calls] == list(range(len(calls)))
    return normal, [(call.name, json.loads(call.parameters)) for call in calls]


def stream(name: str, pieces: list[str]) -> tuple[str, list[ToolCallItem]]:
    parser = parser_of(name)
    results = [parser.parse_stream_increment(piece) for piece in pieces]
    results.append(parser.finish())
    calls = merge_calls([call for result in results for call in result.calls])
    return "".join(result.normal_text for result in results), calls


@FORMATS
def test_calls_are_found_between_text(name: str) -> None:
    text = "Sure. " + WRITERS[name](("add", ADD), ("say", SAY))
    calls: Calls = [("add", ADD), ("say", SAY)]
    assert parse(name, text) == ("Sure. ", calls)
    assert parse(name, text + "\n") == ("Sure. ", calls)
    assert parse(name, text + " bye") == ("Sure.  bye", calls)
    again = text + "\n" + WRITERS[name](("say", {}))
    assert parse(name, again) == ("Sure. ", [*calls, ("say", {})])


@pytest.mark.parametrize("name", [name for name in WRITERS if not name.startswith("glm")])
def test_the_end_of_the_section_may_be_missing(name: str) -> None:
    text = WRITERS[name](("say", SAY))
    dsml = {"deepseekv32": "</", "deepseekv4": "</"}
    end = dsml | {"qwen3_coder": "</", "mistral": "]", "mistral v11": "}"}
    shorter = text[: text.rindex(end.get(name, "<"))] + "}" * (name == "mistral v11")
    assert parse(name, shorter) == ("", [("say", SAY)])


@FORMATS
def test_unknown_tools_and_broken_calls_are_text(name: str) -> None:
    write = WRITERS[name]
    unknown, good = write(("rm", {"all": "yes"})), write(("say", SAY))
    assert parse(name, f"{unknown} and {good}") == (f"{unknown} and ", [("say", SAY)])
    for place in range(len(good) - 30):
        if "say" in good[place:] and good[place - 1 : place] == ">":
            broken = good[:place] + "?" + good[place:]
            normal, calls = parse(name, broken + good)
            assert calls[-1:] == [("say", SAY)]
            assert normal == broken or len(calls) == 2
    for end in range(1, good.index("say") + 6):
        assert parse(name, good[:end]) == (good[:end], [])


@FORMATS
def test_a_section_without_calls_is_text(name: str) -> None:
    text = WRITERS[name]() if name != "qwen3_coder" else "<tool_call>\n</tool_call>"
    assert parse(name, text + " x") == (text + " x", [])


@FORMATS
def test_unknown_tools_are_forwarded_on_request(name: str) -> None:
    text = WRITERS[name](("rm", {"all": "yes"}))
    with envs.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
        assert parse(name, text) == ("", [("rm", {"all": "yes"})])


@FORMATS
def test_a_stream_gives_a_call_when_it_is_complete(name: str) -> None:
    parser = parser_of(name)
    text = "Yes" + WRITERS[name](("say", SAY))
    sent = [parser.parse_stream_increment(char) for char in text]
    assert [result.normal_text for result in sent[:3]] == ["Y", "e", "s"]
    calls = [call for result in sent for call in result.calls]
    assert [(call.tool_index, call.name) for call in calls] == [(0, "say")]
    assert json.loads(calls[0].parameters) == SAY
    assert parser.finish().normal_text == ""


def fragments() -> list[str]:
    """Whole calls, and the pieces between their tags."""
    found = ["\n", " ", "hi", "<", "</", "```", '"', "{}", '{"a": 1}', "<function_calls>"]
    for write in WRITERS.values():
        text = write(("add", {"a": 1}), ("say", {"text": "b"}))
        found += [text, write(("rm", {})), text[: len(text) // 2], text[len(text) // 2 :]]
        ends = [i + 1 for i, char in enumerate(text) if char in ">]"]
        found += [text[a:b] for a, b in pairwise([0, *ends])]
    return sorted(set(found))


TEXTS = st.lists(st.sampled_from(fragments()), max_size=12).map("".join)


@FORMATS
@settings(max_examples=200, deadline=None)
@given(text=TEXTS, points=st.lists(st.integers(0, 2000), max_size=12))
def test_any_split_of_a_stream_gives_the_same(name: str, text: str, points: list[int]) -> None:
    whole = parser_of(name).parse_non_stream(text)
    assert stream(name, cut(text, points)) == whole
    assert stream(name, list(text)) == whole
    assert whole[1] or whole[0] == text
    for call in whole[1]:
        assert call.name in ("add", "say")
        assert isinstance(json.loads(call.parameters), dict)


@FORMATS
@given(text=st.text(max_size=60))
def test_text_without_a_marker_stays_unchanged(name: str, text: str) -> None:
    assert parse(name, "x" + text) == ("x" + text, [])


@pytest.mark.parametrize("name", ["deepseekv32", "deepseekv4"])
def test_dsml_tags_are_read_without_their_token(name: str) -> None:
    text = WRITERS[name](("add", ADD), ("say", SAY))
    assert parse(name, text.replace(bars("|DSML|"), "")) == (
        "",
        [("add", ADD), ("say", SAY)],
    )


@pytest.mark.parametrize(
    ("name", "other"), [("deepseekv4", "deepseekv32"), ("deepseekv32", "deepseekv4")]
)
def test_sections_of_another_deepseek_are_text(name: str, other: str) -> None:
    text = WRITERS[other](("say", SAY))
    assert parse(name, text) == (text, [])


def test_a_dsml_value_that_is_no_json_stays_text() -> None:
    text = deepseekv32(("say", {"x": 1})).replace(">1<", ">one<")
    assert parse("deepseekv32", text) == ("", [("say", {"x": "one"})])


@pytest.mark.parametrize("body", ["[1]", "{", '{"a": NaN}', "", "{" * 5000 + "}" * 5000])
def test_deepseek_arguments_that_are_no_object_are_text(body: str) -> None:
    text = deepseekv31(("say", {})).replace("{}", body)
    assert parse("deepseekv31", text) == (text, [])
    fenced = deepseekv3(("say", {})).replace("{}", body)
    assert parse("deepseekv3", fenced) == (fenced, [])


def test_deepseek_v3_arguments_need_their_fence() -> None:
    text = deepseekv3(("say", {})).replace("```json\n", "")
    assert parse("deepseekv3", text) == (text, [])


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("7", {"type": "integer"}, 7),
        (" 7\n", {"type": "integer"}, 7),
        ("7", {"type": "string"}, "7"),
        ("7", {}, "7"),
        ("seven", {"type": "integer"}, "seven"),
        ("7.5", {"type": "integer"}, "7.5"),
        ("7", {"type": "number"}, 7),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("1", {"type": "boolean"}, "1"),
        ("None", {"type": ["string", "null"]}, None),
        ("true", {"type": ["string", "null"]}, "true"),
        ('["x"]', {"anyOf": [{"type": "array"}, {"type": "string"}]}, ["x"]),
        ('{"x": 1}', {"$ref": "#/$defs/X"}, {"x": 1}),
        ("x", {"$ref": "#/$defs/X"}, "x"),
        ("2", {"enum": [1, 2]}, 2),
        ("NaN", {"type": "number"}, "NaN"),
        ("[" * 9000, {"type": "array"}, "[" * 9000),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
    ],
)
def test_schemas_type_plain_text(text: str, schema: dict[str, Any], value: object) -> None:
    got = typed_value(text, {"properties": {"p": schema}}, "p")
    assert got == value and type(got) is type(value)
    assert typed_value(text, {"properties": {}}, "p") == text
    assert typed_value(text, {"properties": 3}, "p") == text


@pytest.mark.parametrize("schema", [None, True, 3, {"type": 3}, {"anyOf": []}, {"anyOf": 1}])
def test_schemas_that_say_nothing_mean_strings(schema: object) -> None:
    assert allowed_types(schema) == {"string"}


def test_a_newline_at_each_end_of_a_value_belongs_to_the_tags() -> None:
    text = "<tool_call><function=say><parameter=text>\n\n x\n\n</parameter></function></tool_call>"
    assert parse("qwen3_coder", text) == ("", [("say", {"text": "\n x\n"})])
    assert parse("qwen3_coder", text.replace("\n", "")) == ("", [("say", {"text": " x"})])


def test_a_call_of_kimi_keeps_the_id_that_the_model_wrote() -> None:
    text = kimi_k2(("add", ADD), ("say", SAY))
    _, calls = make_call_parser(TOOLS, "kimi_k2").parse_non_stream(text)
    assert [call.id for call in calls] == ["functions.add:0", "functions.say:1"]
    _, bare = make_call_parser(TOOLS, "kimi_k2").parse_non_stream(text.replace("functions.", ""))
    assert [call.id for call in bare] == ["add:0", "say:1"]
    _, others = make_call_parser(TOOLS, "glm45").parse_non_stream(glm("\n", ("say", SAY)))
    assert [call.id for call in others] == [None]


def test_glm_values_have_the_types_of_the_schema() -> None:
    text = (
        "<tool_call>add<arg_key>a</arg_key><arg_value>7</arg_value>"
        "<arg_key>text</arg_key><arg_value>7</arg_value></tool_call>"
    )
    assert parse("glm47", text) == ("", [("add", {"a": 7, "text": "7"})])
    assert parse("glm45", "<tool_call>two words<arg_key>") == ("<tool_call>two words<arg_key>", [])


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS] [{"name": "rm", "arguments": {}}]',
        '[TOOL_CALLS] [{"name": "say", "arguments": 3}]',
        '[TOOL_CALLS] [{"name": "say"}]',
        "[TOOL_CALLS] [1]",
        "[TOOL_CALLS]rm[ARGS]{}",
        "[TOOL_CALLS]say[ARGS]3",
        '[TOOL_CALLS]say[ARGS]{"a": NaN}',
        "[TOOL_CALLS]say[ARGS]{",
        "[TOOL_CALLS]say",
    ],
)
def test_broken_calls_of_mistral_are_text(text: str) -> None:
    assert parse("mistral", text) == (text, [])
    good = mistral_v11(("say", SAY))
    if text.endswith(("]", "}", "3")):
        assert parse("mistral", text + good) == (text, [("say", SAY)])


def test_the_last_of_equal_parameters_counts() -> None:
    one = "<parameter=a>1</parameter>"
    text = f"<tool_call><function=add>{one}{one.replace('1', '2')}</function></tool_call>"
    assert parse("qwen3_coder", text) == ("", [("add", {"a": 2})])
