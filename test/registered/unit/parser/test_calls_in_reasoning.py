"""Calls inside a reasoning that was not closed: every format of calls with every reasoning parser,
whole and in any pieces."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rigs.written_calls import ADD, ALL_WRITERS, SAY, TOOLS, cut
from sglang.srt.entrypoints.openai.chat_output import ChatOutput
from sglang.srt.environ import envs
from sglang.srt.function_call.function_call_parser import TOOL_CALL_PARSERS, make_call_parser
from sglang.srt.parser.reasoning_parser import REASONING_PARSERS, ReasoningParser
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

FORMATS = pytest.mark.parametrize("name", list(ALL_WRITERS))
Message = tuple[str, str, list[tuple[str, Any]]]
"""Reasoning, content and calls: name and arguments."""


def new_output(name: str, reasoning: str = "qwen3", *, streams: bool = True) -> ChatOutput:
    find_calls = partial(make_call_parser, TOOLS, name.split()[0])
    parser = ReasoningParser(reasoning, find_calls=find_calls)
    return ChatOutput(parser, find_calls(), stream_reasoning=streams)


def whole(name: str, text: str, reasoning: str = "qwen3") -> Message:
    output = new_output(name, reasoning)
    message = output.message(text)
    calls = [one["function"] for one in message.get("tool_calls", ())]
    assert output.has_calls == bool(calls)
    return (
        message["reasoning_content"] or "",
        message["content"] or "",
        [(one["name"], json.loads(one["arguments"])) for one in calls],
    )


def stream(name: str, pieces: list[str]) -> Message:
    reasoning, content, calls = raw_stream(name, pieces)
    return reasoning, content, [(tool, json.loads(arguments)) for tool, arguments in calls]


def raw_stream(name: str, pieces: list[str], *, streams: bool = True) -> Message:
    """The arguments are text, which is no JSON if a call broke after a part of it was sent."""
    output = new_output(name, streams=streams)
    deltas = [delta for piece in pieces for delta in output.feed(piece)] + output.finish()
    calls: dict[int, dict[str, str]] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        into = calls.setdefault(call["index"], {"name": "", "arguments": ""})
        for key, value in call["function"].items():
            into[key] += value
    if not streams:
        assert sum("reasoning_content" in delta for delta in deltas) <= 1
    content = "".join(delta.get("content", "") for delta in deltas)
    return (
        "".join(delta.get("reasoning_content", "") for delta in deltas),
        content.strip() if calls else content,
        [(one["name"], one["arguments"]) for one in calls.values()],
    )


def test_all_formats_have_a_writer() -> None:
    assert {name.split()[0] for name in ALL_WRITERS} == TOOL_CALL_PARSERS.keys() - {
        "qwen",
        "hermes",
        "glm",
        "gpt-oss",  # Its parser reads the reasoning, too.
    }


@FORMATS
@pytest.mark.parametrize("reasoning", list(REASONING_PARSERS))
def test_a_call_ends_a_reasoning_that_was_not_closed(name: str, reasoning: str) -> None:
    call = ALL_WRITERS[name](("add", ADD), ("say", SAY))
    calls = [("add", ADD), ("say", SAY)]
    assert whole(name, f"<think>\nneed it\n{call}", reasoning) == ("need it", "", calls)
    assert whole(name, f"<think>{call}", reasoning) == ("", "", calls)
    assert whole(name, f"<think>so</think>\n{call}", reasoning) == ("so", "", calls)
    begins_inside = REASONING_PARSERS[reasoning]
    expected = ("need it", "") if begins_inside else ("", "need it")
    assert whole(name, f"need it {call}", reasoning) == (*expected, calls)


@FORMATS
def test_the_reasoning_streams_up_to_the_call(name: str) -> None:
    output = new_output(name)
    call = ALL_WRITERS[name](("say", SAY))
    assert output.feed("<think>need it \n") == [{"reasoning_content": "need it"}]
    deltas = [delta for char in call for delta in output.feed(char)] + output.finish()
    assert all(delta.keys() == {"tool_calls"} for delta in deltas)
    assert output.has_calls


@FORMATS
def test_prose_that_names_a_marker_does_not_end_the_reasoning(name: str) -> None:
    call, marker = ALL_WRITERS[name](("say", SAY)), _marker(name)
    for prose in (
        f"so {marker} begins a call",
        f"so {marker}say comes first",
        f"so {marker} say is the tool",
        f"{marker}\n\n{marker}",
        ALL_WRITERS[name](("rm", {"all": "yes"})),
        call[: call.index("say") + 1],
    ):
        assert whole(name, f"<think>{prose}</think>\nyes") == (prose, "yes", [])
        assert whole(name, f"<think>{prose}") == (prose, "", [])
        assert whole(name, f"<think>{prose} {call}") == (prose, "", [("say", SAY)])


@FORMATS
def test_prose_behind_a_named_marker_is_streamed(name: str) -> None:
    """A marker that is only mentioned holds the reasoning back for a few words."""
    output = new_output(name)
    output.feed(f"<think>so {_marker(name)} begins")
    assert output.feed(" a call and") != []


@FORMATS
def test_a_call_that_breaks_behind_its_head_is_content(name: str) -> None:
    if name in ("mistral", "qwen25", "llama3"):
        pytest.skip("mistral's list has no head; the others send a call before its end")
    call = ALL_WRITERS[name](("say", SAY))
    broken = call[: call.index("two")]
    assert whole(name, f"<think>so {broken}") == ("so", broken, [])


@FORMATS
def test_an_end_marker_behind_the_calls_is_no_text(name: str) -> None:
    call = ALL_WRITERS[name](("add", ADD))
    text = f"<think>so {call}\n</think>\n"
    assert whole(name, text) == stream(name, list(text)) == ("so", "", [("add", ADD)])
    text = f"<think>so {call}</think>yes</think>"
    assert whole(name, text) == stream(name, list(text)) == ("so", "yes</think>", [("add", ADD)])
    closed = f"<think>so</think>{call}</think>"
    assert whole(name, closed) == ("so", "</think>", [("add", ADD)])


@FORMATS
def test_an_end_marker_inside_an_argument_belongs_to_it(name: str) -> None:
    value = {"text": "a </think> b"}
    text = f"<think>so {ALL_WRITERS[name](('say', value))}"
    if name == "mistral":
        # Its list names the tool only where the object is complete.
        assert whole(name, text)[2] == []
    else:
        assert whole(name, text) == ("so", "", [("say", value)])


def test_a_call_whose_name_comes_last_ends_the_reasoning() -> None:
    text = '<think>so <tool_call>{"arguments": {}, "name": "say"}</tool_call>'
    assert whole("qwen25", text) == stream("qwen25", list(text)) == ("so", "", [("say", {})])


def test_unknown_tools_end_the_reasoning_where_they_are_forwarded() -> None:
    text = "<think>so <tool_call>rm\n</tool_call>"
    assert whole("glm45", text) == ("so <tool_call>rm\n</tool_call>", "", [])
    with envs.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
        assert whole("glm45", text) == ("so", "", [("rm", {})])


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("<think>so</think>yes", 17),
        ("<think>so", 9),
        ("<think>so <tool_call>say\n</tool_call></think>", 10),
        ("yes", None),
    ],
)
def test_the_end_of_the_reasoning_is_known(text: str, end: int | None) -> None:
    parser = ReasoningParser("glm45", find_calls=partial(make_call_parser, TOOLS, "glm45"))
    parser.parse_non_stream(text)
    assert parser.reasoning_end == (None if end == len(text) else end)


def _marker(name: str) -> str:
    return make_call_parser(TOOLS, name.split()[0]).start_markers[0]


def fragments(name: str) -> list[str]:
    """Whole calls, the pieces between their tags, and markers of reasoning."""
    text = ALL_WRITERS[name](("add", {"a": 1}), ("say", {"text": "b"}))
    ends = [i + 1 for i, char in enumerate(text) if char in ">]"]
    pieces = [text[a:b] for a, b in pairwise([0, *ends, len(text)])]
    others = [
        "<think>",
        "</think>",
        "</",
        "<",
        " ",
        "\n",
        "hi",
        "say",
        ALL_WRITERS[name](("rm", {})),
    ]
    return sorted({*pieces, *others, text, text[: len(text) // 2]})


@FORMATS
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_pieces_give_the_same(name: str, data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.sampled_from(fragments(name)), max_size=10))
    text = data.draw(st.sampled_from(["<think>", "<think>hm ", ""])) + "".join(parts)
    points = data.draw(st.lists(st.integers(0, 2000), max_size=12))
    message = raw_stream(name, [text])
    assert raw_stream(name, cut(text, points)) == message
    assert raw_stream(name, list(text)) == message
    assert raw_stream(name, list(text), streams=False) == message
    if all(_is_json(arguments) for _, arguments in message[2]):
        assert whole(name, text) == stream(name, [text])


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
