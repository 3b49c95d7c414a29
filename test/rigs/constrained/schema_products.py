"""Products of JSON schema keywords, and the texts that a grammar of each allows.

`jsonschema` judges the texts. Some are the same for all schemas of a product, and others are drawn
from the grammar itself, character by character.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import jsonschema
import xgrammar

from sglang.srt.constrained.constraint import GrammarError
from sglang.srt.constrained.grammar import allocate_bitmask, json_ebnf
from sglang.srt.constrained.schema_check import prepare_json_schema
from sglang.srt.constrained.schema_rules import problems

Schema = Mapping[str, Any]
ABSENT: Final = object()
INTEGER: Final = {"type": "integer"}
STRING: Final = {"type": "string"}
NAMED: Final = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
NAMED_TWO: Final = {"a": INTEGER, "b": STRING}


class Product(NamedTuple):
    keywords: Mapping[str, Sequence[Any]]
    """Keyword to its values; `ABSENT` leaves it out."""
    texts: Sequence[str]

    def schemas(self) -> Iterator[dict[str, Any]]:
        for values in itertools.product(*self.keywords.values()):
            pairs = zip(self.keywords, values, strict=True)
            yield {keyword: value for keyword, value in pairs if value is not ABSENT}


def _objects() -> list[str]:
    texts = ["{}", "1", '{"a": 1, "b": 2, "c": 3}', '{"a": "x", "b": "x", "ab": "x"}']
    for keys in itertools.chain.from_iterable(
        itertools.permutations(["a", "b", "c", "ab", "\u00e9"], n) for n in (1, 2)
    ):
        for values in itertools.product([1, "x"], repeat=len(keys)):
            pairs = dict(zip(keys, values, strict=True))
            texts.append(json.dumps(pairs, ensure_ascii=False))
    for first, second in itertools.product(['"a"', '"b"', r'"\u0061"', r'"\u00e9"'], repeat=2):
        texts += [f"{{{first}:1, {second}:2}}", f'{{{first}:1, {second}:"x"}}']
    return texts


def _strings() -> list[str]:
    values = (
        "a", "b", "ab", "ba", "abc", "xay", "foobar", "", "A", "1", "12", "a1", "a b", " ", "\t",
        "\n",
        '"', "\\", "\x01", "\u00e9", "\U0001f600", "2020-01-01", "10:00:00Z", "x@y.zz", "1.2.3.4",
        "10:00:00", "https://x.y", "a\n",
    )  # fmt: skip
    raw = [f'"{text}"' for text in ("\t", "\n", "\x01", "a\tb", '"', "\\", '""', "\x7f")]
    escaped = [r'"\u0061"', r'"\u0061b"', r'"\ud83d\ude00"', r'"\/"', r'"\q"']
    plain = [json.dumps(value, ensure_ascii=False) for value in values]
    return [*plain, *raw, *escaped, "1", "null"]


_NUMBERS: Final = [
    *map(str, (*range(-7, 8), 9, 12, 100, -100, 3000, 3001, 3072, 20000, 20001)), "-0", "1.0",
    "1e1", "0.5", "01", "1.5", "-1.0", "+1", "1.25", "-0.5", "1e-3", "10e-1", "0.0", "4.999",
    "5.001",
    "5.0", "-1e-9", "2.5", "2.50", "2.49", "3.999", "4e0", "0e5", '"1"', "null",
]  # fmt: skip
_ANYTHING: Final = [
    "1", "-1", "7", "1.5", "1.0", '"x"', '"y"', '"xyz"', "null", "true", "{}", '{"a":1}',
    '{"a":"x"}', '{"a":1.5}', '{"b":1}', '{"a":1,"b":2,"c":3,"d":4}', "[]", "[1]", '["x"]', "[1,1]",
    '[1,"x"]', "[1,2,3]", "",
]  # fmt: skip
_LISTS: Final = [
    json.dumps(values)
    for n in range(4)
    for values in itertools.product([1, "x", None, [1]][: 4 if n < 3 else 2], repeat=n)
] + ["[1, 1, 1, 1]", "1", "{}"]

PRODUCTS: Final[dict[str, Product]] = {
    "objects": Product(
        {
            "type": ["object"],
            "properties": [ABSENT, {"a": INTEGER}, NAMED_TWO, {"\u00e9": INTEGER}],
            "required": [ABSENT, ["a"]],
            "additionalProperties": [ABSENT, True, False, INTEGER],
            "patternProperties": [
                ABSENT, {"^a": STRING}, {"^b$": INTEGER}, {"^a.*$": STRING, "^.*b$": INTEGER},
            ],
            "propertyNames": [
                ABSENT, {"pattern": "^[ac]$"}, {"enum": ["a", "c"]}, {"maxLength": 1}, STRING,
            ],
            "minProperties": [ABSENT, 1, 2],
            "maxProperties": [ABSENT, 1],
            "unevaluatedProperties": [ABSENT, False, True, STRING],
        },
        _objects(),
    ),
    "integers": Product(
        {
            "type": ["integer"],
            "minimum": [ABSENT, 0, -3, 2.0],
            "maximum": [ABSENT, 5, 20001],
            "exclusiveMinimum": [ABSENT, 0],
            "exclusiveMaximum": [ABSENT, 4],
            "multipleOf": [ABSENT, 3, 2, 1.5, 3000],
        },
        _NUMBERS,
    ),
    "numbers": Product(
        {
            "type": ["number"],
            "minimum": [ABSENT, 0, -3.5, 1e-3],
            "maximum": [ABSENT, 5, 2.5],
            "exclusiveMinimum": [ABSENT, 0, 1.25],
            "exclusiveMaximum": [ABSENT, 4, 4.5],
            "multipleOf": [ABSENT, 3, 0.5],
        },
        _NUMBERS,
    ),
    "strings": Product(
        {
            "type": ["string"],
            "minLength": [ABSENT, 0, 1, 2, 12],
            "maxLength": [ABSENT, 0, 1, 3],
            "pattern": [ABSENT, "^[a-z]+$", "a"],
            "format": [ABSENT, "date", "email", "color"],
        },
        _strings(),
    ),
    "patterns": Product(
        {
            "type": ["string"],
            "pattern": [
                "a", "^a", "a$", "^a$", "^a|b$", "^(a|b)$", "^a$|^b$", "(^a$)|b", r"^[\n]?a$",
                "a$b", "a^b",
                "(?=a)b", "^(?!foo).*$", "^(?=.*a)b.*$", "(?<=a)b", r"\ba\b", "(?i)a", r"^\w+$",
                r"^\d{1,2}$", r"^\s$", r"^\S+$", "^.$", "^[^a]*$", r"^[\w ]+$", r"^\n$", r"^\t$",
                '^"$', '^a"?$', r"^\\$", r'^["\\]$', r'^["a]$', r"^[ -~]+$", r"^[\n\t]$", r"^\x61$",
                r"^\x22$", r"^\u0022?a$", r"^[\x00-\x1f]$", r"\Aa\Z", r"^(a)\1$", r"^(?:a|b)+$",
                "^https://", "", "^", "[]a]", r"^\$$", r"a\$", "^a(?=b)", "^[^\\n]+$",
            ],
        },
        _strings(),
    ),
    "arrays": Product(
        {
            "type": ["array"],
            "items": [ABSENT, True, False, INTEGER],
            "prefixItems": [ABSENT, [INTEGER], [{}, STRING]],
            "minItems": [ABSENT, 1, 2],
            "maxItems": [ABSENT, 0, 2],
            "unevaluatedItems": [ABSENT, False, STRING],
            "uniqueItems": [ABSENT, False, True],
            "contains": [ABSENT, INTEGER],
        },
        _LISTS,
    ),
    "combinations": Product(
        {
            "$defs": [{"s": STRING}],
            "type": [ABSENT, "integer", "string", ["integer", "null"], []],
            "anyOf": [ABSENT, [INTEGER, STRING], [NAMED, INTEGER], []],
            "allOf": [ABSENT, [INTEGER], [INTEGER, {"type": "number", "minimum": 0}], []],
            "enum": [ABSENT, [1, "x"], [None], []],
            "const": [ABSENT, 1, "x"],
            "$ref": [ABSENT, "#/$defs/s"],
        },
        _ANYTHING,
    ),
    "choices": Product(
        # Disjoint schemas, since `oneOf` means `anyOf`.
        {"oneOf": [[INTEGER, STRING], [NAMED, INTEGER], []], "type": [ABSENT, "integer"]},
        _ANYTHING,
    ),
    "conditions": Product(
        {
            "if": [ABSENT, INTEGER],
            "then": [ABSENT, {"minimum": 3}],
            "else": [ABSENT, STRING],
            "not": [ABSENT, INTEGER],
        },
        _ANYTHING,
    ),
}  # fmt: skip
for _keyword, _value in {
    "minimum": 3, "maximum": 0, "exclusiveMinimum": 3, "exclusiveMaximum": 0, "multipleOf": 7,
    "minLength": 3, "maxLength": 0, "pattern": "^q", "format": "email", "minItems": 2,
    "maxItems": 0, "required": ["a"], "minProperties": 3, "maxProperties": 0, "const": 7,
    "properties": {"a": INTEGER}, "patternProperties": {"^a": STRING}, "items": STRING,
    "propertyNames": {"pattern": "^b$"}, "additionalProperties": STRING, "prefixItems": [STRING],
    "unevaluatedProperties": False, "unevaluatedItems": False, "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}}, "contains": STRING, "uniqueItems": True,
}.items():  # fmt: skip
    types = [ABSENT, "object", "string", "integer", "number", "array", ["string", "object"]]
    PRODUCTS[_keyword] = Product({"type": types, _keyword: [_value]}, _ANYTHING)


class Outcome(NamedTuple):
    """A grammar's verdicts on texts."""

    wrong: list[str]
    """Texts that it allows and that do not fit the schema."""
    is_barren: bool
    """True if some texts fit the schema, and it allows none of these."""


