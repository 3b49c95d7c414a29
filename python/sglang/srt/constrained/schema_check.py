"""Checks a JSON schema before it is compiled; refuses keywords that the grammar library ignores.

The library drops unknown keywords silently, so that an answer could break the schema. `oneOf` is
treated as `anyOf`: an answer fits at least one branch, and may fit several.

A structural tag has one of two forms, which become the first:

    {"type": "structural_tag", "format": {...}}                           xgrammar's own
    {"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}

The second form is free text in which each trigger begins one of the structures. The library's
documentation ("Structural Tag Usage") describes the formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import orjson

from sglang.srt.constrained.constraint import GrammarError

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


_UNSUPPORTED: Final = (
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies",
    "contains", "minContains", "maxContains", "uniqueItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_ANNOTATIONS: Final = frozenset(
    (
        "$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "title", "description",
        "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "nullable",
        "discriminator",
    )
)  # fmt: skip
_NEEDS_TYPE: Final = {
    "minLength": "string", "maxLength": "string", "pattern": "string", "format": "string",
    "minimum": "number", "maximum": "number", "exclusiveMinimum": "number",
    "exclusiveMaximum": "number", "multipleOf": "number", "required": "object",
    "minProperties": "object", "maxProperties": "object", "propertyNames": "object",
    "minItems": "array", "maxItems": "array",
}  # fmt: skip
_OVERRIDING: Final[dict[str, frozenset[str]]] = {
    "$ref": frozenset(), "anyOf": frozenset(), "oneOf": frozenset(), "allOf": frozenset(),
    "enum": frozenset({"type"}), "const": frozenset({"type"}),
}  # fmt: skip
"""Keywords for which the library ignores the keywords beside them, with the harmless exceptions."""
_FORMATS: Final = frozenset(
    (
        "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid",
        "uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer",
    )
)  # fmt: skip


def prepare_json_schema(text: str) -> str:
    """Check the schema `text` and return the schema to compile. The library needs `items` in every
    array schema; a schema without it gets `"items": true`.

    Raises:
        GrammarError: The text is not JSON, not a schema, or has a keyword that cannot be enforced.
    """
    try:
        schema = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise GrammarError(f"json_schema: not JSON: {error}") from None
    stack: list[tuple[str, Any]] = [("#", schema)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise GrammarError(f"json_schema: {path} must be an object or a boolean")
        _check_node(path, node)
        stack.extend(_subschemas(path, node))
    try:
        return orjson.dumps(schema).decode()
    except orjson.JSONEncodeError:
        raise GrammarError("json_schema: nested too deeply: flatten it") from None


def _check_node(path: str, node: dict[str, Any]) -> None:
    for keyword in _UNSUPPORTED:
        # `"uniqueItems": false` requires nothing.
        if keyword in node and node[keyword] is not False:
            raise GrammarError(f"json_schema: {path}/{keyword} is not supported: leave it out")
    if "$ref" in node:
        ref = node["$ref"]
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise GrammarError(
                f"json_schema: {path}/$ref must point into the schema itself, as #/$defs/name"
            )
    if isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1:
        raise GrammarError(
            f"json_schema: {path}/allOf of several schemas is not supported: merge them"
        )
    for keyword, harmless in _OVERRIDING.items():
        if keyword in node:
            beside = sorted(set(node) - _ANNOTATIONS - harmless - {keyword})
            if beside:
                raise GrammarError(
                    f"json_schema: {path}/{beside[0]} beside {keyword} is not supported: move it "
                    f"into the schema under {keyword}, or leave it out"
                )
            return
    _check_keywords(path, node)
    _check_type(path, node)


def _check_keywords(path: str, node: dict[str, Any]) -> None:
    """Refuse combinations of keywords that cannot be enforced together."""
    required, properties = node.get("required", []), node.get("properties", {})
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise GrammarError(f"json_schema: {path}/required must be a list of names")
    if not isinstance(properties, dict):
        raise GrammarError(f"json_schema: {path}/properties must be an object")
    missing = set(required) - set(properties)
    if missing:
        name = min(missing)[:100]
        raise GrammarError(
            f"json_schema: {path}/required names {name!r}, which {path}/properties lacks: add it"
        )
    if "multipleOf" in node and node.get("type") != "integer":
        raise GrammarError(f'json_schema: {path}/multipleOf is only supported for type "integer"')
    if "pattern" in node and ("minLength" in node or "maxLength" in node):
        raise GrammarError(
            f"json_schema: {path}/pattern with minLength or maxLength is not supported: write "
            "the length into the pattern"
        )
    if "format" in node and str(node["format"]) not in _FORMATS:
        raise GrammarError(
            f"json_schema: {path}/format {str(node['format'])[:40]!r} is not supported: use one "
            f"of {', '.join(sorted(_FORMATS))}, or a pattern"
        )


def _check_type(path: str, node: dict[str, Any]) -> None:
    if "type" not in node:
        for keyword, kind in _NEEDS_TYPE.items():
            implied = (kind == "object" and "properties" in node) or (
                kind == "array" and node.keys() & {"items", "prefixItems"}
            )
            if keyword in node and not implied:
                raise GrammarError(
                    f'json_schema: {path}/{keyword} needs a type beside it: add "type": "{kind}"'
                )
    types = node.get("type")
    is_array = types == "array" or (isinstance(types, list) and "array" in types)
    if is_array and not node.keys() & {"items", "prefixItems", "unevaluatedItems"}:
        node["items"] = True


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
