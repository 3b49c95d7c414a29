"""Calls with mistakes of models that leave no doubt: end tags that are missing, tags inside values,
JSON strings with line breaks. Whole outputs and streams agree."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rigs.written_calls import ALL_WRITERS, TOOLS, WRITERS, bars, cut
from sglang.srt.function_call.format_detector import merge_calls
from sglang.srt.function_call.function_call_parser import make_call_parser
from sglang.srt.function_call.json_text import valid_json
from sglang.srt.function_call.tagged_detectors import typed_value
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

ONE, TWO = ("add", {"a": 1, "text": "x"}), ("say", {"text": "y"})
Calls = list[tuple[str | None, dict[str, Any]]]
TAGS = {
    "qwen3_coder": ("</parameter>", "</function>", "</tool_call>"),
    **{
        name: tuple(map(bars, ("</|DSML|parameter>", "</|DSML|invoke>", f"</|DSML|{section}>")))
        for name, section in (("deepseekv32", "function_calls"), ("deepseekv4", "tool_calls"))
    },
    "glm45": ("</arg_value>", "</tool_call>", "</tool_call>"),
    "glm47": ("</arg_value>", "</tool_call>", "</tool_call>"),
    "minimax-m2": ("</parameter>", "</invoke>", "</minimax:tool_call>"),
}
"""End tags of a value, of a call, and of a section of calls."""
PARAMETERS = pytest.mark.parametrize("name", list(TAGS))
JSON = pytest.mark.parametrize("name", [name for name in ALL_WRITERS if name not in TAGS])


def parse(name: str, text: str) -> tuple[str, Calls]:
    """Text and calls of a whole output. A stream of its characters gives the same."""
    normal, calls = make_call_parser(TOOLS, name.split()[0]).parse_non_stream(text)
    parser = make_call_parser(TOOLS, name.split()[0])
    results = [parser.parse_stream_increment(char) for char in text] + [parser.finish()]
    assert "".join(result.normal_text for result in results) == normal
    assert merge_calls([call for result in results for call in result.calls]) == calls
    return normal, [(call.name, json.loads(call.parameters)) for call in calls]


@PARAMETERS
def test_a_value_without_its_end_tag_ends_at_the_next_parameter(name: str) -> None:
    text = WRITERS[name](ONE, TWO)
    assert parse(name, text.replace(TAGS[name][0], "", 1)) == ("", [ONE, TWO])


@PARAMETERS
def test_a_last_value_without_its_end_tag_ends_with_its_call(name: str) -> None:
    first, second = WRITERS[name](ONE), WRITERS[name](TWO)
    broken = "".join(first.rsplit(TAGS[name][0], 1))
    assert parse(name, f"{broken}\n{second}") == ("", [ONE, TWO])
    assert parse(name, broken) == ("", [ONE])
    both = first.replace(TAGS[name][0], "")
    assert parse(name, both + second) == ("", [ONE, TWO])


@PARAMETERS
def test_the_first_of_two_calls_in_a_section_may_lack_an_end_tag(name: str) -> None:
    text = WRITERS[name](TWO, ONE).replace(TAGS[name][0], "", 1)
    assert parse(name, text) == ("", [TWO, ONE])


@PARAMETERS
def test_only_the_end_of_the_output_follows(name: str) -> None:
    _, end_of_call, _ = TAGS[name]
    text = WRITERS[name](TWO).replace(TAGS[name][0], "")
    text = text[: text.index(end_of_call) + len(end_of_call)]
    assert parse(name, text) == ("", [TWO])
    assert parse(name, text + "\n") == ("", [TWO])


@PARAMETERS
def test_tags_inside_a_value_are_text(name: str) -> None:
    value, call, section = TAGS[name]
    for tag, more in product((value, call, section), (" x", "\n\nx", "", "<b>")):
        if more or tag not in (value, call):
            said = {"text": f"a {tag}{more} b"}
            assert parse(name, WRITERS[name](("say", said))) == ("", [("say", said)])
    written = WRITERS[name](("add", {"other": "1"}))
    begin = written.index(written.split("other")[0][-15:])
    said = {"text": f"a {written[begin : written.index('1')]} b"}
    assert parse(name, WRITERS[name](("add", {**said, "a": 1}))) == (
        "",
        [("add", {**said, "a": 1})],
    )


def test_a_parameter_of_the_tool_inside_a_value_ends_it() -> None:
    text = "<tool_call><function=add><parameter=text>x <parameter=a>1</parameter></function>"
    assert parse("qwen3_coder", text) == ("", [("add", {"text": "x", "a": 1})])
    text = text.replace("=a>", "=other>")
    assert parse("qwen3_coder", text) == ("", [("add", {"text": "x <parameter=other>1"})])
    # `say` has no schema, so any parameter may be its own.
    text = text.replace("=add>", "=say>")
    assert parse("qwen3_coder", text) == ("", [("say", {"text": "x", "other": "1"})])


def test_a_call_of_qwen3_coder_may_lack_its_end_tag() -> None:
    text = WRITERS["qwen3_coder"](ONE, TWO).replace("</function>\n", "")
    assert parse("qwen3_coder", text) == ("", [ONE, TWO])


def test_a_value_that_nothing_ends_is_text() -> None:
    for text in (
        "<tool_call><function=say><parameter=text>x",
        "<tool_call><function=say><parameter=text>x</parameter>",
        "<tool_call><function=say><parameter=text>x</func",
        "<tool_call><function=say><parameter=text>x</function> and so on",
    ):
        assert parse("qwen3_coder", text) == (text, [])


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("kimi_k2", "<|tool_call_end|>"),
        ("deepseekv3", bars("<|tool▁call▁end|>")),
        ("deepseekv31", bars("<|tool▁call▁end|>")),
    ],
)
def test_an_object_without_its_end_marker_ends_where_it_is_whole(name: str, end: str) -> None:
    text = WRITERS[name](ONE, TWO)
    assert parse(name, text.replace(end, "")) == ("", [ONE, TWO])
    whole = text[: text.rindex(end)]
    assert parse(name, whole) == ("", [ONE, TWO])
    assert parse(name, whole[:-6])[1] == [ONE]


@JSON
@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("a\nb", "a\nb"),
        ("\ta\r\n\x00\x1fb", "\ta\r\n\x00\x1fb"),
        (r"\d+\.\\", "\\d+\\.\\"),
        (r"\u12", r"\u12"),
        (r"\u12\n\ux\"", '\\u12\n\\ux"'),
        (r"\u00e9\/", "é/"),
        ("\\\n", "\\\n"),
        ("\\u00\n\\\\", "\\u00\n\\"),
    ],
)
def test_strings_become_json(name: str, written: str, value: str) -> None:
    text = ALL_WRITERS[name](("say", {"text": "@", "b": [{"c": "@"}]}), TWO)
    said = {"text": value, "b": [{"c": value}]}
    assert parse(name, text.replace("@", written)) == ("", [("say", said), TWO])


def test_values_with_the_types_of_a_schema_are_mended() -> None:
    schema = {"properties": {"p": {"type": "array"}}}
    assert typed_value('["a\nb", "\\d"]', schema, "p") == ["a\nb", "\\d"]
    assert typed_value('["a\nb"], []', schema, "p") == '["a\nb"], []'


def test_a_stream_holds_back_an_escape_that_is_not_complete() -> None:
    parser = make_call_parser(TOOLS, "qwen25")
    head = '<tool_call>{"name": "say", "arguments": {"text": "'
    parser.parse_stream_increment(head)
    sent = [
        "".join(call.parameters for call in parser.parse_stream_increment(piece).calls)
        for piece in ("a\n", "\\", "d", "\\u0", "0e", "9", '"}')
    ]
    assert sent == ["a\\n", "", "\\\\d", "", "", "\\u00e9", '"}']


@settings(max_examples=200, deadline=None)
@given(value=st.recursive(st.text() | st.integers() | st.none(), st.lists, max_leaves=5))
def test_json_stays_as_it_is(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert valid_json(text) == (text, value)
        raw = text.replace("\\n", "\n").replace("\\t", "\t")
        if "\\\n" not in raw and "\\\t" not in raw:
            assert valid_json(raw)[1] == value


PIECES = [
    "x",
    " ",
    "\n",
    "</",
    "<",
    ">",
    "{",
    '"',
    "1",
    "<parameter=",
    "<parameter=a>",
    "<arg_key>",
]
PIECES += ["<arg_key>a</arg_key>", "<tool_call>", "<function=add>"]
PIECES += sorted({tag for tags in TAGS.values() for tag in tags})
VALUES = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)


@PARAMETERS
@settings(max_examples=100, deadline=None)
@given(values=st.lists(VALUES, min_size=1, max_size=3), data=st.data())
def test_random_values_and_lost_tags_give_the_same_in_any_pieces(
    name: str, values: list[str], data: st.DataObject
) -> None:
    calls = [("say", {"text": value, "a": "1"}) for value in values]
    text = WRITERS[name](*calls)
    for tag in data.draw(st.lists(st.sampled_from(TAGS[name]), max_size=2)):
        text = text.replace(tag, "", 1)
    whole = make_call_parser(TOOLS, name).parse_non_stream(text)
    for pieces in (list(text), cut(text, data.draw(st.lists(st.integers(0, 999), max_size=9)))):
        parser = make_call_parser(TOOLS, name)
        results = [parser.parse_stream_increment(piece) for piece in pieces] + [parser.finish()]
        normal = "".join(result.normal_text for result in results)
        assert (normal, merge_calls([c for result in results for c in result.calls])) == whole