def outcome(schema: Schema, texts: Sequence[str], *, checked: bool) -> Outcome | None:
    """The outcome of the grammar of `schema`, or None if it is refused: by the library, and if
    `checked` by the check of schemas, whose form of it is compiled then."""
    text = json.dumps(schema)
    try:
        ebnf = json_ebnf(prepare_json_schema(text) if checked else text, any_whitespace=True)
        compiled = _compiler().compile_grammar(ebnf)
    except (GrammarError, RuntimeError):
        return None
    matcher = xgrammar.GrammarMatcher(compiled)
    is_valid = jsonschema.Draft202012Validator(dict(schema)).is_valid
    wrong, num_fitting, num_allowed = [], 0, 0
    for candidate in [*texts, *_drawn(compiled)] if checked else texts:
        matcher.reset()
        allows = matcher.accept_string(candidate) and matcher.accept_token(_END)
        try:
            fits = is_valid(json.loads(candidate))
        except json.JSONDecodeError:
            fits = False
        if allows and not fits:
            wrong.append(candidate)
        num_fitting += fits
        num_allowed += allows and fits
    return Outcome(wrong, num_fitting > 0 and num_allowed == 0)


_TOKENS: Final = [
    b"", *(bytes([char]) for char in b'abcx01259.-+eE"\\u6{}[]:, \n\t\x01'), b"true", b"null",
    "\u00e9".encode(), rb"\u0061", b"@", b"https://", b'"a"', b'":',
]  # fmt: skip
_END: Final = 0
_DRAWS, _MAX_TOKENS = 4, 80


