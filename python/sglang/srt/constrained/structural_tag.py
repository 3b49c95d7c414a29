"""Prepares a structural tag for the compiler: converts SGLang's two forms to one, checks schemas.

    {"type": "structural_tag", "format": {...}}                           xgrammar's own
    {"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}

The second form is free text in which each trigger begins one of the structures. The library's
documentation ("Structural Tag Usage") describes the formats.
"""

from __future__ import annotations

from typing import Any

import orjson

from sglang.srt.constrained.constraint import GrammarError
from sglang.srt.constrained.schema_check import prepare_json_schema

_STRUCTURE_FIELDS = {"begin", "schema", "end"}


def prepare_structural_tag(text: str) -> str:
    """Check the structural tag `text` and return it in the first form.

    Raises:
        GrammarError: The text is not JSON, has neither form, or has a schema that cannot be
            enforced.
    """
    try:
        tag = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise GrammarError(f"structural_tag: not JSON: {error}") from None
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag":
        raise _wrong('expected an object with "type": "structural_tag"')
    given = tag.keys() - {"type"}
    if given == {"structures", "triggers"}:
        tag = {"type": "structural_tag", "format": _triggered(tag["structures"], tag["triggers"])}
    elif given != {"format"}:
        raise _wrong("give format, or structures and triggers, and nothing else")
    stack: list[Any] = [tag["format"]]
    while stack:
        node = stack.pop()
        if isinstance(node, dict) and node.get("type") == "json_schema":
            node["json_schema"] = _prepared(node.get("json_schema"))
        elif isinstance(node, dict):
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)
    try:
        return orjson.dumps(tag).decode()
    except orjson.JSONEncodeError:
        raise _wrong("nested too deeply: flatten it") from None


def _triggered(structures: Any, triggers: Any) -> dict[str, Any]:
    """The format that is equivalent to the second form."""
    if not isinstance(structures, list) or not structures:
        raise _wrong("structures must be a list of objects with begin, schema and end")
    for index, one in enumerate(structures):
        if not isinstance(one, dict) or one.keys() != _STRUCTURE_FIELDS:
            raise _wrong(f"structures[{index}] must have begin, schema and end, and nothing else")
    return {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": [
            {
                "type": "tag",
                "begin": one["begin"],
                "content": {"type": "json_schema", "json_schema": one["schema"]},
                "end": one["end"],
            }
            for one in structures
        ],
    }


def _prepared(schema: Any) -> Any:
    try:
        return orjson.loads(prepare_json_schema(orjson.dumps(schema).decode()))
    except GrammarError as error:
        raise GrammarError(f"structural_tag: {error}") from None
    except orjson.JSONEncodeError:
        raise _wrong("nested too deeply: flatten it") from None


def _wrong(problem: str) -> GrammarError:
    return GrammarError(f"structural_tag: {problem}")
