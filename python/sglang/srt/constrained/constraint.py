"""The constraint on the form of a request's output: its kind, its text and their sources."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, NamedTuple

import msgspec

JSON_OBJECT_SCHEMA: Final = '{"type":"object"}'
"""Any JSON object: the meaning of OpenAI's `response_format` of type `json_object`."""


MAX_CONSTRAINT_BYTES: Final = 64 << 10
"""Longest text of a constraint."""


class ConstraintKind(str, Enum):
    """The sampling parameter that has the text; errors name it."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"
    """Free text with constrained parts; see `schema_check.py`."""


class GrammarError(ValueError):
    """A constraint that cannot be enforced. The message is one line and names the field."""


THINK_START: Final = "<think>"
THINK_END: Final = "</think>"


class Reasoning(str, Enum):
    """The reasoning before a constrained output, which the constraint leaves free."""

    NONE = "none"
    POSSIBLE = "possible"
    """There is some if the output begins with `<think>`."""
    BEGUN = "begun"
    """The output begins inside it."""
    MESSAGES = "messages"
    """gpt-oss: the messages before the one of the channel `final`."""


class Constraint(NamedTuple):
    """One constraint. Hashable: the key of its grammar in the cache."""

    kind: ConstraintKind
    text: str
    reasoning: Reasoning = Reasoning.NONE


def constraint_of_response_format(
    response_format: Mapping[str, Any] | None,
) -> Constraint | None:
    """OpenAI's `response_format` as a constraint, or None if the format allows any output.
    `strict` and `name` change nothing: a schema is always enforced. A ValueError names a wrong
    field and its valid values."""
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(ConstraintKind.JSON_SCHEMA, JSON_OBJECT_SCHEMA)
    if kind == "structural_tag":
        given = {name: value for name, value in response_format.items() if value is not None}
        return Constraint(ConstraintKind.STRUCTURAL_TAG, msgspec.json.encode(given).decode())
    if kind != "json_schema":
        raise ValueError(
            f"response_format.type={kind!r} is not known: use text, json_object, json_schema or "
            "structural_tag"
        )
    outer = response_format.get("json_schema")
    if not isinstance(outer, Mapping):
        raise ValueError("response_format.json_schema is missing: give it as an object with schema")
    schema = outer.get("schema")
    if not isinstance(schema, (Mapping, bool)):
        raise ValueError("response_format.json_schema.schema is missing: give a JSON schema")
    return Constraint(ConstraintKind.JSON_SCHEMA, msgspec.json.encode(schema).decode())
