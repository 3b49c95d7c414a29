"""Tiers and transfers do not know kinds of state: no branch names a pool but the primary one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

SOURCES = Path(sglang.__file__).parent / "srt"
NAMES = {name.name: name.value for name in PoolName if name is not PoolName.KV}
MODELS = {"architecture", "architectures", "model_type"}


def branches(tree: ast.AST) -> Iterator[ast.expr]:
    """The operands of all comparisons, the keys of lookups and the patterns of `match`."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare():
                yield from (node.left, *node.comparators)
            case ast.Subscript():
                yield node.slice
            case ast.MatchValue():
                yield node.value
            case ast.Call(func=ast.Attribute(attr="get" | "pop" | "get_pool"), args=[key, *_]):
                yield key


def named(tree: ast.AST) -> list[str]:
    """The pools and properties of models that branches name."""
    found = []
    for operand in branches(tree):
        for part in ast.walk(operand):
            match part:
                case ast.Attribute(value=ast.Name(id="PoolName"), attr=name) if name in NAMES:
                    found.append(f"line {part.lineno}: PoolName.{name}")
                case ast.Constant(value=str() as text) if text in NAMES.values():
                    found.append(f"line {part.lineno}: '{text}'")
                case ast.Attribute(attr=name) if name in MODELS:
                    found.append(f"line {part.lineno}: {name}")
    return found


def test_no_branch_names_a_pool_or_a_model() -> None:
    for folder in ("mem_cache", "disaggregation"):
        for path in sorted((SOURCES / folder).rglob("*.py")):
            found = named(ast.parse(path.read_text()))
            assert not found, f"{path.relative_to(SOURCES)}: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "if spec.name == PoolName.C128: pass",
        "if name in (PoolName.SWA, PoolName.KV): pass",
        "pools[PoolName.INDEXER]",
        "group.get_pool('mamba')",
        "if name == 'open_group': pass",
        "match name:\n    case PoolName.COMPRESSOR: pass",
        "if config.model_type == 'deepseek_v4': pass",
    ],
)
def test_such_branches_are_found(source: str) -> None:
    assert len(named(ast.parse(source))) == 1


def test_specs_and_the_primary_pool_may_be_named() -> None:
    source = "StateSpec(name=PoolName.SWA)\nif name == PoolName.KV: pass\npools['kv']"
    assert not named(ast.parse(source))
