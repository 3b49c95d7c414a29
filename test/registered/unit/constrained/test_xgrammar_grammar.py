"""Grammars and masks without processes: text sampled under a grammar matches that grammar."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

import sglang
from sglang.srt.constrained.constraint import (
    JSON_OBJECT_SCHEMA,
    Constraint,
    ConstraintKind,
    GrammarError,
    Reasoning,
    constraint_of_response_format,
)
from sglang.srt.constrained.grammar import (
    Grammar,
    GrammarLimits,
    GrammarTicket,
    Vocabulary,
    allocate_bitmask,
    apply_bitmask,
    compile_constraint,
    make_compiler,
)
from sglang.srt.constrained.schema_check import prepare_json_schema, prepare_structural_tag
from sglang.srt.constrained.xgrammar_backend import GrammarCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.hf_tokenizer import get_tokenizer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

VOCAB = 2200
"""More than the tokenizer's 2176 ids, and not a multiple of 32."""
EOS = (2, 0)
MAX_TOKENS = 400
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
        "home": {"$ref": "#/$defs/home"},
    },
    "required": ["name", "age", "home"],
    "$defs": {
        "home": {"type": "object", "properties": {"zip": {"type": "boolean"}}, "required": ["zip"]}
    },
}


@lru_cache(maxsize=1)
def tokenizer() -> PreTrainedTokenizerBase:
    return get_tokenizer(str(Path(sglang.__file__).parent / "builtin_model"))


@lru_cache(maxsize=1)
def vocabulary() -> Vocabulary:
    return Vocabulary.from_tokenizer(tokenizer(), VOCAB, EOS)


def grammar(
    kind: str, text: str, limits: GrammarLimits | None = None, *, any_whitespace: bool = True
) -> Grammar:
    constraint = Constraint(ConstraintKind(kind), text)
    compiled = compile_constraint(
        make_compiler(vocabulary()), constraint, any_whitespace=any_whitespace
    )
    return Grammar(compiled, constraint.kind, vocabulary(), limits or GrammarLimits())


def sample(of: Grammar, seed: int, bias: dict[int, float] | None = None) -> str:
    """Text sampled from random logits under a grammar."""
    generator = torch.Generator().manual_seed(seed)
    matcher, bitmask = of.matcher(), allocate_bitmask(1, VOCAB)
    said: list[int] = []
    for _ in range(MAX_TOKENS):
        logits = torch.randn(1, VOCAB, generator=generator) * 3
        for token_id, extra in (bias or {}).items():
            logits[0, token_id] += extra
        matcher.fill_next_token_bitmask(bitmask, 0)
        apply_bitmask(logits, bitmask, [0])
        token_id = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
        assert matcher.accept_token(token_id)
        if matcher.is_terminated():
            assert token_id in EOS
            return bytes.decode(b"".join(vocabulary().tokens[i] for i in said))
        said.append(token_id)
    raise AssertionError("the grammar did not end")


