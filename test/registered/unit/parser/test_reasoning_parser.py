"""Reasoning parser: the end of the reasoning, and equality of streams and whole outputs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.parser.reasoning_parser import (
    REASONING_PARSERS,
    ReasoningParser,
    opened_reasoning,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

FRAGMENTS = ("<think>", "</think>", "<thi", "</th", "<", " ", "\n", "\n\n", "so", "answer")
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)
BEGIN_INSIDE = {"deepseek-r1", "minimax", "nano_v3", "nemotron_3", "qwen3-thinking", "step3"}
BEGIN_OUTSIDE = {"deepseek-v3", "deepseek-v4", "glm45", "interns1", "kimi_k2", "mimo", "qwen3"}
NAMES = pytest.mark.parametrize("name", ["qwen3", "deepseek-r1"])


def stream(name: str, pieces: list[str]) -> tuple[str, str]:
    parser = ReasoningParser(name)
    results = [parser.parse_stream_increment(piece) for piece in pieces]
    results.append(parser.finish())
    return (
        "".join(result.reasoning_text for result in results),
        "".join(result.normal_text for result in results),
    )


@NAMES
@settings(max_examples=300, deadline=None)
@given(text=TEXTS, points=st.lists(st.integers(0, 100), max_size=6))
def test_any_split_gives_the_same(name: str, text: str, points: list[int]) -> None:
    whole = ReasoningParser(name).parse_non_stream(text)
    bounds = [0, *sorted(point % (len(text) + 1) for point in points), len(text)]
    assert stream(name, [text[a:b] for a, b in pairwise(bounds)]) == whole
    assert stream(name, list(text)) == whole


@NAMES
@pytest.mark.parametrize(
    ("text", "reasoning", "normal"),
    [
        ("<think>\nso it is\n</think>\n\nyes", "so it is", "yes"),
        ("<think></think>yes", "", "yes"),
        ("\n<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        ("<think>cut off </thin", "cut off </thin", ""),
        ("<think>1 < 2</think>", "1 < 2", ""),
    ],
)
def test_marked_reasoning_is_split(name: str, text: str, reasoning: str, normal: str) -> None:
    assert ReasoningParser(name).parse_non_stream(text) == (reasoning, normal)


def test_unmarked_start_depends_on_the_model() -> None:
    text = "so it is</think>yes"
    for name in BEGIN_OUTSIDE:
        assert ReasoningParser(name).parse_non_stream(text) == ("", text)
    for name in BEGIN_INSIDE:
        assert ReasoningParser(name).parse_non_stream(text) == ("so it is", "yes")
    assert set(REASONING_PARSERS) == BEGIN_INSIDE | BEGIN_OUTSIDE


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("user:hi|<think>\n", True),
        ("user:hi|<think>\n\n</think>\n\n", False),
        ("what is <think>?|assistant:", None),
        ("", None),
    ],
)
def test_the_prompt_may_decide_whether_the_output_begins_inside(
    prompt: str, opened: bool | None
) -> None:
    """Templates of models with optional reasoning open or close it in the prompt."""
    assert opened_reasoning(prompt) is opened
    text = "so it is</think>yes"
    for name in BEGIN_INSIDE | BEGIN_OUTSIDE:
        inside = name in BEGIN_INSIDE if opened is None else opened
        want = ("so it is", "yes") if inside else ("", text)
        assert ReasoningParser(name, begins_inside=opened).parse_non_stream(text) == want
        assert ReasoningParser(name, begins_inside=opened).parse_non_stream(
            "<think>so</think>yes"
        ) == ("so", "yes"), "a model that repeats the marker"


def test_reasoning_is_streamed_in_pieces() -> None:
    parser = ReasoningParser("qwen3")
    assert parser.parse_stream_increment("<think>one").reasoning_text == "one"
    assert parser.parse_stream_increment(" two </thi").reasoning_text == " two"
    assert parser.parse_stream_increment("nk>three").normal_text == "three"
