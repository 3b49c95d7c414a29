"""Rules for a single JSON schema: what the grammar library does not hold, and the form it needs.

The library drops keywords silently, alone or beside others, so that an answer could break the
schema. The test `test_schema_products.py` derives the tables from the library's grammars. `oneOf`
is treated as `anyOf`: an answer fits at least one branch, and may fit several.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from sglang.srt.constrained.pattern_check import whole_pattern

UNSUPPORTED: Final = (
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies",
    "contains", "minContains", "maxContains", "uniqueItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
"""Keywords that the library ignores. `"uniqueItems": false` requires nothing."""
_NAMES_BEYOND_ASCII: Final = "a name outside of ASCII"
_UNNAMED_KEYS: Final = "properties that the schema does not name"
_ONE_BOUND: Final = "a bound on one side"
_FAR_BOUNDS: Final = "bounds more than 10000 apart"
_OPEN: Final = (
    "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames",
)  # fmt: skip
NOT_BESIDE: Final[dict[str, tuple[str, ...]]] = {
    "pattern": ("format",),
    "minLength": ("format", "pattern"),
    "maxLength": ("format", "pattern"),
    "multipleOf": (_ONE_BOUND, _FAR_BOUNDS),
    "patternProperties": ("properties",),
    "propertyNames": (
        "properties", "patternProperties", "additionalProperties: false",
        "unevaluatedProperties: false",
    ),
    # An answer that repeats a key has fewer properties than the library counts.
    "minProperties": (_UNNAMED_KEYS,),
    # The library takes such a name for a further property too.
    "additionalProperties": (_NAMES_BEYOND_ASCII,),
    "unevaluatedProperties": (_NAMES_BEYOND_ASCII,),
}  # fmt: skip
"""Keyword to the facts beside which the library ignores it; see `_facts`."""
OVERRIDING: Final[dict[str, frozenset[str]]] = {
    "$ref": frozenset(), "anyOf": frozenset(), "oneOf": frozenset(), "allOf": frozenset(),
    "enum": frozenset({"type"}), "const": frozenset({"type"}),
}  # fmt: skip
"""Keywords for which the library ignores the keywords beside them, with the harmless exceptions."""
_COMBINING: Final = ("anyOf", "oneOf", "allOf")
TYPE_OF: Final = {
    "minLength": "string", "maxLength": "string", "pattern": "string", "format": "string",
    "minimum": "number", "maximum": "number", "exclusiveMinimum": "number",
    "exclusiveMaximum": "number", "multipleOf": "number", "required": "object",
    "minProperties": "object", "maxProperties": "object", "propertyNames": "object",
    "patternProperties": "object", "minItems": "array", "maxItems": "array",
}  # fmt: skip
"""Keywords that the library ignores in a schema without a type, and the type that they are for."""
_IMPLYING: Final[dict[str, frozenset[str]]] = {
    "object": frozenset({"properties", "additionalProperties", "unevaluatedProperties"}),
    "array": frozenset({"items", "prefixItems", "unevaluatedItems"}),
}
"""Type to the keywords that imply it."""
_KEYWORDS: Final = frozenset().union(
    UNSUPPORTED, OVERRIDING, TYPE_OF, ("type",), *_IMPLYING.values()
)
"""Keywords that require something of an answer. Others are titles, examples and the like."""
FORMATS: Final = frozenset(
    (
        "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid",
        "uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer",
    )
)  # fmt: skip
_MAX_MULTIPLE: Final = 1024
_MAX_MULTIPLES_SPAN: Final = 10_000
_PYTHON_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,), "number": (int, float), "integer": (int,), "boolean": (bool,),
    "null": (type(None),), "object": (dict,), "array": (list,),
}  # fmt: skip


class Problem(NamedTuple):
    keyword: str
    text: str
    """The end of a sentence that begins with the keyword's place."""
    instead: Any = None
    """The part of the keyword's value that can be enforced; None: there is none."""


def problems(node: dict[str, Any]) -> Iterator[Problem]:
    """The keywords of a schema that cannot be enforced, without the schemas in it. The schema must
    not change meanwhile."""
    facts = _facts(node)
    for keyword in UNSUPPORTED:
        if keyword in facts:
            yield Problem(keyword, "is not supported: leave it out")
    for keyword in (*_COMBINING, "enum"):
        if keyword in node and (not isinstance(node[keyword], list) or not node[keyword]):
            yield Problem(keyword, "must be a list that is not empty")
    if len(node.get("allOf", ())) > 1:
        yield Problem("allOf", "of several schemas is not supported: merge them")
    if node.get("type") == []:
        yield Problem("type", "must name a type")
    for keyword, harmless in OVERRIDING.items():
        if keyword in node:
            yield from _beside_overriding(keyword, harmless, node)
            return
    yield from _wrong_values(node, facts)
    for keyword, others in NOT_BESIDE.items():
        for other in others if keyword in facts else ():
            if other in facts:
                yield Problem(keyword, f"beside {other} is not supported: leave one of them out")
    if "type" not in node:
        for keyword, kind in TYPE_OF.items():
            if keyword in node and not node.keys() & _IMPLYING.get(kind, frozenset()):
                yield Problem(keyword, f'needs a type beside it: add "type": "{kind}"')


