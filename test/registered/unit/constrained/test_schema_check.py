"""Schemas that are refused, keywords that are dropped, and the form that the library gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang.srt.constrained.constraint import GrammarError
from sglang.srt.constrained.pattern_check import whole_pattern
from sglang.srt.constrained.schema_check import (
    loosen_json_schema,
    prepare_json_schema,
    prepare_structural_tag,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

BROKEN: dict[str, Any] = {"type": "string", "format": "date", "maxLength": 12}
NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"not": {}}, "#/not is not supported"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "#/uniqueItems"),
        ({"properties": {"a": {"minimum": 3}}}, '#/properties/a/minimum needs a type .*"number"'),
        ({"patternProperties": {"^a": {}}}, '#/patternProperties needs a type .*"object"'),
        ({"type": "number", "multipleOf": 0.5}, "#/multipleOf is only supported for"),
        ({"type": "integer", "multipleOf": 1.5}, "#/multipleOf must be a whole number"),
        ({"type": "integer", "multipleOf": 5, "minimum": 0}, "multipleOf beside a bound on one"),
        ({"type": "object", "required": ["a"]}, "required names 'a'"),
        ({"type": "object", "required": 3}, "required must be a list"),
        ({"type": "object", "properties": []}, "properties must be an object"),
        ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {}}, r"minimum beside \$ref"),
        ({"$ref": "http://example.com/s"}, r"\$ref must point into the schema itself"),
        ({"$ref": "#/$defs/b", "$defs": {"a": {}}}, r"#/\$ref points to '#/\$defs/b'"),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a~1b": {}, "a/b": {}}}, r"#/\$ref points to"),
        ({"$ref": "#/hidden", "hidden": {"not": {}}}, "#/hidden/not is not supported"),
        ({"allOf": [{}, {}]}, "allOf of several"),
        ({"anyOf": []}, "#/anyOf must be a list that is not empty"),
        ({"anyOf": [{"type": "integer"}], "minimum": 3}, "minimum beside anyOf"),
        ({**NAMED, "anyOf": [{"required": ["a"]}]}, "#/anyOf beside type"),
        ({"type": "string", "enum": [1, None]}, "#/type fits no value of enum"),
        ({"type": []}, "#/type must name a type"),
        ({"type": "string", "format": "frob"}, "format 'frob'"),
        (BROKEN, "#/maxLength beside format"),
        ({"type": "string", "format": "date", "pattern": "a"}, "#/pattern beside format"),
        ({"type": "string", "pattern": "a", "maxLength": 2}, "#/maxLength beside pattern"),
        ({"type": "string", "pattern": "^(?!a)"}, "#/pattern cannot be enforced: only"),
        ({**NAMED, "patternProperties": {"^b": {}}}, "patternProperties beside properties"),
        ({"type": "object", "patternProperties": {"^b": {}, "c": {}}}, "must have one pattern"),
        ({"type": "object", "patternProperties": {"(?=b)": {}}}, "patternProperties cannot be"),
        ({**NAMED, "propertyNames": {"maxLength": 3}}, "propertyNames beside properties"),
        ({"type": "object", "minProperties": 2}, "minProperties beside properties that"),
        (
            {"type": "object", "properties": {"\u00fc": {}}, "additionalProperties": True},
            "additionalProperties beside a name outside of ASCII",
        ),
        ({"anyOf": [3]}, "#/anyOf/0 must be an object"),
        ([], "# must be an object"),
    ],
)
def test_what_answers_could_break_is_refused_by_its_place(schema: object, says: str) -> None:
    with pytest.raises(GrammarError, match=says):
        prepare_json_schema(json.dumps(schema))


@pytest.mark.parametrize(
    ("around", "place"),
    [
        ({"type": "object", "properties": {"p": BROKEN}}, "#/properties/p"),
        ({"type": "object", "additionalProperties": BROKEN}, "#/additionalProperties"),
        ({"type": "object", "unevaluatedProperties": BROKEN}, "#/unevaluatedProperties"),
        ({"type": "object", "patternProperties": {"^p": BROKEN}}, "#/patternProperties/^p"),
        ({"type": "object", "propertyNames": BROKEN}, "#/propertyNames"),
        ({"type": "array", "items": BROKEN}, "#/items"),
        ({"type": "array", "prefixItems": [{}, BROKEN]}, "#/prefixItems/1"),
        ({"type": "array", "unevaluatedItems": BROKEN}, "#/unevaluatedItems"),
        ({"anyOf": [{}, {"oneOf": [{"allOf": [BROKEN]}]}]}, "#/anyOf/1/oneOf/0/allOf/0"),
        ({"definitions": {"d": BROKEN}}, "#/definitions/d"),
        ({"$ref": "#/x/y", "x": {"y": BROKEN}}, "#/x/y"),
    ],
)
def test_every_position_is_checked(around: dict[str, Any], place: str) -> None:
    text = json.dumps(around)
    with pytest.raises(GrammarError) as error:
        prepare_json_schema(text)
    assert str(error.value).startswith(f"json_schema: {place}/maxLength beside format")
    loosened, dropped = loosen_json_schema(text)
    assert dropped == [f"{place}/maxLength"]
    assert prepare_json_schema(loosened) == loosened


@pytest.mark.parametrize(
    ("schema", "loosened", "dropped"),
    [
        (BROKEN, {"type": "string", "format": "date"}, ["maxLength"]),
        ({**NAMED, "not": {}, "if": {}, "then": {}}, NAMED, ["not", "if", "then"]),
        ({**NAMED, "anyOf": [{"required": ["a"]}]}, NAMED, ["anyOf"]),
        (
            {**NAMED, "required": ["b", "a"], "propertyNames": {"maxLength": 3}},
            {**NAMED, "required": ["a"]},
            ["required", "propertyNames"],
        ),
        ({"enum": ["a"], "minLength": 1}, {"enum": ["a"]}, ["minLength"]),
        ({"anyOf": [{"type": "null"}], "minimum": 1}, {"anyOf": [{"type": "null"}]}, ["minimum"]),
        ({"type": "string", "pattern": "(?i)a"}, {"type": "string"}, ["pattern"]),
        (
            {"type": "object", "properties": {"\u00fc": {}}, "additionalProperties": True},
            {"type": "object", "properties": {"\u00fc": {}}},
            ["additionalProperties"],
        ),
    ],
)
def test_loosening_drops_what_is_not_held_and_keeps_the_rest(
    schema: dict[str, Any], loosened: dict[str, Any], dropped: list[str]
) -> None:
    text, places = loosen_json_schema(json.dumps(schema))
    assert json.loads(text) == loosened
    assert places == [f"#/{keyword}" for keyword in dropped]


@pytest.mark.parametrize(
    "schema", [[], {"$ref": "http://x"}, {"items": 3}, {"properties": {"a": 1}}]
)
def test_what_is_no_schema_is_refused_even_if_keywords_are_dropped(schema: object) -> None:
    with pytest.raises(GrammarError):
        loosen_json_schema(json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "prepared"),
    [
        ({"type": "array"}, {"type": "array", "items": True}),
        ({"type": "object", "maxProperties": 1}, {"additionalProperties": True}),
        ({"type": "string", "enum": ["a", None, 1]}, {"enum": ["a"]}),
        (
            {"type": ["integer", "null"], "enum": [True, 1.0, 2, None, 0.5]},
            {"enum": [1.0, 2, None]},
        ),
        ({"type": "string", "pattern": "^a"}, {"pattern": "^a.*$"}),
        ({"type": "object", "patternProperties": {"b$": {}}}, {"patternProperties": {"^.*b$": {}}}),
    ],
)
def test_the_library_gets_the_form_that_it_needs(
    schema: dict[str, Any], prepared: dict[str, Any]
) -> None:
    assert json.loads(prepare_json_schema(json.dumps(schema))) == {**schema, **prepared}


@pytest.mark.parametrize(
    "schema",
    [
        # Keywords for values of other types require nothing.
        {"type": "integer", "format": "int64", "minLength": 2, "pattern": "(?=a)"},
        {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
        {"type": "array", "items": {}, "uniqueItems": False},
        # The TypeScript library zod writes records this way.
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        {**NAMED, "minProperties": 1, "additionalProperties": True},
        {"type": "string", "enum": ["a"], "markdownDescription": "x", "nullable": False},
        # Schemas of themselves, with a way out.
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"type": "null"}]},
    ],
)
def test_what_is_held_is_not_refused(schema: dict[str, Any]) -> None:
    prepare_json_schema(json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#"),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, "#"),
        ({"anyOf": [{"allOf": [{"$ref": "#"}]}]}, "#"),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            },
            "",
        ),
    ],
)
def test_schemas_whose_answers_would_never_end_are_refused(
    schema: dict[str, Any], place: str
) -> None:
    with pytest.raises(GrammarError, match=rf"json_schema: {place}\S* needs a value of itself"):
        prepare_json_schema(json.dumps(schema))


def test_schemas_that_nest_deeply_are_refused() -> None:
    for depth in (300, 900, 5000):
        with pytest.raises(GrammarError, match=r"nested too deeply|not JSON"):
            prepare_json_schema('{"type":"array","items":' * depth + "{}" + "}" * depth)


def test_schemas_that_are_referred_to_often_are_checked_once() -> None:
    """Each level refers twice to the next: a walk along the references would not end."""
    levels = {f"l{i}": {"anyOf": [{"$ref": f"#/$defs/l{i + 1}"}] * 2} for i in range(60)}
    schema = {"$ref": "#/$defs/l0", "$defs": {**levels, "l60": {"type": "null"}}}
    prepare_json_schema(json.dumps(schema))


@pytest.mark.parametrize(
    ("pattern", "whole"),
    [
        ("a", "a"),
        ("^a$", "^a$"),
        ("^a", "^a.*$"),
        ("a$", "^.*a$"),
        ("^a|b$|c", "^a.*$|^.*b$|c"),
        ("^(a|b)", "^(a|b).*$"),
        (r"^a\$", r"^a\$.*$"),
        (r"^a\\d$", None),
        (r"^[|^$)(]$", r"^[|^$)(]$"),
        (r"^[^\n\"]+$", r"^[^\n\"]+$"),
        (r"^[\]a]$", r"^[\]a]$"),
        (r"^\u0041-\x42\.$", r"^\u0041-\x42\.$"),
    ],
)
def test_patterns_become_patterns_of_whole_strings(pattern: str, whole: str | None) -> None:
    if whole is None:
        with pytest.raises(ValueError, match="a backslash"):
            whole_pattern(pattern)
    else:
        assert whole_pattern(pattern) == whole


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(?=a)b", "no lookarounds"),
        ("(?<x>a)", "no lookarounds"),
        ("a(?<!b)", "no lookarounds"),
        ("a$b", r"\$ is only supported at an end"),
        ("(^a)", r"\^ is only supported at an end"),
        ("a^", r"\^ is only supported at an end"),
        (r"\bword", r"the escape '\\\\b'"),
        (r"(a)\1", r"the escape '\\\\1'"),
        (r"[\p{L}]", r"the escape '\\\\p'"),
        ("a\\", r"the escape '\\\\'"),
        ('"', "a quote"),
        (r"\x22", "a quote"),
        (r"a\n", "a control character"),
        ("a\t", "a control character"),
        (r'[\\"]', "a class of quotes"),
        (r"[\x00-\x1f]", "a class of quotes"),
        ("[]", "is empty or does not end"),
        ("[a", "is empty or does not end"),
        (7, "must be text"),
    ],
)
def test_patterns_that_answers_could_break_are_refused(pattern: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        whole_pattern(pattern)


def test_a_schema_in_a_structural_tag_is_refused_too() -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": BROKEN}}
    with pytest.raises(GrammarError, match=r"^structural_tag: json_schema: #/maxLength beside"):
        prepare_structural_tag(json.dumps(tag))
