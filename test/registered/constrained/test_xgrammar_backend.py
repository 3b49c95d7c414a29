"""The backend with compile processes: hostile constraints fail in time, others still compile."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import sglang
from sglang.srt.constrained import xgrammar_backend
from sglang.srt.constrained.constraint import (
    JSON_OBJECT_SCHEMA,
    Constraint,
    ConstraintKind,
    GrammarError,
)
from sglang.srt.constrained.grammar import GrammarLimits, GrammarTicket
from sglang.srt.constrained.xgrammar_backend import XGrammarBackend
from sglang.srt.utils.hf_tokenizer import get_tokenizer
from sglang.srt.utils.process import is_alive
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=17, suite="base-b-test-cpu")

TIMEOUT = 2.0
ENDLESS_REGEX = "(a*)*" * 2000
HUGE_SCHEMA = json.dumps(
    {
        "anyOf": [
            {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(60)}}
            for _ in range(30)
        ]
    }
)


def make(limits: GrammarLimits) -> XGrammarBackend:
    tokenizer = get_tokenizer(str(Path(sglang.__file__).parent / "builtin_model"))
    return XGrammarBackend(tokenizer, 2200, (2, 0), limits)


@pytest.fixture(scope="module")
def backend() -> Iterator[XGrammarBackend]:
    made = make(GrammarLimits(compile_timeout=TIMEOUT, compile_memory=512 << 20))
    yield made
    made.close()
    assert compile_processes() == []


def compile_processes() -> list[psutil.Process]:
    # Zombies of other tests have no command line.
    children = filter(is_alive, psutil.Process().children(recursive=True))
    return [child for child in children if "compile_process" in " ".join(child.cmdline())]


def outcome(ticket: GrammarTicket) -> str:
    error = ticket.exception(90)  # TimeoutError: neither compiled nor failed.
    if error is None:
        assert ticket.result().matcher().failure is None
        return "ready"
    assert isinstance(error, GrammarError)
    return str(error)


def ask(backend: XGrammarBackend, kind: str, text: str) -> GrammarTicket:
    return backend.get(Constraint(ConstraintKind(kind), text))


def test_a_constraint_compiles_once(backend: XGrammarBackend) -> None:
    first = ask(backend, "regex", "[ab]+")
    assert ask(backend, "regex", "[ab]+") is first
    assert outcome(first) == "ready"
    assert ask(backend, "regex", "[ab]+") is first
    assert ask(backend, "ebnf", "[ab]+") is not first
    assert outcome(ask(backend, "json_schema", JSON_OBJECT_SCHEMA)) == "ready"


def test_what_another_rank_has_tried_compiles_without_a_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(xgrammar_backend, "CompileProcess", None)
    made = make(GrammarLimits())
    schema = Constraint(ConstraintKind.JSON_SCHEMA, JSON_OBJECT_SCHEMA)
    assert made.compile_now(schema).matcher().failure is None
    assert not made.compile_now(Constraint(ConstraintKind.REGEX, "[ab]+")).matcher().is_terminated()
    for kind, text in (("regex", "(a"), ("json_schema", '{"not": {}}')):
        with pytest.raises(GrammarError):
            made.compile_now(Constraint(ConstraintKind(kind), text))
    made.close()


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("regex", "(a", "parenthesis is not closed"),
        ("regex", "(" * 5000 + "a" + ")" * 5000, "Nest layer exceeded"),
        ("regex", "a" * 70_000, "more than the 65536 allowed"),
        ("regex", "\ud800", "lone surrogate"),
        ("ebnf", "root ::= root", "allows no text"),
        ("ebnf", "", "root rule"),
        ("json_schema", "{", "not JSON"),
        ("json_schema", '{"not": {}}', "#/not"),
        ("json_schema", '{"type":"array","items":' * 240 + "{}" + "}" * 240, ""),
    ],
)
def test_errors_of_bad_texts_name_the_field(
    backend: XGrammarBackend, kind: str, text: str, says: str
) -> None:
    said = outcome(ask(backend, kind, text))
    if says:
        assert said != "ready"
    assert said == "ready" or (said.startswith(kind) and says in said and "\n" not in said)


def test_an_endless_compilation_is_killed_and_cached_as_failed(backend: XGrammarBackend) -> None:
    assert outcome(ask(backend, "regex", "warm")) == "ready"
    ticket = ask(backend, "regex", ENDLESS_REGEX)
    assert not ticket.done(), "it is not waited for"
    # The other compile thread serves meanwhile.
    assert outcome(ask(backend, "regex", "other+")) == "ready"
    assert outcome(ticket) == "regex: compiling it took more than 2 s: simplify it"
    assert ask(backend, "regex", ENDLESS_REGEX).done()
    assert outcome(ask(backend, "regex", "after+")) == "ready"


def test_long_compilations_of_one_client_do_not_delay_another() -> None:
    backend = make(GrammarLimits(compile_timeout=300, queue_timeout=300))
    try:
        assert outcome(ask(backend, "regex", "warm")) == "ready"
        slow = [ask(backend, "regex", ENDLESS_REGEX + "b" * i) for i in range(6)]
        assert outcome(ask(backend, "regex", "victim+")) == "ready"
        assert not any(ticket.done() for ticket in slow)
    finally:
        backend.close()
    assert {outcome(ticket) for ticket in slow} == {"regex: the server is stopping"}


def test_a_huge_schema_is_refused_or_compiled_in_time(
    backend: XGrammarBackend,
) -> None:
    start = time.monotonic()
    result = outcome(ask(backend, "json_schema", HUGE_SCHEMA))
    assert result == "ready" or result.startswith("json_schema: ")
    assert time.monotonic() - start < 60
    assert outcome(ask(backend, "regex", "well+")) == "ready"


def test_a_killed_compile_process_is_replaced(backend: XGrammarBackend) -> None:
    assert outcome(ask(backend, "regex", "before")) == "ready"
    for process in compile_processes():
        process.kill()
        process.wait(30)
    assert outcome(ask(backend, "regex", "behind")) == "ready"


def test_too_large_and_too_many_constraints_are_refused() -> None:
    backend = make(GrammarLimits(compile_memory=1 << 20, max_compiling=1, compile_threads=1))
    try:
        first = ask(backend, "json_schema", HUGE_SCHEMA)
        refused = ask(backend, "regex", "a")
        assert (
            outcome(refused) == "regex: cannot be compiled now, too many are compiling: retry later"
        )
        assert "memory" in outcome(first)
        # A refusal because of a full queue is not cached.
        assert ask(backend, "regex", "a") is not refused
    finally:
        backend.close()


def test_close_fails_pending_compilations_and_leaves_no_process() -> None:
    before = compile_processes()
    backend = make(GrammarLimits(compile_timeout=60))
    tickets = [ask(backend, "regex", ENDLESS_REGEX + "b" * i) for i in range(4)]
    start = time.monotonic()
    backend.close()
    backend.close()
    assert time.monotonic() - start < 30
    assert all(ticket.exception(0) is not None for ticket in tickets)
    assert compile_processes() == before
    assert outcome(ask(backend, "regex", "late")).startswith("regex: cannot be compiled now")