def normalize(node: dict[str, Any]) -> None:
    """Write a schema that has no problems in the library's form."""
    if "enum" in node:
        node["enum"] = [*_fitting("enum", node)]
    if node.keys() & OVERRIDING.keys():
        return
    facts, types = _facts(node), _types(node) or set()
    if "pattern" in facts:
        node["pattern"] = whole_pattern(node["pattern"])
    if "patternProperties" in facts:
        [(pattern, child)] = node["patternProperties"].items()
        node["patternProperties"] = {whole_pattern(pattern): child}
    names = node.get("propertyNames")
    if "propertyNames" not in facts:
        node.pop("propertyNames", None)
    elif isinstance(names, dict) and not names.keys() & OVERRIDING.keys():
        names.setdefault("type", "string")
    # Without these, the library allows no items, and no properties beside their number.
    if "array" in types and not node.keys() & _IMPLYING["array"]:
        node["items"] = True
    if (
        "object" in types
        and node.keys() & {"minProperties", "maxProperties"}
        and not node.keys() & {"properties", *_OPEN}
    ):
        node["additionalProperties"] = True


def _facts(node: dict[str, Any]) -> set[str]:
    """The keywords that require something of an answer, `keyword: false` for that value, and what
    else `NOT_BESIDE` names."""
    types = _types(node)
    facts = {
        f"{keyword}: false" if value is False else keyword
        for keyword, value in node.items()
        if types is None or TYPE_OF.get(keyword) in types | {None}
    }
    if "propertyNames" in facts and _fits_all_names(node["propertyNames"]):
        facts.discard("propertyNames")
    if node.get("minLength") == 0:
        facts.discard("minLength")
    if node.get("minProperties") in (0, 1):
        facts.discard("minProperties")
    properties = node.get("properties")
    if not properties or facts & set(_OPEN):
        facts.add(_UNNAMED_KEYS)
    if isinstance(properties, dict) and not all(map(str.isascii, properties)):
        facts.add(_NAMES_BEYOND_ASCII)
    low = [node[name] for name in ("minimum", "exclusiveMinimum") if _is_number(node, name)]
    high = [node[name] for name in ("maximum", "exclusiveMaximum") if _is_number(node, name)]
    if bool(low) != bool(high):
        facts.add(_ONE_BOUND)
    elif low and min(high) - max(low) >= _MAX_MULTIPLES_SPAN:
        facts.add(_FAR_BOUNDS)
    return facts


def _fits_all_names(schema: object) -> bool:
    if not isinstance(schema, dict):
        return schema is True
    return schema.get("type", "string") == "string" and schema.keys() & _KEYWORDS <= {"type"}


def _beside_overriding(
    keyword: str, harmless: frozenset[str], node: dict[str, Any]
) -> Iterator[Problem]:
    beside = sorted(node.keys() & _KEYWORDS - harmless - {keyword})
    if keyword in _COMBINING and {"type", "properties"} & set(beside):
        # The other keywords say more about an answer than the combination.
        yield Problem(keyword, f"beside {beside[-1]} is not supported: merge them")
    elif beside:
        yield Problem(
            beside[0],
            f"beside {keyword} is not supported: move it into the schema under {keyword}, or "
            "leave it out",
        )
    elif "type" in node and not [*_fitting(keyword, node)]:
        yield Problem("type", f"fits no value of {keyword}: correct it")


def _wrong_values(node: dict[str, Any], facts: set[str]) -> Iterator[Problem]:
    """Keywords whose values cannot be enforced."""
    required, properties = node.get("required", []), node.get("properties", {})
    if not isinstance(properties, dict):
        yield Problem("properties", "must be an object")
    elif not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        yield Problem("required", "must be a list of names")
    elif missing := set(required) - set(properties):
        yield Problem(
            "required",
            f"names {min(missing)[:100]!r}, which properties lacks: add it",
            [name for name in required if name in properties],
        )
    if "multipleOf" in facts:
        if node.get("type") != "integer":
            yield Problem("multipleOf", 'is only supported for type "integer"')
        elif node["multipleOf"] not in range(1, _MAX_MULTIPLE + 1):
            yield Problem("multipleOf", f"must be a whole number from 1 to {_MAX_MULTIPLE}")
    if "format" in facts and str(node["format"]) not in FORMATS:
        yield Problem(
            "format",
            f"{str(node['format'])[:40]!r} is not supported: use one of "
            f"{', '.join(sorted(FORMATS))}, or a pattern",
        )
    if "pattern" in facts:
        yield from _wrong_pattern("pattern", node["pattern"])
    if "patternProperties" in facts:
        patterns = node["patternProperties"]
        if isinstance(patterns, dict) and len(patterns) == 1:
            yield from _wrong_pattern("patternProperties", next(iter(patterns)))
        else:
            # A value whose key fits two patterns would have to fit both schemas.
            yield Problem("patternProperties", "must have one pattern: join them with |")


def _wrong_pattern(keyword: str, pattern: object) -> Iterator[Problem]:
    try:
        whole_pattern(pattern)
    except ValueError as error:
        yield Problem(keyword, f"cannot be enforced: {error}")


def _types(node: dict[str, Any]) -> set[str] | None:
    """The types that a schema allows, with "number" beside "integer"; None: it names none."""
    given = node.get("type")
    if not given:
        return None
    types = {str(kind) for kind in (given if isinstance(given, list) else [given])}
    return types | {"number"} if "integer" in types else types


def _fitting(keyword: str, node: dict[str, Any]) -> Iterator[Any]:
    """The values of `enum` or `const` that fit the `type` beside it."""
    given = node.get("type")
    types = given if isinstance(given, list) else [given]
    for value in node["enum"] if keyword == "enum" else [node["const"]]:
        if given is None or any(_is_of(value, kind) for kind in types):
            yield value


def _is_of(value: object, kind: object) -> bool:
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    wanted = _PYTHON_TYPES.get(str(kind), ())
    return isinstance(value, wanted) and (kind == "boolean" or not isinstance(value, bool))


def _is_number(node: dict[str, Any], keyword: str) -> bool:
    value = node.get(keyword)
    return isinstance(value, int | float) and not isinstance(value, bool)
