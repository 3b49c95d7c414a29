"""Outputs that a limit cuts: the part of a marker at their end is shown nowhere, in streams and
whole. It is text where the model ended the output, or where other text follows."""

from __future__ import annotations

import json

import pytest

from rigs.harmony_text import NEXT, final, gpt_oss, thought
from rigs.written_calls import ADD, ALL_WRITERS, SAY, TOOLS
from rigs.written_calls import WRITERS as TAGGED
from sglang.srt.function_call.format_detector import FormatDetector, ToolCallItem, merge_calls
from sglang.srt.function_call.function_call_parser import make_call_parser
from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

WRITERS = ALL_WRITERS | {"gpt-oss": gpt_oss}
FORMATS = pytest.mark.parametrize("name", list(WRITERS))


def parser_of(name: str) -> FormatDetector:
    return make_call_parser(TOOLS, name.split()[0])


def text_of(name: str, output: str, *, is_cut: bool) -> str:
    """The normal text. It and the calls are the same whole, by characters, and in one piece."""
    whole = parser_of(name).parse_non_stream(output, is_cut=is_cut)
    for pieces in (list(output), [output]):
        parser = parser_of(name)
        results = [*map(parser.parse_stream_increment, pieces), parser.finish(is_cut=is_cut)]
        calls = merge_calls([call for result in results for call in result.calls])
        assert ("".join(result.normal_text for result in results), calls) == whole
    return whole[0]


def markers_of(name: str) -> tuple[str, ...]:
    return ("<|channel|>", "<|message|>") if name == "gpt-oss" else parser_of(name).start_markers


@FORMATS
def test_a_marker_that_begins_at_a_cut_end_is_no_text(name: str) -> None:
    before = final("so ", "") if name == "gpt-oss" else "so "
    for marker in markers_of(name):
        for length in range(1, len(marker)):
            begun = marker[:length]
            assert text_of(name, before + begun, is_cut=True) == "so "
            assert text_of(name, before + begun, is_cut=False) == f"so {begun}"
            assert text_of(name, f"{before}{begun}~", is_cut=True) == f"so {begun}~"


@FORMATS
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_stream_gives_what_the_whole_output_gives_wherever_it_ends(
    name: str, is_cut: bool
) -> None:
    written = WRITERS[name](("add", ADD))
    for output in (f"so {written}\n so", WRITERS[name](("add", ADD), ("say", SAY))):
        for end in range(len(output) + 1):
            text_of(name, output[:end], is_cut=is_cut)


@pytest.mark.parametrize("name", ["qwen25", "llama3"])
def test_a_call_that_the_end_breaks_off_has_the_arguments_so_far(name: str) -> None:
    """A stream has sent them already."""
    written = WRITERS[name](("add", ADD))
    arguments = json.dumps(ADD)
    begin = written.index(arguments)
    for end in range(begin + 1, len(written)):
        for is_cut in (True, False):
            text, [call] = parser_of(name).parse_non_stream(written[:end], is_cut=is_cut)
            assert call == ToolCallItem(0, "add", written[begin:end][: len(arguments)])
            assert not text or not is_cut
    text, calls = parser_of(name).parse_non_stream(written[:begin])
    assert (text, calls) == (written[:begin], [])


@FORMATS
def test_behind_a_call_a_marker_is_shown_whole_or_not_at_all(name: str) -> None:
    """A second call that breaks off is text, from the whole marker at its begin on."""
    one = WRITERS[name](("add", ADD))
    for output in (one, WRITERS[name](("add", ADD), ("say", SAY))) if name in TAGGED else (one,):
        for end in range(len(output)):
            parser = parser_of(name)
            if not parser.parse_non_stream(output[:end], is_cut=True)[1]:
                continue
            text = text_of(name, output[:end], is_cut=True)
            begins = (*parser.start_markers, *getattr(parser, "after_calls", ()), ",")
            assert not text or text.strip().startswith(begins)


def test_the_separator_of_calls_is_no_text_where_it_is_cut() -> None:
    for name, behind in (("qwen25", "\n</tool_"), ("llama3", "; "), ("llama3", ";<|pyth")):
        output = '<tool_call>{"name": "say", "arguments": {}}'
        output = output.removeprefix("<tool_call>" if name == "llama3" else "") + behind
        assert text_of(name, output, is_cut=True) == ""
        assert text_of(name, output, is_cut=False) == behind


def test_the_end_of_a_reasoning_behind_its_call_is_no_text_where_it_is_cut() -> None:
    for name in ("qwen25", "glm45"):
        parser = parser_of(name)
        parser.end_of_reasoning = "</think>"
        output = WRITERS[name](("say", {})) + "\n</thi"
        assert parser.parse_non_stream(output, is_cut=True)[0] == ""
        assert parser.parse_non_stream(output)[0].strip() == "</thi"


def test_marks_of_messages_that_are_cut_are_shown_nowhere() -> None:
    for output, shown in (
        ("<|chan", ""),
        (f"{thought('a')}{NEXT}<|channel|>final<|mess", "a"),
        (f"{thought('a')}<|sta", "a"),
        (final("b", "<|retu"), "b"),
        (final("b", "<|reserved_12"), "b"),
    ):
        assert text_of("gpt-oss", output, is_cut=True) == shown


@pytest.mark.parametrize(
    ("output", "reasoning", "normal"),
    [
        ("<think>so </thi", "so", ""),
        ("<think>so<", "so", ""),
        ("\n<thi", "", "\n"),
        ("<think>a</think>b </thi", "a", "b </thi"),
        ("<think>1 < 2", "1 < 2", ""),
        ("<think>so <tool_ca", "so", ""),
    ],
)
def test_reasoning_that_is_cut_in_a_marker(output: str, reasoning: str, normal: str) -> None:
    def made() -> ReasoningParser:
        return ReasoningParser("qwen3", find_calls=lambda: parser_of("qwen25"))

    assert made().parse_non_stream(output, is_cut=True) == (reasoning, normal)
    stream = made()
    parts = [*map(stream.parse_stream_increment, output), stream.finish(is_cut=True)]
    assert "".join(one.reasoning_text for one in parts) == reasoning
    assert "".join(one.normal_text for one in parts) == normal
    reasoning, normal = made().parse_non_stream(output)
    assert output.replace("<think>", "").replace("</think>", "") in (reasoning + normal, output)
