#!/usr/bin/env python3
"""Writes tables in docs/api.md: fields, from the types of the bodies and their marks, and keywords
of schemas, from the rules of schemas.

    python scripts/update_api.py

Replaces the sections `## Fields` and `### Keywords of schemas`; keeps the rest of the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sglang.srt.constrained.schema_rules import (
    FORMATS,
    NOT_BESIDE,
    OVERRIDING,
    TYPE_OF,
    UNSUPPORTED,
)
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
KEYWORDS_HEADING = "### Keywords of schemas\n"
BODIES: dict[str, type[msgspec.Struct]] = {
    "generate": GenerateBody,
    "completions": CompletionBody,
    "chat": ChatBody,
    "messages": ChatMessage,
    "tools": Tool,
    "responses": ResponsesBody,
    "Anthropic's": MessagesBody,
}
"""Maps the short name of a body or part, as the table shows it, to its type."""


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
    """The table's note on the neutral values of a field, empty for `NOTHING`."""
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


def keywords_section() -> str:
    """The generated part about schemas."""
    lines = [
        KEYWORDS_HEADING,
        "Written by `scripts/update_api.py` from `schema_rules.py`. Answers could break these "
        "keywords, so that a schema is refused with their place. In the `parameters` of a tool "
        "whose call is enforced, they are dropped, with one warning in the log for each schema; "
        "with `required` or a named function, `strict: true` refuses them there too.",
        "",
        "| keyword | refused |",
        "|---|---|",
        f"| {code(UNSUPPORTED)} | always; `false` requires nothing |",
        *(
            f"| `{keyword}` | beside {', '.join(map(quoted, others))} |"
            for keyword, others in NOT_BESIDE.items()
        ),
        f"| any other | beside {code(OVERRIDING)}; `type` may be beside `enum` and `const` |",
        f"| {code(TYPE_OF)} | without the type that they are for |",
        f"| `format` | if it is none of {code(sorted(FORMATS))} |",
        "| `pattern`, `patternProperties` | with lookarounds, flags, back references, `^` or `$` "
        "inside, letters escaped that are no class, or a quote, a backslash or a control character "
        "alone; `patternProperties` with several patterns |",
        '| `multipleOf` | for other types than "integer", or other values than 1 to 1024 |',
        "| `required` | with names that `properties` lacks, or if no answer would end |",
        "| `allOf` | with several schemas |",
        "| `$ref` | to another document, or with escapes |",
        "",
        "- `oneOf` means `anyOf`. Properties come in the schema's order, and others only where it "
        "allows them.",
        "- `format` means the form: a `date` may be the 30th of February.",
        "- A `pattern` without `^` and `$` matches the whole string; with one of them, the other "
        "end is free.",
        "- Strings with a length or a `pattern` have no escapes, and so no quotes or line breaks.",
    ]
    return "\n".join(lines) + "\n"


def quoted(fact: str) -> str:
    """A fact of `NOT_BESIDE`, with a keyword in backticks."""
    is_keyword = " " not in fact.removesuffix(": false")
    return f"`{fact}`" if is_keyword else fact


def updated(page: str) -> str:
    """`page` with the section as it must be."""
    for heading, write in ((HEADING, section), (KEYWORDS_HEADING, keywords_section)):
        before, rest = page.split(heading)
        page = before + write() + rest[rest.index("\n## ") :]
    return page


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
