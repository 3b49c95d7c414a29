#!/usr/bin/env python3
"""Writes the tables of fields in docs/api.md, from the types of the bodies and their marks.

    python scripts/update_api.py

Replaces the section `## Fields`; keeps the rest of the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sglang.srt.entrypoints.anthropic.protocol import MessagesBody
from sglang.srt.entrypoints.http.body import NOTHING, Ignored, Refused, marks_of
from sglang.srt.entrypoints.native_protocol import SAMPLING_MARKS, GenerateBody
from sglang.srt.entrypoints.openai.protocol import (
    ChatBody,
    ChatMessage,
    CommonBody,
    CompletionBody,
    Tool,
)
from sglang.srt.entrypoints.openai.responses_protocol import ResponsesBody
from sglang.srt.sampling.sampling_params import SamplingParams

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
HEADING = "## Fields\n"
BODIES: dict[str, type[msgspec.Struct]] = {
    "generate": GenerateBody,
    "completions": CompletionBody,
    "chat": ChatBody,
    "messages": ChatMessage,
    "tools": Tool,
    "responses": ResponsesBody,
    "Anthropic's": MessagesBody,
}
"""Where a field stands, in short, to the type that has it."""


def code(words: Iterable[str]) -> str:
    """`words` in backticks, with commas."""
    return ", ".join(f"`{word}`" for word in words)


def names_of(kind: type[msgspec.Struct]) -> list[str]:
    """The fields of `kind`, as clients write them."""
    return [field.encode_name for field in msgspec.structs.fields(kind)]


def acted_on() -> dict[str, list[str]]:
    """Place to the fields that are acted on there."""
    plain = {
        where: [name for name in names_of(kind) if name not in marks_of(kind)]
        for where, kind in BODIES.items()
    }
    common = [name for name in names_of(CommonBody) if name not in marks_of(CommonBody)]
    return {
        "`/generate`": plain["generate"],
        "`sampling_params` of it": [
            *(name for name in names_of(SamplingParams) if name not in SAMPLING_MARKS),
            "no_stop_trim",
        ],
        "completions and chat": common,
        "`/v1/completions`": [name for name in plain["completions"] if name not in common],
        "`/v1/chat/completions`": [name for name in plain["chat"] if name not in common],
        "`messages` of it": plain["messages"],
        "`/v1/responses`": plain["responses"],
        "`/v1/messages`": plain["Anthropic's"],
    }


@dataclass
class Row:
    """Fields that have equal marks in the same places."""

    mark: Ignored | Refused
    where: str
    names: list[str]


def marked() -> list[Row]:
    """The marked fields, by place."""
    places: dict[tuple[str, str], list[str]] = {}
    marks: dict[str, Ignored | Refused] = {}
    by_place: dict[str, Mapping[str, Ignored | Refused]] = {"sampling_params": SAMPLING_MARKS} | {
        w: marks_of(k) for w, k in BODIES.items()
    }
    for where, fields in by_place.items():
        for name, mark in fields.items():
            marks[repr(mark)] = mark
            places.setdefault((name, repr(mark)), []).append(where)
    rows: dict[tuple[str, str], Row] = {}
    for (name, mark_key), found in places.items():
        where = ", ".join(found)
        rows.setdefault((where, mark_key), Row(marks[mark_key], where, [])).names.append(name)
    return sorted(rows.values(), key=lambda row: row.where)


def more_of(neutral: tuple[object, ...]) -> str:
    """What a field accepts, if that is not `NOTHING`."""
    if neutral == NOTHING:
        return ""
    values = [value for value in neutral if not any(value is one for one in NOTHING)]
    if neutral[: len(NOTHING)] == NOTHING:
        return "also " + code(msgspec.json.encode(value).decode() for value in values)
    return "only " + code(msgspec.json.encode(value).decode() for value in (None, *values))


def section() -> str:
    """The generated part of the page."""
    lines = [
        HEADING,
        "Written by `scripts/update_api.py` from the types of the bodies. `null` is accepted "
        "everywhere, and means absent.",
        "",
        "| Acted on in | fields |",
        "|---|---|",
        *(f"| {where} | {code(names)} |" for where, names in acted_on().items()),
        "",
        "| Accepted without effect | in | because |",
        "|---|---|---|",
    ]
    rows = marked()
    lines += [
        f"| {code(row.names)} | {row.where} | {row.mark.why} |"
        for row in rows
        if isinstance(row.mark, Ignored)
    ]
    lines += [
        "",
        "Other names are refused with a 400, and so are these unless their value asks for nothing:",
        "`null`, `false`, an empty text, list or object, or what the third column says; in a batch",
        "also a list of such values.",
        "",
        "| Refused | in | accepted values | instead |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {code(row.names)} | {row.where} | {more_of(row.mark.neutral)} | {row.mark.remedy} |"
        for row in rows
        if isinstance(row.mark, Refused)
    ]
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """`page` with the section as it must be."""
    before, rest = page.split(HEADING)
    after = rest[rest.index("\n## ") :]
    return before + section() + after


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
