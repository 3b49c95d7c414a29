"""Tool-call parsers: the definition of a call, and equality of streams and whole outputs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rigs.written_calls import cut
from sglang.srt.environ import envs
from sglang.srt.function_call.format_detector import FormatDetector, ToolCallItem, merge_calls
from sglang.srt.function_call.function_call_parser import TOOL_CALL_PARSERS, make_call_parser
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "say")]
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}'
SAY = '{"name": "say", "parameters": {"text": "</tool_call>; \\" \\u00e9"}}'
FRAGMENTS = (
    "<tool_call>", "</tool_call>", "<|python_tag|>", "<tool", "<|pyt", ";", " ; ", "\n", " ", "hi",
    ADD, SAY, ADD[:30], SAY[:40], '{"name": "rm", "arguments": {}}', '{"name": "add"}', "{", "}",
    '"',     '{"arguments": {"x": 1}, "name": "add"}', '{"name": "add", "arguments": {"x": tru}}',
    '{"name": "add", "arguments": {"x": <}}', '{"name": "say", "arguments": {}, "id": 7}',
    '{"name": "say", "arguments": {"text": "a\nb\\d\\u12"}}', '\\', '\\u', "\t",
    '{"name": "add", "arguments": 3}', '{"name": "add", "arguments": {"x": [}}}',
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=9).map("".join)
FORMATS = pytest.mark.parametrize("name", ["qwen25", "llama3"])
"""Formats with the function's name inside the JSON object; others: `test_tagged_formats.py`."""


def parse(name: str, text: str) -> tuple[str, list[tuple[str | None, object]]]:
    normal, calls = make_call_parser(TOOLS, name).parse_non_stream(text)
    assert [call.tool_index for call in calls] == list(range(len(calls)))
    return normal, [(call.name, json.loads(call.parameters)) for call in calls]


def stream(name: str, pieces: list[str]) -> tuple[str, list[ToolCallItem], int]:
    detector: FormatDetector = TOOL_CALL_PARSERS[name](["add", "say"], {})
    results = [detector.parse_stream_increment(piece) for piece in pieces]
    results.append(detector.finish())
    calls = merge_calls([call for result in results for call in result.calls])
    return "".join(result.normal_text for result in results), calls, detector.num_cut


@FORMATS
@settings(max_examples=300, deadline=None)
@given(text=TEXTS, points=st.lists(st.integers(0, 2000), max_size=12))
def test_any_split_of_a_stream_gives_the_same(name: str, text: str, points: list[int]) -> None:
    whole = stream(name, [text])
    assert stream(name, cut(text, points)) == whole
    assert stream(name, list(text)) == whole
    normal, calls, num_cut = whole
    if num_cut == 0:
        assert make_call_parser(TOOLS, name).parse_non_stream(text) == (normal, calls)


@FORMATS
@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_whole_outputs_give_only_calls_that_a_client_can_run(name: str, text: str) -> None:
    """But for one that the end of the output breaks off."""
    _, calls = make_call_parser(TOOLS, name).parse_non_stream(text)
    assert [call.tool_index for call in calls] == list(range(len(calls)))
    assert {call.name for call in calls} <= {"add", "say"}
    for call in calls[:-1]:
        assert isinstance(json.loads(call.parameters), dict)


@FORMATS
@given(text=st.text(max_size=60))
def test_text_without_a_marker_stays_unchanged(name: str, text: str) -> None:
    assert parse(name, "x" + text) == ("x" + text, [])


def test_qwen_calls_are_found_between_text() -> None:
    text = f"Sure.\n<tool_call>\n{ADD}\n</tool_call>\n<tool_call>{SAY}</tool_call>"
    normal, calls = parse("qwen25", text)
    assert normal == "Sure.\n"
    assert calls == [
        ("add", {"a": 1, "b": [2, {"c": "}"}]}),
        ("say", {"text": '</tool_call>; " é'}),
    ]
    assert parse("qwen", text) == (normal, calls)
    assert parse("qwen25", f"<tool_call>{ADD}") == ("", calls[:1])
    assert parse("qwen25", f"<tool_call>{ADD}</tool_call> bye") == (" bye", calls[:1])


@pytest.mark.parametrize("start", ["<|python_tag|>", "", "\n "])
def test_llama_calls_are_found_after_the_marker_or_bare(start: str) -> None:
    assert parse("llama3", f"{start}{ADD}; {SAY}")[1] == [
        ("add", {"a": 1, "b": [2, {"c": "}"}]}),
        ("say", {"text": '</tool_call>; " é'}),
    ]


def test_llama_object_inside_text_is_text() -> None:
    assert parse("llama3", f"as in {ADD}") == (f"as in {ADD}", [])


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "rm", "arguments": {}}',
        '{"name": "add"}',
        '{"name": "add", "arguments": "{}"}',
        '{"name": "add", "arguments": {"a": tru}}',
        '{"name": "add", "arguments": {"a": 1',
        "{" * 3000 + "}" * 3000,
        "add(1, 2)",
        "",
    ],
)
def test_malformed_and_unknown_calls_are_text(body: str) -> None:
    text = f"<tool_call>{body}</tool_call> and <tool_call>{ADD}</tool_call>"
    normal, calls = parse("qwen25", text)
    assert normal == f"<tool_call>{body}</tool_call> and "
    assert [call[0] for call in calls] == ["add"]


def test_arguments_are_streamed_in_pieces() -> None:
    detector = TOOL_CALL_PARSERS["qwen25"](["say"], {})
    head = detector.parse_stream_increment('<tool_call>{"name": "say", "arguments": {')
    assert head.calls == [ToolCallItem(0, "say", ""), ToolCallItem(0, None, "{")]
    assert detector.parse_stream_increment('"text": "a').calls == [
        ToolCallItem(0, None, '"text": "a')
    ]
    assert detector.parse_stream_increment('b"}').calls == [ToolCallItem(0, None, 'b"}')]
    assert detector.parse_stream_increment("}</tool_call>").calls == []


def test_a_committed_call_that_breaks_is_cut_short() -> None:
    normal, calls, num_cut = stream(
        "qwen25", ['<tool_call>{"name": "add", "arguments": {"a": 1<oops']
    )
    assert (normal, num_cut) == ("<oops", 1)
    assert calls == [ToolCallItem(0, "add", '{"a": 1')]


@FORMATS
def test_calls_of_unknown_tools_are_forwarded_on_request(name: str) -> None:
    marker = "<tool_call>" if name == "qwen25" else "<|python_tag|>"
    text = marker + '{"name": "rm", "arguments": {"all": true}}'
    assert parse(name, text) == (text, [])
    with envs.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
        assert parse(name, text) == ("", [("rm", {"all": True})])
        parser = make_call_parser(TOOLS, name)
        pieces = [call for c in text for call in parser.parse_stream_increment(c).calls]
        assert merge_calls(pieces) == [ToolCallItem(0, "rm", '{"all": true}')]
        nameless = marker + '{"name": "", "arguments": {}}'
        assert parse(name, nameless) == (nameless, [])
