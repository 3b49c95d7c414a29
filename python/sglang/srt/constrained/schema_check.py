"""Checks a JSON schema before it is compiled: refuses or drops what answers could break.

`schema_rules.py` has the rules of a single schema; here is the walk through the schemas in it.

A structural tag has one of two forms, which become the first:

    {"type": "structural_tag", "format": {...}}                           xgrammar's own
    {"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}

The second form is free text in which each trigger begins one of the structures. The library's
documentation ("Structural Tag Usage") describes the formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

import msgspec

from sglang.srt.constrained.constraint import (
    THINK_END,
    THINK_START,
    ConstraintKind,
    GrammarError,
    Reasoning,
)
from sglang.srt.constrained.schema_rules import normalize, problems
from sglang.srt.function_call.gpt_oss_detector import HEADER_MARKS

MAX_DEPTH: Final = 254
"""Most levels of lists and objects: the library's compiler recurses into each."""
_STRUCTURE_FIELDS = {"begin", "schema", "end"}


def prepare_structural_tag(text: str) -> str:
    """Check the structural tag `text` and return it in the first form.

    Raises:
        GrammarError: The text is not JSON, has neither form, or has a schema that cannot be
            enforced.
    """
    try:
        tag = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"structural_tag: not JSON: {error}") from None
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag":
        raise _wrong('expected an object with "type": "structural_tag"')
    given = tag.keys() - {"type"}
    if given == {"structures", "triggers"}:
        tag = {"type": "structural_tag", "format": _triggered(tag["structures"], tag["triggers"])}
    elif given != {"format"}:
        raise _wrong("give format, or structures and triggers, and nothing else")
    for node in json_schema_nodes(tag):
        node["json_schema"] = _prepared(node.get("json_schema"))
    return _encoded(tag, "structural_tag")


_ANY_TEXT: Final = {"type": "any_text"}
_BLANKS: Final[dict[str, Any]] = {"type": "regex", "pattern": r"[ \t\r\n]{0,40}"}


def tag_after_reasoning(
    kind: ConstraintKind, text: str, reasoning: Reasoning, marks: Mapping[str, int]
) -> str:
    """The structural tag of a checked constraint that begins to hold after `reasoning`.

    Args:
        marks: Ids of the tokens of `Vocabulary.marks`, for `Reasoning.MESSAGES`.

    Raises:
        GrammarError: One of them is missing.
    """
    if kind is ConstraintKind.JSON_SCHEMA:
        answer = {"type": "json_schema", "json_schema": msgspec.json.decode(text)}
    elif kind is ConstraintKind.REGEX:
        answer = {"type": "regex", "pattern": text}
    else:
        answer = {"type": "grammar", "grammar": text}
    if reasoning is Reasoning.MESSAGES:
        elements = _messages_before_final(marks)
    else:
        begin = "" if reasoning is Reasoning.BEGUN else THINK_START
        thought = {"type": "tag", "begin": begin, "content": _ANY_TEXT, "end": THINK_END}
        elements = [_BLANKS, thought, _BLANKS]
        if reasoning is Reasoning.POSSIBLE:
            elements = [{"type": "optional", "content": _sequence(*elements)}]
    whole = _sequence(*elements, answer)
    return msgspec.json.encode({"type": "structural_tag", "format": whole}).decode()


def _messages_before_final(marks: Mapping[str, int]) -> list[dict[str, Any]]:
    """Messages of reasoning and for the user, and the header of the answer."""
    missing = [name for name in HEADER_MARKS if name not in marks]
    if missing:
        raise GrammarError(
            f"the tokenizer has no special token {missing[0]}, with which an answer of gpt-oss "
            "begins: leave out --reasoning-parser, or send separate_reasoning: false"
        )
    start, channel, message, end = ({"type": "token", "token": marks[n]} for n in HEADER_MARKS)
    names = [_literal("analysis"), _literal("commentary")]
    text = {"type": "tag", "begin": "", "content": _ANY_TEXT, "end": end}
    one = _sequence(
        channel, {"type": "or", "elements": names}, message, text, start, _literal("assistant")
    )
    return [{"type": "star", "content": one}, channel, _literal("final"), message]


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": elements}


def _literal(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def json_schema_nodes(tag: Any) -> Iterator[dict[str, Any]]:
    """The parts of a structural tag that have a JSON schema. They may be changed meanwhile."""
    stack: list[Any] = [tag]
    while stack:
        node = stack.pop()
        if isinstance(node, dict) and node.get("type") == "json_schema":
            yield node
        elif isinstance(node, dict):
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)


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
    text = _encoded(schema, "structural_tag")
    try:
        return msgspec.json.decode(prepare_json_schema(text))
    except GrammarError as error:
        raise GrammarError(f"structural_tag: {error}") from None


