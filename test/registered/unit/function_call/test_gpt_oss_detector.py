"""Messages of gpt-oss: reasoning, text and calls, whole, by characters and by tokens; broken ones
lose no text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import groupby
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rigs.harmony_text import (
    MARKS,
    NEXT,
    call,
    final,
    gpt_oss,
    harmony_tokenizer,
    preamble,
    thought,
)
from rigs.written_calls import ADD, SAY, TOOLS, cut
from sglang.srt.environ import envs
from sglang.srt.function_call.function_call_parser import make_call_parser
from sglang.srt.function_call.gpt_oss_detector import (
    MAX_HEADER,
    GptOssDetector,
    Part,
    PartKind,
    begun_message,
    read_header,
)
from sglang.srt.function_call.json_text import JsonObjectScanner
from sglang.srt.managers.detokenizer.detokenizer_manager import make_decoder_factory
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

Shown = list[tuple[str, str]]
"""Kind and text of each run of parts of one kind; a call is a run by itself."""
PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"


def detector(prompt: str = PROMPT, *, separates: bool = True) -> GptOssDetector:
    made = GptOssDetector(["add", "say"], {}, separates_reasoning=separates)
    made.begin_with(begun_message(prompt))
    return made


def read(pieces: Iterable[str], prompt: str = PROMPT, *, separates: bool = True) -> Shown:
    made = detector(prompt, separates=separates)
    parts = [part for piece in pieces for part in made.take_parts(piece)] + made.last_parts()
    return shown(parts)


def shown(parts: list[Part]) -> Shown:
    runs: Shown = []
    for (kind, _), run in groupby(enumerate(parts), lambda one: _run_of(*one)):
        texts = [part for _, part in run]
        if kind == "call":
            [one] = texts
            runs.append((f"call {one.name}", one.text))
        else:
            runs.append((kind, "".join(one.text for one in texts)))
    return runs


def _run_of(index: int, part: Part) -> tuple[str, int]:
    return part.kind.value, index if part.kind is PartKind.CALL else -1


def by_tokens(text: str, skip: bool = False) -> list[str]:
    """The pieces of text that a stream of token ids gives."""
    tokenizer = harmony_tokenizer()
    decoder = make_decoder_factory(tokenizer)(skip)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) < len(text) or not any(mark in text for mark in MARKS)
    return [*(decoder.feed([one]) for one in ids), decoder.finish()]


ADDED, SAID = json.dumps(ADD), json.dumps(SAY)
CASES: dict[str, tuple[str, Shown]] = {
    "answer": (
        thought("hm é\n") + NEXT + final("yes"),
        [("reasoning", "hm é\n"), ("text", "yes")],
    ),
    "no reasoning": (final("yes"), [("text", "yes")]),
    "the stop token is left out": (final("yes", ""), [("text", "yes")]),
    "call": (
        thought("a") + NEXT + call("add", ADD),
        [("reasoning", "a"), ("call add", ADDED)],
    ),
    "call without its end": (call("say", SAY, ""), [("call say", SAID)]),
    "calls": (gpt_oss(("add", ADD), ("say", SAY)), [("call add", ADDED), ("call say", SAID)]),
    "recipient in the role": (
        thought("a") + f"{NEXT} to=functions.add<|channel|>commentary<|message|>{ADDED}<|call|>",
        [("reasoning", "a"), ("call add", ADDED)],
    ),
    "recipient first": (
        f" to=functions.add<|channel|>commentary json<|message|>{ADDED}<|call|>",
        [("call add", ADDED)],
    ),
    "recipient without a namespace": (
        f"<|channel|>commentary to=add<|message|>{ADDED}",
        [("call add", ADDED)],
    ),
    "call in the analysis": (
        f"<|channel|>analysis to=functions.add code<|message|>{ADDED}<|call|>",
        [("call add", ADDED)],
    ),
    "preamble": (
        thought("a") + NEXT + preamble("Wait.") + NEXT + thought("b") + NEXT + call("say", {}),
        [("reasoning", "a"), ("text", "Wait."), ("reasoning", "\n\nb"), ("call say", "{}")],
    ),
    "two finals": (final("a", "<|end|>") + NEXT + final("b"), [("text", "a\n\nb")]),
    "no start between": (thought("a") + final("b"), [("reasoning", "a"), ("text", "b")]),
    "no end": (
        f"<|channel|>analysis<|message|>a{NEXT}<|channel|>final<|message|>b",
        [("reasoning", "a"), ("text", "b")],
    ),
    "neither end nor start": (
        "<|channel|>analysis<|message|>a<|channel|>final<|message|>b",
        [("reasoning", "a"), ("text", "b")],
    ),
    "cut reasoning": ("<|channel|>analysis<|message|>a", [("reasoning", "a")]),
    "cut header": (thought("a") + NEXT + "<|channel|>fin", [("reasoning", "a")]),
    "cut mark": (
        f"{thought('a')}{NEXT}<|channel|>final<|mess",
        [("reasoning", "a"), ("text", "<|mess")],
    ),
    "cut recipient": (
        thought("a") + NEXT + "<|channel|>commentary to=functions.ad",
        [("reasoning", "a")],
    ),
    "cut role": (thought("a") + "<|start|>assis", [("reasoning", "a")]),
    "no channel": ("<|message|>yes<|end|>", [("text", "yes")]),
    "no messages": ("yes <b>no</b>", [("text", "yes <b>no</b>")]),
    "text that begins as a mark does": ("<|yes|> no", [("text", "<|yes|> no")]),
    "unknown channel": ("<|channel|>poem<|message|>yes", [("text", "poem\nyes")]),
    "unknown role": (
        thought("a") + "<|start|>king<|channel|>final<|message|>yes",
        [("reasoning", "a"), ("text", "king final\nyes")],
    ),
    "text between messages": (
        thought("a") + "\n so " + NEXT + final("b"),
        [("reasoning", "a"), ("text", "so \n\nb")],
    ),
    "unknown tool": (
        call("rm", {"all": 1}),
        [("text", 'commentary to=functions.rm json\n{"all": 1}')],
    ),
    "another namespace": (
        "<|channel|>commentary to=browser.add<|message|>{}",
        [("text", "commentary to=browser.add\n{}")],
    ),
    "broken arguments": (
        call("add", '{"a": x}') + NEXT + call("say", SAY),
        [("text", 'commentary to=functions.add json\n{"a": x}'), ("call say", SAID)],
    ),
    "no arguments": (
        call("add", "") + NEXT + final("b"),
        [("text", "commentary to=functions.add json\n\n\nb")],
    ),
    "cut arguments": (
        call("add", '{"a": "x', ""),
        [("text", 'commentary to=functions.add json\n{"a": "x')],
    ),
    "unclosed arguments": (
        call("add", '{"a": "x') + NEXT + call("say", SAY),
        [("text", 'commentary to=functions.add json\n{"a": "x'), ("call say", SAID)],
    ),
    "unclosed arguments twice": (
        (call("add", '{"a": "x') + NEXT) * 2 + call("say", SAY),
        [
            ("text", '\n\n'.join(['commentary to=functions.add json\n{"a": "x'] * 2)),
            ("call say", SAID),
        ],
    ),
    "text behind arguments": (call("say", "{} so"), [("call say", "{}"), ("text", "so")]),
    "marks in arguments": (
        call("say", {"text": f"a{NEXT}<|message|>b<|call|>c"}) + NEXT + call("add", ADD),
        [
            ("call say", json.dumps({"text": f"a{NEXT}<|message|>b<|call|>c"})),
            ("call add", ADDED),
        ],
    ),
    "raw line breaks in arguments": (
        call("say", '{"text": "a\nb"}'),
        [("call say", '{"text": "a\\nb"}')],
    ),
    "marks in a text": (
        final("a<|message|>b<|constrain|>c<|startoftext|>d<|reserved_200013|>e"),
        [("text", "abcde")],
    ),
    "blanks in a header": (
        "<|channel|> final  <|constrain|> json <|message|>{}",
        [("text", "{}")],
    ),
    "nothing": ("", []),
    "marks alone": ("<|end|><|start|><|start|>assistant<|message|><|return|>", []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_messages_are_read_whole_by_characters_and_by_tokens(case: str) -> None:
    text, expected = CASES[case]
    assert read([text]) == expected
    assert read(text) == expected
    assert read(by_tokens(text)) == expected


@pytest.mark.parametrize("case", CASES)
def test_reasoning_that_is_not_separated_is_text(case: str) -> None:
    text, expected = CASES[case]
    got = read([text], separates=False)
    assert not any(kind == "reasoning" for kind, _ in got)
    assert [one for one in got if one[0].startswith("call")] == [
        one for one in expected if one[0].startswith("call")
    ]
    words = "".join(text for _, text in got)
    assert [*"".join(words.split())] == [*"".join("".join(text for _, text in expected).split())]


def test_texts_of_several_messages_are_kept_apart() -> None:
    text = thought("a") + NEXT + final("b")
    assert read([text], separates=False) == [("text", "a\n\nb")]
    assert make_call_parser(TOOLS, "gpt-oss").parse_non_stream(text) == ("a\n\nb", [])


def test_text_is_not_held_back() -> None:
    made = detector()
    assert made.take_parts("<|channel|>final<|message|>") == []
    assert shown(made.take_parts("a")) == [("text", "a")]
    assert made.take_parts("<|") == []
    assert shown(made.take_parts("x")) == [("text", "<|x")]
    plain = detector()
    assert shown(plain.take_parts("Yes")) == [("text", "Yes")]


def test_a_call_is_sent_where_its_object_ends() -> None:
    made = detector()
    text = call("add", ADD)
    end = text.index("<|call|>")
    assert made.take_parts(text[: end - 1]) == []
    assert shown(made.take_parts(text[end - 1 : end])) == [("call add", ADDED)]


@pytest.mark.parametrize("extra", [0, 1, 30, 5000])
def test_a_header_is_bounded(extra: int) -> None:
    words = "x" * (MAX_HEADER - len("<|channel|>") + extra)
    text = f"<|channel|>{words}<|message|>yes"
    expected = words + ("yes" if extra else "\nyes")
    assert read([text]) == read(text) == [("text", expected)]
    made = detector()
    held = sum(len(part.text) for char in f"<|channel|>{words}" for part in made.take_parts(char))
    assert len(words) - held <= MAX_HEADER + 30
    start = thought("a") + "<|start|>" + "y " * 200 + "<|channel|>final<|message|>b"
    got = read(start)
    assert got == read([start]) == [("reasoning", "a"), ("text", "y " * 200 + "\n\nb")]


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("", "<|channel|>final<|message|>a", [("text", "a")]),
        ("<|start|>assistant<|channel|>final<|message|>so", " a<|return|>", [("text", " a")]),
        ("<|start|>assistant<|channel|>analysis<|message|>", "a<|end|>", [("reasoning", "a")]),
        ("<|start|>assistant<|channel|>analysis", "<|message|>a", [("reasoning", "a")]),
        (f"{NEXT} to=functions.say<|channel|>commentary<|message|>", "{}", [("call say", "{}")]),
        ("<|start|>user<|message|>hi<|end|>", NEXT + final("a"), [("text", "a")]),
        ("<|start|>user<|message|>hi<|end|>", "a", [("text", "a")]),
        ("<|start|>" + "x" * 300 + "<|message|>", "a", [("text", "a")]),
    ],
)  # fmt: skip
def test_the_prompt_may_have_begun_the_message(prompt: str, text: str, expected: Shown) -> None:
    assert read([text], prompt) == read(text, prompt) == expected


def test_the_end_of_the_reasoning_is_known() -> None:
    twice = thought("a") + NEXT + thought("b")
    for text, end in (
        (thought("hm") + NEXT + final("yes"), len(thought("hm"))),
        (twice + NEXT + final("c"), len(twice)),
        ("<|channel|>analysis<|message|>so", len("<|channel|>analysis<|message|>so")),
        (final("yes"), 0),
    ):  # fmt: skip
        for pieces in ([text], [*text]):
            made = detector()
            for piece in pieces:
                made.take_parts(piece)
            made.last_parts()
            assert made.reasoning_end == end


def test_unknown_tools_are_forwarded_on_request() -> None:
    with envs.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
        made = make_call_parser(TOOLS, "gpt-oss")
        [one] = made.parse_non_stream(call("rm", {}))[1]
        assert (one.name, one.parameters) == ("rm", "{}")
        # A message to someone is no call of a function.
        text = "<|channel|>commentary to=assistant<|message|>{}"
        assert make_call_parser(TOOLS, "gpt-oss").parse_non_stream(text)[1] == []


def test_calls_are_numbered() -> None:
    normal, calls = make_call_parser(TOOLS, "gpt-oss").parse_non_stream(
        preamble("So.") + NEXT + gpt_oss(("add", ADD), ("say", SAY))
    )
    assert normal == "So."
    assert [(one.tool_index, one.name) for one in calls] == [(0, "add"), (1, "say")]
    made = make_call_parser(TOOLS, "gpt-oss")
    first = made.parse_stream_increment(gpt_oss(("add", ADD)))
    second = made.parse_stream_increment(NEXT + call("say", SAY))
    assert [one.tool_index for one in first.calls + second.calls] == [0, 1]


def test_the_end_of_reasoning_that_the_prompt_began_counts_from_the_output() -> None:
    made = detector(f"{PROMPT}<|channel|>analysis<|message|>")
    made.take_parts(f"abc<|end|>{NEXT}<|channel|>final<|message|>x")
    assert made.reasoning_end == len("abc<|end|>")


@pytest.mark.parametrize(
    ("text", "is_cut", "is_header"),
    [
        ("assistant", False, True),
        ("assist", False, False),
        ("assist", True, True),
        ("<|channel|>anal", True, True),
        ("<|channel|>anal", False, False),
        ("<|channel|>final code", False, True),
        ("<|channel|>final<|channel|>final", False, False),
        ("hello", False, False),
        (" " * 200 + "!", False, False),
    ],
)
def test_headers(text: str, is_cut: bool, is_header: bool) -> None:
    assert (read_header(text, is_cut=is_cut) is not None) is is_header


def test_each_character_of_arguments_is_scanned_twice_at_most() -> None:
    """The first call may never end, so that the others are read again."""
    num_scanned = 0
    plain = JsonObjectScanner._read

    def counted(scanner: JsonObjectScanner, char: str) -> None:
        nonlocal num_scanned
        num_scanned += 1
        plain(scanner, char)

    for arguments in ('{"a": "x', '{"', '{"a": "', "{", '{"a', '{"\\"', '{" , "'):
        text = (call("add", arguments, "") + NEXT) * 500
        num_scanned = 0
        with mock.patch.object(JsonObjectScanner, "_read", counted):
            got = read([text])
        assert sum(len(part) for _, part in got) > 500 * 20
        assert num_scanned < 2 * len(text)
    assert read(["<|start|>" * 30_000]) == []


FRAGMENTS = [
    *MARKS, NEXT, "assistant", "analysis", "commentary", "final", " to=functions.add", " to=x",
    " to=functions.say", "json", " ", "\n", "<", "<|", "|>", "{", "}", '"', "\\", "{}", "WORD",
    "WORD", '{"a": "WORD"}', thought("WORD"), final("WORD"), preamble("WORD"),
    call("say", {"text": "WORD"}), call("rm", {"text": "WORD"}), call("add", '{"a": "WORD'),
    "<|channel|>", "<|message|>", "<|channel|>final<|message|>", "<|channel|>WORD<|message|>",
    "é", "x" * 300,
]  # fmt: skip
WORD = re.compile(r"WORD[0-9]+;")


@settings(max_examples=300, deadline=None)
@example([" to=functions.add", "WORD"], [], PROMPT)
@given(
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=16),
    points=st.lists(st.integers(0, 2000), max_size=12),
    prompt=st.sampled_from([PROMPT, "", PROMPT + "<|channel|>final<|message|>"]),
)
def test_any_output_in_any_pieces_loses_no_word(
    parts: list[str], points: list[int], prompt: str
) -> None:
    numbers = iter(range(1000))
    text = re.sub("WORD", lambda _: f"WORD{next(numbers)};", "".join(parts))
    whole = read([text], prompt)
    assert read(cut(text, points), prompt) == whole
    assert read(text, prompt) == whole
    told = "".join(text for _, text in whole)
    assert WORD.findall(told) == WORD.findall(text)
    for kind, part in whole:
        if kind.startswith("call"):
            assert isinstance(json.loads(part), dict)
        else:
            assert not any(mark in part for mark in MARKS)


@given(text=st.text(max_size=60))
def test_text_of_a_message_stays_unchanged(text: str) -> None:
    if not any(mark in text for mark in MARKS):
        assert read([final(text)]) == ([("text", text)] if text else [])
