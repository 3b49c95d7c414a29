"""Decoders of structs are made while modules are imported, never while threads run.

msgspec fills in its description of a struct type at the first use of the type, and keeps it in the
type while it does so. A thread that uses the type meanwhile reads an unfinished description, and
the process dies of SIGSEGV: seen with msgspec 0.22.0 as four prompts began on a decode server.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

ENGINE: Final = Path(__file__).resolve().parents[3] / "python/sglang/srt"
ONE_THREAD: Final = {"entrypoints/http/body.py"}
"""Files whose functions only the event loop's thread calls."""
PLAIN: Final = {"dict", "list", "tuple", "set", "str", "int", "float", "bool", "bytes", "Any"}
PLAIN_OF_MSGSPEC: Final = {"msgspec", "msgspec.Raw"}


def names_structs(kind: ast.expr) -> bool:
    """True if a type expression has another name than those of plain values."""
    return any(
        ast.unparse(node) not in PLAIN | PLAIN_OF_MSGSPEC
        for node in ast.walk(kind)
        if isinstance(node, ast.Name | ast.Attribute)
    )


def late_uses(source: str) -> Iterator[str]:
    """Expressions within functions that may use a struct type for the first time."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    outer = [node for node in ast.walk(ast.parse(source)) if isinstance(node, functions)]
    calls = {
        node: None
        for function in outer
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    for call in calls:
        assert isinstance(call.func, ast.Attribute)
        name, of = call.func.attr, ast.unparse(call.func.value)
        if not of.startswith("msgspec"):
            continue
        kinds = [word.value for word in call.keywords if word.arg == "type"]
        kinds += {"Decoder": call.args[:1], "convert": call.args[1:2]}.get(name, [])
        if any(names_structs(kind) for kind in kinds):
            yield ast.unparse(call)


def test_no_function_of_the_engine_makes_a_decoder() -> None:
    found = {
        name: uses
        for path in sorted(ENGINE.rglob("*.py"))
        if (name := str(path.relative_to(ENGINE))) not in ONE_THREAD
        if (uses := list(late_uses(path.read_text(encoding="utf-8"))))
    }
    assert not found, f"make the decoder where the type is defined: {found}"


@pytest.mark.parametrize(
    ("line", "is_late"),
    [
        ("msgspec.json.decode(raw, type=Route)", True),
        ("msgspec.msgpack.decode(raw, type=list[Route | None])", True),
        ("msgspec.msgpack.Decoder(Route)", True),
        ("msgspec.convert(raw, Route)", True),
        ("msgspec.json.decode(raw, type=dict[str, msgspec.Raw])", False),
        ("msgspec.json.decode(raw)", False),
        ("DECODER.decode(raw)", False),
    ],
)
def test_the_rule_sees_what_it_should(line: str, is_late: bool) -> None:
    assert bool(list(late_uses(f"def f(raw):\n    return {line}"))) is is_late
    assert not list(late_uses(f"WORD = {line}"))