def _encoded(value: Any, field: str) -> str:
    """`value` as JSON. Raises GrammarError if it is nested deeper than `MAX_DEPTH`."""
    level, depth = [value], 0
    while level := [
        child
        for node in level
        if isinstance(node, dict | list)
        for child in (node.values() if isinstance(node, dict) else node)
    ]:
        depth += 1
        if depth >= MAX_DEPTH:
            raise GrammarError(f"{field}: nested too deeply: flatten it")
    return msgspec.json.encode(value).decode()


def _wrong(problem: str) -> GrammarError:
    return GrammarError(f"structural_tag: {problem}")


def prepare_json_schema(text: str) -> str:
    """Check the schema `text` and return the schema to compile, in the library's form.

    Raises:
        GrammarError: The text is not JSON, not a schema, has a keyword that cannot be enforced, or
            no answer that ends fits it.
    """
    return _checked(text, None)


def loosen_json_schema(text: str) -> tuple[str, list[str]]:
    """The schema `text` without the keywords that cannot be enforced, and the places of these.

    Raises:
        GrammarError: The text is not JSON, not a schema, or no answer that ends fits it.
    """
    dropped: list[str] = []
    return _checked(text, dropped), dropped


def _checked(text: str, dropped: list[str] | None) -> str:
    """Refuse keywords that cannot be enforced, or drop them and add their places to `dropped`."""
    try:
        schema = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"json_schema: not JSON: {error}") from None
    stack: list[tuple[str, Any]] = [("#", schema)]
    places: dict[int, str] = {}
    """Identity of each visited schema to its place."""
    needed: dict[int, list[int]] = {}
    """Identity of a schema to those of the schemas that each of its answers has a value for."""
    while stack:
        path, node = stack.pop()
        if isinstance(node, bool) or id(node) in places:
            continue
        if not isinstance(node, dict):
            raise GrammarError(f"json_schema: {path} must be an object or a boolean")
        while (found := next(problems(node), None)) is not None:
            if dropped is None:
                raise GrammarError(f"json_schema: {path}/{found.keyword} {found.text}")
            dropped.append(f"{path}/{found.keyword}")
            if found.instead is None:
                del node[found.keyword]
            else:
                node[found.keyword] = found.instead
        stack.extend(_subschemas(path, node))
        normalize(node)
        places[id(node)] = path
        target = _target(path, node["$ref"], schema) if "$ref" in node else None
        if target is not None:
            stack.append((node["$ref"][:200], target))
        needed[id(node)] = [id(child) for child in _needed(node, target)]
    try:
        TopologicalSorter(needed).prepare()
    except CycleError as error:
        raise GrammarError(
            f"json_schema: {places[error.args[1][0]]} needs a value of itself, so no answer would "
            "end: leave something out of required or minItems"
        ) from None
    return _encoded(schema, "json_schema")


def _target(path: str, ref: object, schema: Any) -> Any:
    """The part of `schema` that a `$ref` points to."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise GrammarError(
            f"json_schema: {path}/$ref must point into the schema itself, as #/$defs/name"
        )
    for part in ref.split("/")[1:]:
        # The library reads no escapes.
        if not isinstance(schema, dict) or part not in schema or "~" in part or "%" in part:
            raise GrammarError(
                f"json_schema: {path}/$ref points to {ref[:100]!r}, which is not there or has "
                "other names than plain ones: use #/$defs/name"
            )
        schema = schema[part]
    return schema


def _needed(node: dict[str, Any], target: Any) -> list[Any]:
    """The schemas in `node` that each answer has a value for; `target` is that of its `$ref`."""
    if target is not None:
        return [target]
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in node:
            return node[keyword] if len(node[keyword]) == 1 else []
    if isinstance(node.get("type"), list) and len(node["type"]) > 1:
        return []
    needed = [node["properties"][name] for name in node.get("required", ())]
    least, prefix = node.get("minItems"), node.get("prefixItems", [])
    if isinstance(least, int) and isinstance(prefix, list):
        needed += prefix[:least]
        if least > len(prefix) and "items" in node:
            needed.append(node["items"])
    return needed


def _subschemas(path: str, node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        named = node.get(keyword)
        if isinstance(named, dict):
            for name, child in named.items():
                yield f"{path}/{keyword}/{name}"[:200], child
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        listed = node.get(keyword)
        if isinstance(listed, list):
            for index, child in enumerate(listed):
                yield f"{path}/{keyword}/{index}"[:200], child
    for keyword in (
        "items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems",
        "propertyNames",
    ):  # fmt: skip
        if keyword in node:
            yield f"{path}/{keyword}"[:200], node[keyword]