@lru_cache(maxsize=1)
def _compiler() -> xgrammar.GrammarCompiler:
    info = xgrammar.TokenizerInfo(_TOKENS, xgrammar.VocabType.RAW, stop_token_ids=[_END])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _drawn(compiled: xgrammar.CompiledGrammar) -> Iterator[str]:
    """Random texts that a grammar allows; those that grow too long are left out."""
    mask = allocate_bitmask(1, len(_TOKENS))
    draw = random.Random(1)
    for _ in range(_DRAWS):
        matcher, said = xgrammar.GrammarMatcher(compiled), b""
        for _ in range(_MAX_TOKENS):
            matcher.fill_next_token_bitmask(mask, 0)
            word = int(mask[0, 0]) & 0xFFFFFFFF | int(mask[0, 1]) << 32
            may_end = bool(word & 1 << _END)
            allowed = [token for token in range(_END + 1, len(_TOKENS)) if word >> token & 1]
            if not allowed or (may_end and draw.random() < 0.6):
                break
            token = draw.choice(allowed)
            assert matcher.accept_token(token)
            said += _TOKENS[token]
        if may_end:
            yield said.decode()


def unheld_row(schema: Schema) -> str | None:
    """The rule of `schema_rules` that `schema` breaks; None: it breaks none or several."""
    found = [*problems(dict(schema))]
    if len(found) != 1:
        return None
    return f"{found[0].keyword} {found[0].text}".split(" is not supported")[0].split(" it: ")[0]


def derived_rows(max_keywords: int) -> set[str]:
    """The rows of which the library's own grammar breaks at least one schema: it allows a text that
    does not fit, or none that fits. Only schemas with up to `max_keywords` keywords are tried."""
    rows = set()
    for product in PRODUCTS.values():
        for schema in product.schemas():
            row = unheld_row(schema) if len(schema) <= max_keywords else None
            if row is None or row in rows:
                continue
            made = outcome(schema, product.texts, checked=False)
            if made is not None and (made.wrong or made.is_barren):
                rows.add(row)
    return rows
