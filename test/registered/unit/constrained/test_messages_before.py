"""A constraint holds in the last message of gpt-oss; the messages before it are free."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rigs.harmony_text import NEXT, final, harmony_tokenizer, mark_ids, preamble, thought
from rigs.servers.fake_engine import byte_tokenizer
from sglang.srt.constrained.constraint import Constraint, ConstraintKind, GrammarError, Reasoning
from sglang.srt.constrained.grammar import (
    GrammarLimits,
    GrammarMatcher,
    Vocabulary,
    allocate_bitmask,
)
from sglang.srt.constrained.xgrammar_backend import XGrammarBackend
from sglang.srt.function_call.function_call_parser import make_message_parser
from sglang.srt.function_call.gpt_oss_detector import PartKind
from sglang.srt.parser.reasoning_parser import reasoning_before
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

TOKENIZER = harmony_tokenizer()
IDS = mark_ids()
ENDS = (IDS["<|return|>"], IDS["<|call|>"])
VOCAB = 300
SCHEMA = '{"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 3}'
PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"


@pytest.fixture(scope="module", name="backend")
def make_backend() -> Iterator[XGrammarBackend]:
    made = XGrammarBackend(TOKENIZER, VOCAB, ENDS, GrammarLimits())
    yield made
    made.close()


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def takes(matcher: GrammarMatcher, text: str) -> bool:
    return all(map(matcher.accept_token, ids(text))) and matcher.is_terminated()


def allowed(matcher: GrammarMatcher) -> set[int]:
    mask = allocate_bitmask(1, VOCAB)
    matcher.fill_next_token_bitmask(mask, 0)
    return {i for i in range(VOCAB) if int(mask[0, i // 32]) >> (i % 32) & 1}


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        (ConstraintKind.JSON_SCHEMA, SCHEMA, "[1, 2]", "[3]"),
        (ConstraintKind.REGEX, "[ab]{2}", "ab", "abb"),
        (ConstraintKind.EBNF, 'root ::= "x" | "y"', "y", "z"),
    ],
)
def test_the_answer_fits_and_the_messages_before_it_are_free(
    backend: XGrammarBackend, kind: ConstraintKind, text: str, good: str, bad: str
) -> None:
    reasoning = reasoning_before("gpt-oss", PROMPT)
    grammar = backend.get(Constraint(kind, text, reasoning)).result(90)
    before = {
        "": True,
        thought("hm {é}\n") + NEXT: True,
        thought("[3]") + NEXT + preamble("so") + NEXT + thought("") + NEXT: True,
        thought("hm"): False,
        NEXT: False,
        "<|channel|>poem<|message|>a<|end|>" + NEXT: False,
        "<|channel|>commentary to=functions.f<|message|>{}<|end|>" + NEXT: False,
        "<|channel|>analysis<|message|>a<|channel|>": False,
    }
    for messages, may_come in before.items():
        assert takes(grammar.matcher(), messages + final(good)) is may_come, messages
        assert not takes(grammar.matcher(), messages + final(bad)), messages
        assert not takes(grammar.matcher(), messages + good + "<|return|>"), messages
        if may_come:
            parts = make_message_parser((), "", separates_reasoning=True).take_parts(
                messages + final(good)
            )
            told = "".join(part.text for part in parts if part.kind is PartKind.TEXT)
            assert told.removeprefix("so\n\n") == good
    assert takes(grammar.matcher(), final(good, "<|call|>"))


def test_only_marks_that_may_come_are_allowed(backend: XGrammarBackend) -> None:
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, SCHEMA, Reasoning.MESSAGES)
    matcher = backend.compile_now(constraint).matcher()
    assert allowed(matcher) == {IDS["<|channel|>"]}
    for token in ids("<|channel|>analysis<|message|>"):
        assert matcher.accept_token(token)
    for token in ids("so"):
        assert {i for i in allowed(matcher) if i >= 256} == {IDS["<|end|>"]}
        assert matcher.accept_token(token)
    assert matcher.accept_token(IDS["<|end|>"])
    assert allowed(matcher) == {IDS["<|start|>"]}


ANY_TEXT = '{"type": "structural_tag", "format": {"type": "any_text"}}'


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ConstraintKind.REGEX, "[^a]*.*"),
        (ConstraintKind.EBNF, "root ::= [^a]*"),
        (ConstraintKind.STRUCTURAL_TAG, ANY_TEXT),
    ],
)
def test_no_text_has_a_mark(backend: XGrammarBackend, kind: ConstraintKind, text: str) -> None:
    matcher = backend.compile_now(Constraint(kind, text)).matcher()
    found = allowed(matcher)
    assert {i for i in found if i >= 256} == set(ENDS)
    assert len(found) > 100


def test_a_mark_among_the_stop_tokens_ends_the_grammar(backend: XGrammarBackend) -> None:
    grammar = backend.compile_now(Constraint(ConstraintKind.REGEX, "a*"))
    assert takes(grammar.matcher([IDS["<|end|>"]]), "a<|end|>")
    assert not takes(grammar.matcher([]), "a<|end|>")


def test_a_tokenizer_without_the_marks_is_refused() -> None:
    backend = XGrammarBackend(byte_tokenizer(), VOCAB, (256,), GrammarLimits())
    try:
        with pytest.raises(GrammarError, match=r"no special token <\|start\|>.*separate_reasoning"):
            backend.compile_now(Constraint(ConstraintKind.REGEX, "a", Reasoning.MESSAGES))
    finally:
        backend.close()


def test_marks_that_end_outputs_or_have_no_logits_stay_forbidden() -> None:
    made = Vocabulary.from_tokenizer(TOKENIZER, VOCAB, [IDS["<|end|>"]])
    assert made.marks.keys() == {"<|start|>", "<|channel|>", "<|message|>"}
    assert made.tokens[IDS["<|end|>"]] == b""
    short = Vocabulary.from_tokenizer(TOKENIZER, IDS["<|channel|>"] + 1, [256])
    assert short.marks.keys() == {"<|channel|>"}


@pytest.mark.parametrize(
    ("prompt", "reasoning"),
    [
        (PROMPT, Reasoning.MESSAGES),
        (PROMPT + "<|channel|>final<|message|>so", Reasoning.NONE),
        ("hi", Reasoning.MESSAGES),
    ],
)
def test_an_answer_that_the_prompt_begins_has_no_messages_before_it(
    prompt: str, reasoning: Reasoning
) -> None:
    assert reasoning_before("gpt-oss", prompt) is reasoning