def ids(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


@pytest.mark.parametrize("seed", range(12))
def test_random_logits_under_a_schema_give_an_instance_of_it(seed: int) -> None:
    text = prepare_json_schema(json.dumps(PERSON))
    # The bias favours quotes, because strings of random tokens would be long.
    value: dict[str, Any] = json.loads(sample(grammar("json_schema", text), seed, {4: 6.0}))
    assert set(value) <= {"name", "age", "tags", "home"}
    assert 1 <= len(value["name"]) <= 12
    assert type(value["age"]) is int and 0 <= value["age"] <= 150
    assert len(value.get("tags", [])) <= 3 and set(value.get("tags", [])) <= {"a", "b", None}
    assert type(value["home"]["zip"]) is bool and len(value["home"]) == 1


@pytest.mark.parametrize("seed", range(4))
def test_without_free_whitespace_json_is_as_json_dumps_writes_it(seed: int) -> None:
    legs = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    schema = {
        "type": "object",
        "properties": {"legs": legs},
        "required": ["legs"],
        "additionalProperties": False,
    }
    text = prepare_json_schema(json.dumps(schema))
    blanks = {i: 8.0 for i, token in enumerate(vocabulary().tokens) if token and token.isspace()}
    assert blanks, "the bias favours whitespace"
    free = sample(grammar("json_schema", text), seed, blanks)
    assert len(free) > 2 * len(json.dumps(json.loads(free)))
    plain = sample(grammar("json_schema", text, any_whitespace=False), seed, blanks)
    assert plain == json.dumps(json.loads(plain))


@pytest.mark.parametrize("pattern", [r"[a-f]{3}-\d{2,4}", r"(yes|no|[^x\n]{2})!", r"\d{4}(é|ü)"])
@pytest.mark.parametrize("seed", range(6))
def test_random_logits_under_a_regex_match_it_whole(pattern: str, seed: int) -> None:
    assert re.fullmatch(pattern, sample(grammar("regex", pattern), seed))


@pytest.mark.parametrize("seed", range(6))
def test_random_logits_under_an_ebnf_match_its_language(seed: int) -> None:
    ebnf = 'root ::= sum\nsum ::= digit ("+" digit){1,3}\ndigit ::= [0-9]'
    assert re.fullmatch(r"\d(\+\d){1,3}", sample(grammar("ebnf", ebnf), seed))


def test_special_tokens_and_padding_are_never_text() -> None:
    tokens = vocabulary().tokens
    assert tokens[:3] == [b"", b"", b""] and set(tokens[2176:]) == {b""}
    bitmask = allocate_bitmask(1, VOCAB)
    matcher = grammar("regex", ".{1,5}").matcher()
    matcher.fill_next_token_bitmask(bitmask, 0)
    logits = torch.zeros(1, VOCAB)
    apply_bitmask(logits, bitmask, [0])
    assert torch.isinf(logits[0, [0, 1, 2, *range(2176, VOCAB)]]).all()
    assert not matcher.accept_token(1)
    assert not matcher.accept_token(VOCAB - 1)


def test_the_end_allows_only_end_tokens() -> None:
    (letter,) = ids("a")
    # Token 1 is special and may end the grammar; the letter is text and may not.
    matcher = grammar("regex", "a").matcher(stop_token_ids=[1, letter])
    assert matcher.accept_token(letter)
    bitmask = allocate_bitmask(1, VOCAB)
    matcher.fill_next_token_bitmask(bitmask, 0)
    logits = torch.zeros(1, VOCAB)
    apply_bitmask(logits, bitmask, [0])
    assert torch.isfinite(logits[0]).nonzero().flatten().tolist() == [0, 1, 2]
    assert not matcher.is_terminated()
    assert matcher.accept_token(1)
    assert matcher.is_terminated()
    assert not matcher.accept_token(1)


def test_masks_touch_only_their_rows() -> None:
    matcher = grammar("regex", "a").matcher()
    bitmask = allocate_bitmask(3, VOCAB)
    matcher.fill_next_token_bitmask(bitmask, 1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = torch.zeros(3, VOCAB, dtype=dtype)
        apply_bitmask(logits, bitmask, [1])
        assert torch.isfinite(logits).sum(-1).tolist() == [VOCAB, 1, VOCAB]
    with pytest.raises(ValueError, match="does not belong to logits"):
        apply_bitmask(torch.zeros(3, VOCAB + 64), bitmask, [1])


def test_a_matcher_that_uses_too_much_time_fails() -> None:
    limits = GrammarLimits(step_burst=0.02, step_cost=0.0)
    matcher = grammar("ebnf", 'root ::= root root root | "a" | ""', limits).matcher()
    (letter,) = ids("a")
    assert matcher.failure is None
    steps = 0
    while matcher.failure is None and steps < 400:
        assert matcher.accept_token(letter)
        steps += 1
    assert matcher.failure is not None
    assert matcher.failure.startswith("ebnf: matching it took")


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("regex", "(a", r"^regex: .*parenthesis is not closed"),
        ("regex", r"(a)\1", r"^regex: .*Backreference"),
        ("ebnf", 'root ::= "a" b', r'^ebnf: .*Rule "b" is not defined'),
        ("json_schema", '{"type": "frob"}', r'^json_schema: Unsupported type "frob"'),
        ("json_schema", '{"$ref": "#/$defs/a"}', r"^json_schema: .*\$defs"),
    ],
)
def test_errors_name_the_field_and_the_cause_in_one_line(kind: str, text: str, says: str) -> None:
    with pytest.raises(GrammarError, match=says) as raised:
        grammar(kind, text)
    assert "\n" not in str(raised.value) and "cpp" not in str(raised.value)


