"""Kernels are not compiled in service because of where a step's indices happen to be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

KERNELS = Path(sglang.__file__).parent / "srt" / "layers" / "triton_ops" / "attention"
INDICES = {"rows_ptr", "lens_ptr", "indptr_ptr"}
"""Neighbours in one upload: those of a single request are aligned to 8 bytes, not to 16."""


def kernels() -> Iterator[tuple[str, set[str], set[str]]]:
    """Name of each kernel with indices, these, and those that may have any alignment."""
    for path in sorted(KERNELS.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or not node.name.endswith("_kernel"):
                continue
            given = {one.arg for one in node.args.args} & INDICES
            options = [
                keyword.value
                for decorator in node.decorator_list
                if isinstance(decorator, ast.Call)
                for keyword in decorator.keywords
                if keyword.arg == "do_not_specialize_on_alignment"
            ]
            if given:
                free = set(ast.literal_eval(options[0])) if options else set()
                yield f"{path.stem}:{node.name}", given, free


def test_indices_of_any_alignment_use_the_same_kernel() -> None:
    found = list(kernels())
    assert len(found) >= 5
    for name, given, free in found:
        assert given <= free, name


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
