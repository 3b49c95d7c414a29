#!/usr/bin/env python3
"""Write the list of files in docs/structures.md: a line for each, from its own first line.

    python scripts/update_structures.py

Everything from the heading `## Files` on is generated; the prose above it is kept.
"""

from __future__ import annotations

import ast
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PAGE = REPO / "docs" / "structures.md"
HEADING = "## Files\n"


def first_sentence(path: Path) -> str:
    """The first line of a Python docstring, or of a script's leading comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].replace("\n", " ")
    comments = (line[1:].strip() for line in text.splitlines()[1:] if line.startswith("#"))
    return next(comments, "")


def sources() -> list[Path]:
    """Files that get a line, by folder."""
    files = [path for path in (REPO / "python").rglob("*.py") if path.stat().st_size]
    files += [path for path in (REPO / "scripts").rglob("*") if path.suffix in (".py", ".sh")]
    files += (REPO / "test").glob("*.py")
    return sorted(files, key=lambda path: (str(path.parent), path.name))


def file_list() -> str:
    """The generated part of the page."""
    lines = [HEADING, "Written by `scripts/update_structures.py` from each file's own first line."]
    folder = None
    for path in sources():
        if path.parent != folder:
            folder = path.parent
            lines += ["", f"### `{folder.relative_to(REPO)}`", ""]
        in_package = path.is_relative_to(REPO / "python")
        shown = path.name if in_package else path.relative_to(REPO)
        lines.append(f"- `{shown}`: {first_sentence(path)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Replace the list."""
    prose = PAGE.read_text(encoding="utf-8").split(HEADING)[0]
    PAGE.write_text(prose + file_list(), encoding="utf-8")


if __name__ == "__main__":
    main()
