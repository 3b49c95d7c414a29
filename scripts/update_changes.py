#!/usr/bin/env python3
"""Writes the line numbers of docs/changes/*.md, from the files that they name.

A symbol and its place stand together there: `SYMBOL`, `FILE:LINE`.
Usage: `.venv/bin/python scripts/update_changes.py`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
ROOTS = (REPO / "python" / "sglang" / "srt", REPO)
PLACE = re.compile(r"`([\w.]+)`, `([\w./-]+\.py):\d+`")


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, int]]:
    """Names that statements define, with their lines; names inside classes are dotted."""
    for node in body:
        match node:
            case ast.ClassDef():
                yield prefix + node.name, node.lineno
                yield from definitions(node.body, f"{prefix}{node.name}.")
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield prefix + node.name, node.lineno
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name, node.lineno
            case ast.Assign(targets=targets):
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                yield from ((prefix + name, node.lineno) for name in names)


def line_of(symbol: str, file: str) -> int:
    """Line of `file` at which `symbol` is defined. Raises ValueError where it is not."""
    path = next((root / file for root in ROOTS if (root / file).is_file()), None)
    if path is None:
        raise ValueError(f"there is no {file}")
    lines = dict(definitions(ast.parse(path.read_text(encoding="utf-8")).body))
    if symbol not in lines:
        raise ValueError(f"{file} does not define {symbol}")
    return lines[symbol]


def updated(text: str) -> str:
    """`text` with the lines that the symbols have now."""
    return PLACE.sub(lambda m: f"`{m[1]}`, `{m[2]}:{line_of(m[1], m[2])}`", text)


if __name__ == "__main__":
    for page in (REPO / "docs" / "changes").glob("*.md"):
        page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
