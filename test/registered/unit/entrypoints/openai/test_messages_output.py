"""Chat's deltas of gpt-oss's messages: in any pieces they add up to the whole message."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rigs.harmony_text import MARKS, NEXT, call, final, preamble, thought
from rigs.written_calls import TOOLS, cut
from sglang.srt.entrypoints.openai.chat_output import MessagesOutput
from sglang.srt.entrypoints.openai.output_blocks import Block, BlockKind, BlockStream, blocks_of
from sglang.srt.function_call.function_call_parser import make_call_parser, make_message_parser
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


def output(*, tools: Any = TOOLS, enforced: bool = False, streams: bool = True) -> MessagesOutput:
    return MessagesOutput(
        make_message_parser(() if enforced else tools, "", separates_reasoning=True),
        make_call_parser(tools, "llama3") if enforced else None,
        stream_reasoning=streams,
    )


def deltas_of(pieces: list[str], **settings: bool) -> list[dict[str, Any]]:
    made = output(**settings)
    return [delta for piece in pieces for delta in made.feed(piece)] + made.finish()


Told = tuple[str, str, list[tuple[str, str]]]


def told(deltas: list[dict[str, Any]]) -> Told:
    """Reasoning, content, and calls."""
    calls: list[tuple[str, str]] = []
    for one in (one["function"] for delta in deltas for one in delta.get("tool_calls", ())):
        if "name" in one:
            calls.append((one["name"], ""))
        name, arguments = calls.pop()
        calls.append((name, arguments + one["arguments"]))
    names = ("reasoning_content", "content")
    reasoning, content = ("".join(delta.get(name) or "" for delta in deltas) for name in names)
    return reasoning, content.strip() if calls else content, calls


def whole(text: str, **settings: bool) -> Told:
    return told([output(**settings).message(text)])


FRAGMENTS = [
    *MARKS, NEXT, thought("hm"), preamble("Wait."), final("yes"), call("say", {"text": "a"}),
    call("add", {"a": 1}), call("rm", {}), "analysis", "final", "so", " ", "\n", "{", '"', "}",
    final('{"name": "say", "parameters": {"text": "b"}}'),
]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    points=st.lists(st.integers(0, 1000), max_size=10),
)
def test_any_pieces_add_up_to_the_whole_message(parts: list[str], points: list[int]) -> None:
    text = "".join(parts)
    for streams in (True, False):
        expected = whole(text, streams=streams)
        assert told(deltas_of(cut(text, points), streams=streams)) == expected
        assert told(deltas_of([*text], streams=streams)) == expected
    blocks = BlockStream()
    for _ in (*blocks.advance(deltas_of([*text])), *blocks.end()):
        pass
    assert facts(blocks.made) == facts(blocks_of(output().whole(text)))


def facts(blocks: list[Block]) -> list[tuple[BlockKind, str, str]]:
    return [(one.kind, one.name, one.text) for one in blocks]


def test_a_call_that_a_grammar_enforces_is_found_in_the_answer() -> None:
    text = thought("hm") + NEXT + final('{"name": "say", "parameters": {"text": "b"}}')
    expected = ("hm", "", [("say", '{"text": "b"}')])
    assert whole(text, enforced=True) == told(deltas_of([*text], enforced=True)) == expected


def test_reasoning_is_held_until_another_part_comes() -> None:
    made = output(streams=False)
    assert made.feed("<|channel|>analysis<|message|>hm") == []
    assert made.feed("<|end|>" + NEXT) == []
    assert made.feed("<|channel|>final<|message|>yes") == [
        {"reasoning_content": "hm"},
        {"content": "yes"},
    ]
    [call_delta] = output().feed(call("say", {"text": "a"}))
    assert json.loads(call_delta["tool_calls"][0]["function"]["arguments"]) == {"text": "a"}


def test_blocks_have_no_blank_lines_between_them() -> None:
    text = thought("a") + NEXT + preamble("b") + NEXT + thought("c") + NEXT + final("d")
    blocks = blocks_of(output().whole(text))
    assert [one.text for one in blocks] == ["a", "b", "c", "d"]
    assert whole(text) == ("a\n\nc", "b\n\nd", [])
