"""A constraint holds after the reasoning, with each reasoning parser, whole and streamed."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator

import pytest
from transformers import PreTrainedTokenizerBase

from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.constrained.constraint import Constraint, ConstraintKind, GrammarError, Reasoning
from sglang.srt.constrained.grammar import GrammarLimits, GrammarMatcher, allocate_bitmask
from sglang.srt.constrained.xgrammar_backend import XGrammarBackend
from sglang.srt.parser.reasoning_parser import (
    REASONING_PARSERS,
    ReasoningParser,
    opened_reasoning,
    reasoning_before,
)
from sglang.srt.utils.hf_tokenizer import get_tokenizer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

VOCAB, EOS = 2200, 2
SCHEMA = '{"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 3}'
PROMPTS = {
    "none": "assistant\n",
    "opened": "assistant\n<think>\n",
    "closed": "<think>\n\n</think>\n\n",
}


@functools.cache
def tokenizer() -> PreTrainedTokenizerBase:
    """Loading it takes longer than compiling a constraint."""
    return get_tokenizer(str(BUILTIN_MODEL_DIR))


@pytest.fixture(scope="module", name="backend")
def make_backend() -> Iterator[XGrammarBackend]:
    made = XGrammarBackend(tokenizer(), VOCAB, (EOS,), GrammarLimits())
    yield made
    made.close()


def ids(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


def takes(matcher: GrammarMatcher, text: str) -> bool:
    """True if the text may be a whole output."""
    return all(map(matcher.accept_token, [*ids(text), EOS]))


@pytest.mark.parametrize("place", PROMPTS)
@pytest.mark.parametrize("parser", REASONING_PARSERS)
def test_the_answer_fits_and_the_reasoning_is_free(
    backend: XGrammarBackend, parser: str, place: str
) -> None:
    reasoning = reasoning_before(parser, PROMPTS[place])
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, SCHEMA, reasoning)
    grammar = backend.compile_now(constraint)
    answers = {"[1, 2]": True, "[3]": False, "": False}
    thoughts = {
        "": reasoning is not Reasoning.BEGUN,
        "<think>\n[3] is\ta {thought}\n</think>\n\n": reasoning is not Reasoning.NONE,
        "[3] is\ta {thought}\n</think>\n\n": reasoning is Reasoning.BEGUN,
        "<think>no end": False,
    }
    for thought, may_think in thoughts.items():
        for answer, fits in answers.items():
            output = thought + answer
            assert takes(grammar.matcher(), output) is (may_think and fits), output
            if not (may_think and fits):
                continue
            inside = opened_reasoning(PROMPTS[place])
            split = ReasoningParser(parser, begins_inside=inside).parse_non_stream(output)
            assert split == ("[3] is\ta {thought}" if thought else "", answer)
            streamed = ReasoningParser(parser, begins_inside=inside)
            parts = [*map(streamed.parse_stream_increment, output), streamed.finish()]
            assert "".join(part.reasoning_text for part in parts) == split[0]
            assert "".join(part.normal_text for part in parts) == answer


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [(ConstraintKind.REGEX, "[ab]{2}", "ab"), (ConstraintKind.EBNF, 'root ::= "x" | "y"', "y")],
)
def test_other_constraints_hold_after_the_reasoning_too(
    backend: XGrammarBackend, kind: ConstraintKind, text: str, answer: str
) -> None:
    grammar = backend.compile_now(Constraint(kind, text, Reasoning.BEGUN))
    assert takes(grammar.matcher(), f"hm</think>\n{answer}")
    assert not takes(grammar.matcher(), answer)
    assert not takes(grammar.matcher(), "hm</think>\nzz")


def test_an_output_cannot_end_in_its_reasoning(backend: XGrammarBackend) -> None:
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, SCHEMA, Reasoning.BEGUN)
    matcher = backend.compile_now(constraint).matcher()
    mask = allocate_bitmask(1, VOCAB)
    draw = random.Random(0)
    for token in [*ids("so"), *draw.sample(ids("a thought of some words"), 5)]:
        matcher.fill_next_token_bitmask(mask, 0)
        assert not int(mask[0, 0]) >> EOS & 1
        assert matcher.accept_token(token)


def test_errors_name_the_constraint_that_the_client_sent(backend: XGrammarBackend) -> None:
    for kind, text, says in (
        (ConstraintKind.JSON_SCHEMA, json.dumps({"not": {}}), "json_schema: #/not is not"),
        (ConstraintKind.JSON_SCHEMA, json.dumps({"type": "frob"}), "json_schema: .*frob"),
        (ConstraintKind.REGEX, "(a", "regex: .*parenthesis"),
        (ConstraintKind.EBNF, "root ::= b", "ebnf: .*"),
    ):
        ticket = backend.get(Constraint(kind, text, Reasoning.POSSIBLE))
        error = ticket.exception(90)
        assert isinstance(error, GrammarError)
        with pytest.raises(GrammarError, match=f"^{says}"):
            raise error
        assert "structural_tag" not in str(error)


def test_a_grammar_with_reasoning_is_not_the_one_without(backend: XGrammarBackend) -> None:
    plain = Constraint(ConstraintKind.REGEX, "[ab]")
    assert backend.get(plain) is not backend.get(plain._replace(reasoning=Reasoning.BEGUN))
