#!/usr/bin/env python3
"""Writes docs/files.md, a line for each source file, from the first line of each file.

Usage: `.venv/bin/python scripts/update_files.py`.
"""

from __future__ import annotations

import ast
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PAGE = REPO / "docs" / "files.md"


def first_sentence(path: Path) -> str:
    """The first paragraph of a Python docstring, or the first line of a script's comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].replace("\n", " ")
    comments = (line[1:].strip() for line in text.splitlines()[1:] if line.startswith("#"))
    return next(comments, "")


def sources() -> list[Path]:
    """The listed files, sorted by folder."""
    files = [path for path in (REPO / "python").rglob("*.py") if path.stat().st_size]
    files += [path for path in (REPO / "scripts").rglob("*") if path.suffix in (".py", ".sh")]
    files += [*(REPO / "test").glob("*.py"), *(REPO / "test" / "rigs").rglob("*.py")]
    return sorted(files, key=lambda path: (str(path.parent), path.name))


def file_list() -> str:
    """The text of the page."""
    lines = [
        "# Files",
        "",
        "Written by `scripts/update_files.py` from the first line of each file.",
    ]
    folder = None
    for path in sources():
        if path.parent != folder:
            folder = path.parent
            lines += ["", f"## `{folder.relative_to(REPO)}`", ""]
        is_script = path.is_relative_to(REPO / "scripts")
        shown = path.relative_to(REPO) if is_script else path.name
        lines.append(f"- `{shown}`: {first_sentence(path)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(file_list(), encoding="utf-8")
