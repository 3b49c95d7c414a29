"""Values of tool parameters that a model wrote as plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

_STRING: Final = frozenset({"string"})
_PYTHON_WORDS: Final = {"True": True, "False": False, "None": None}
"""Chat templates show values as Python prints them, so models write them so."""


def parse_json(text: str) -> Any:
    """The value of the JSON text `text`, without the constants that only some readers know.

    Raises:
        ValueError: The text is not JSON.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_json_object(text: str) -> dict[str, Any]:
    """Like `parse_json`, but the value must be an object."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def typed_value(text: str, parameters: Mapping[str, Any], name: str) -> Any:
    """The value of the parameter `name`, if its schema allows the type; else the text itself.

    Args:
        parameters: JSON schema of all parameters.
    """
    properties = parameters.get("properties")
    allowed = allowed_types(properties.get(name) if isinstance(properties, Mapping) else None)
    if allowed == _STRING:
        return text
    word = text.strip()
    try:
        value = _PYTHON_WORDS[word] if word in _PYTHON_WORDS else parse_json(word)
    except ValueError:
        return text
    return value if not allowed.isdisjoint(_types_of(value)) else text


def allowed_types(schema: object) -> frozenset[str]:
    """Names of the JSON types that a schema allows. A schema without a type allows strings."""
    if not isinstance(schema, Mapping):
        return _STRING
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        if isinstance(branches, list) and branches:
            return frozenset().union(*map(allowed_types, branches))
    if isinstance(schema.get("enum"), list):
        return frozenset(name for value in schema["enum"] for name in _types_of(value))
    return frozenset({"object", "array"}) if "$ref" in schema else _STRING


def _types_of(value: object) -> tuple[str, ...]:
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int():
            return ("integer", "number")
        case float():
            return ("number",)
        case str():
            return ("string",)
        case list():
            return ("array",)
    return ("object",)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
