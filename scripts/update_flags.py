#!/usr/bin/env python3
"""Writes the tables of docs/flags.md, from the table of flags that are none here.

    python scripts/update_flags.py

Replaces everything from the heading `## Flags of SGLang` on; keeps the prose above it.
"""

from __future__ import annotations

from pathlib import Path

from sglang.srt.arg_groups.foreign_flags import SGLANG_FLAGS, ForeignFlags, Treatment

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"
HEADING = "## Flags of SGLang\n"
SECTIONS = {
    "Refused": (Treatment.NEVER, Treatment.NOT_YET),
    "Ignored, with one warning": (Treatment.IGNORED,),
    "Accepted": (Treatment.OFF,),
}


def flags_of(row: ForeignFlags) -> str:
    """The flags of a row, each with the values at which it asks for nothing."""
    shown = []
    for pattern, values in row.patterns.items():
        name = f"`--{pattern.replace('_', '-')}`"
        neutral = ", ".join(f"`{value}`" for value in values if value)
        shown.append(f"{name} ({neutral}: accepted)" if neutral else name)
    return ", ".join(shown)


def tables() -> str:
    """The generated part of the page."""
    lines = [
        HEADING,
        "Written by `scripts/update_flags.py`. A `*` stands for any end; the first row that fits "
        "counts.",
    ]
    for title, treatments in SECTIONS.items():
        rows = [row for row in SGLANG_FLAGS if row.treatment in treatments]
        lines += ["", f"### {title}", "", "| about | flags |", "|---|---|"]
        for row in rows:
            when = ", not yet" if row.treatment is Treatment.NOT_YET else ""
            lines.append(f"| {row.feature}{when} | {flags_of(row)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Replace the tables in the page."""
    prose = PAGE.read_text(encoding="utf-8").split(HEADING)[0]
    PAGE.write_text(prose + tables(), encoding="utf-8")


if __name__ == "__main__":
    main()