def test_an_array_without_items_may_contain_anything() -> None:
    of = grammar("json_schema", prepare_json_schema('{"type": "array"}'))
    matcher = of.matcher()
    assert all(matcher.accept_token(token_id) for token_id in ids('[1, {"a": null}]'))


@pytest.mark.parametrize(
    ("schema", "text", "is_possible"),
    [
        ({"type": "string", "maxLength": 1}, '"\t"', False),
        ({"type": "string", "minLength": 2, "maxLength": 9}, '"a\tb"', False),
        ({"type": "string", "minLength": 2, "maxLength": 9}, '"a\u00e9b"', True),
        ({"properties": {"ab": {}}, "additionalProperties": True}, r'{"a\u0062": 1}', False),
        ({"properties": {"ab": {}}, "additionalProperties": True}, r'{"ac\u0062": 1}', True),
    ],
)
def test_repaired_grammars_allow_json_alone(schema: Any, text: str, is_possible: bool) -> None:
    """Control characters are no JSON, and an escaped name is that of the property."""
    prepared = prepare_json_schema(json.dumps(schema))
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    tagged = prepare_structural_tag(json.dumps(tag))
    for matcher in (
        grammar("json_schema", prepared).matcher(),
        grammar("structural_tag", tagged).matcher(),
    ):
        assert all(matcher.accept_token(token_id) for token_id in ids(text)) is is_possible


def test_a_schema_in_a_structural_tag_has_the_same_whitespace() -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": True}}
    text = prepare_structural_tag(json.dumps(tag))
    for any_whitespace, blanks in ((True, 41), (False, 2)):
        matcher = grammar("structural_tag", text, any_whitespace=any_whitespace).matcher()
        assert not all(map(matcher.accept_token, ids("[1," + "\n" * blanks + "2]")))
        matcher = grammar("structural_tag", text, any_whitespace=any_whitespace).matcher()
        assert all(map(matcher.accept_token, ids("[1, 2]")))


CALL = {"begin": "<f=add>", "schema": {"type": "integer"}, "end": "</f>"}
LEGACY = {"type": "structural_tag", "structures": [CALL], "triggers": ["<f="]}
NEW = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [
            {
                "type": "tag",
                "begin": "<f=add>",
                "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                "end": "</f>",
            }
        ],
    },
}


def test_both_forms_of_a_structural_tag_give_the_same() -> None:
    prepared = prepare_structural_tag(json.dumps(LEGACY))
    assert json.loads(prepared) == NEW
    assert json.loads(prepare_structural_tag(json.dumps(NEW))) == NEW


@pytest.mark.parametrize(
    ("text", "is_possible"),
    [
        ("Let me see. <f=add>12</f> so", True),
        ("<f=add>1</f><f=add>2</f>", True),
        ("no call", True),
        ("<f=add>x", False),
        ("<f=sub>1</f>", False),
        ("<f=add>12</g>", False),
    ],
)
def test_a_structural_tag_constrains_the_text_after_a_trigger(text: str, is_possible: bool) -> None:
    matcher = grammar("structural_tag", prepare_structural_tag(json.dumps(LEGACY))).matcher()
    assert all(matcher.accept_token(token_id) for token_id in ids(text)) is is_possible


@pytest.mark.parametrize(
    ("tag", "problem"),
    [
        ("{", "not JSON"),
        ("[]", 'expected an object with "type": "structural_tag"'),
        ({"type": "json_schema", "format": {}}, 'expected an object with "type"'),
        ({"type": "structural_tag"}, "give format, or structures and triggers"),
        ({**NEW, "triggers": []}, "give format, or structures and triggers"),
        ({**LEGACY, "structures": []}, "structures must be a list"),
        ({**LEGACY, "structures": [{"begin": "<"}]}, r"structures\[0\] must have begin, schema"),
        ({**LEGACY, "structures": [{**CALL, "schema": {"not": {}}}]}, "#/not is not supported"),
        ({**LEGACY, "structures": [{**CALL, "schema": 7}]}, "must be an object or a boolean"),
    ],
)
def test_structural_tags_that_cannot_be_enforced_are_refused(tag: object, problem: str) -> None:
    text = tag if isinstance(tag, str) else json.dumps(tag)
    with pytest.raises(GrammarError, match=problem) as error:
        prepare_structural_tag(text)
    assert str(error.value).startswith("structural_tag: ")


def test_a_library_error_about_a_structural_tag_becomes_one_line() -> None:
    text = json.dumps({"type": "structural_tag", "format": {"type": "no such format"}})
    with pytest.raises(GrammarError, match=r"^structural_tag: .+") as error:
        grammar("structural_tag", prepare_structural_tag(text))
    assert "\n" not in str(error.value)


def test_response_format_maps_to_a_constraint() -> None:
    assert constraint_of_response_format(None) is None
    assert constraint_of_response_format({"type": "text"}) is None
    any_object = constraint_of_response_format({"type": "json_object"})
    assert any_object == Constraint(ConstraintKind.JSON_SCHEMA, JSON_OBJECT_SCHEMA)
    wrapped = {"type": "json_schema", "json_schema": {"name": "p", "schema": {"type": "null"}}}
    named = constraint_of_response_format(wrapped)
    assert named == Constraint(ConstraintKind.JSON_SCHEMA, '{"type":"null"}')
    tag = {"type": "structural_tag", "format": {"type": "any_text"}, "triggers": None}
    tagged = constraint_of_response_format(tag)
    text = '{"type":"structural_tag","format":{"type":"any_text"}}'
    assert tagged == Constraint(ConstraintKind.STRUCTURAL_TAG, text)
    for bad, field in (
        ({"type": "xml"}, r"response_format\.type='xml'"),
        ({"type": "json_schema"}, r"response_format\.json_schema is missing"),
        ({"type": "json_schema", "json_schema": {}}, r"json_schema\.schema is missing"),
    ):
        with pytest.raises(ValueError, match=field):
            constraint_of_response_format(bad)


def test_a_request_has_at_most_one_constraint() -> None:
    assert SamplingParams().constraint is None
    assert SamplingParams(regex="a").constraint == Constraint(ConstraintKind.REGEX, "a")
    tagged = SamplingParams(structural_tag="t", reasoning=Reasoning.BEGUN)
    assert tagged.constraint == Constraint(ConstraintKind.STRUCTURAL_TAG, "t", Reasoning.BEGUN)
    with pytest.raises(ValueError, match="json_schema and ebnf are given together"):
        _ = SamplingParams(json_schema="{}", ebnf="x").constraint


def test_invalid_arguments_of_a_backend_are_refused() -> None:
    with pytest.raises(ValueError, match="end-of-sequence"):
        Vocabulary.from_tokenizer(tokenizer(), VOCAB, ())
    with pytest.raises(ValueError, match="outside the vocabulary"):
        Vocabulary.from_tokenizer(tokenizer(), VOCAB, (VOCAB,))


def test_the_cache_drops_the_least_recently_used() -> None:
    cache = GrammarCache(max_tickets=2, max_bytes=10)
    tickets = {}
    for text in ("aaa", "bbb"):
        tickets[text] = GrammarTicket(Constraint(ConstraintKind.REGEX, text))
        cache.add_compiling(tickets[text])
    assert cache.find(tickets["aaa"].constraint) is tickets["aaa"]
    for ticket in tickets.values():
        ticket.fail("no")
        cache.finish(ticket, keep=True)
    assert cache.find(tickets["aaa"].constraint) is tickets["aaa"]
    third = GrammarTicket(Constraint(ConstraintKind.REGEX, "c" * 6))
    cache.add_compiling(third)
    third.fail("no")
    cache.finish(third, keep=True)
    assert cache.find(tickets["bbb"].constraint) is None
    assert (cache.num_done, cache.num_bytes, cache.num_compiling) == (2, 9, 0)
    large = GrammarTicket(Constraint(ConstraintKind.REGEX, "d" * 8))
    cache.add_compiling(large)
    large.fail("no")
    cache.finish(large, keep=True)
    assert (cache.num_done, cache.num_bytes) == (1, 8)
