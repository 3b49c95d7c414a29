"""Checks a `pattern` of a JSON schema, and writes it in the grammar library's form.

The library matches whole strings and ignores anchors. It does not escape a quote, a backslash or a
control character that stands alone in a pattern, so that the answer would not be JSON.
"""

from __future__ import annotations

import re
from typing import Final

_ESCAPE: Final = re.compile(
    r"\\(?:[dDwWsSfnrtv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^A-Za-z0-9])", re.S
)
"""Escapes that JSON schemas and the library read alike."""
_CLASS: Final = re.compile(r"\[(\^?)((?:\\.|[^\]\\])+)\]", re.S)
_CLASS_RANGE: Final = re.compile(rf"({_ESCAPE.pattern}|[^\\])(?:-({_ESCAPE.pattern}|[^\\]))?", re.S)
_GROUP: Final = re.compile(r"\((?:\?:)?(?!\?)")


def whole_pattern(pattern: object) -> str:
    """The pattern that the library must match with whole strings.

    An alternative with one anchor gets `.*` and an anchor at its other end. One without anchors
    matches whole strings, which is stricter than the schema.

    Raises:
        ValueError: Answers could break the pattern, or could not be JSON. The message continues
            "pattern: ".
    """
    if not isinstance(pattern, str):
        raise ValueError("must be text")
    alternatives, start, depth, at = [], 0, 0, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "[":
            at = _after_class(pattern, at)
            continue
        if char == "(":
            group = _GROUP.match(pattern, at)
            if group is None:
                raise ValueError("only (...) and (?:...) are supported, no lookarounds or flags")
            depth, at = depth + 1, group.end()
            continue
        if char in "^$":
            outside = at == start if char == "^" else pattern[at + 1 : at + 2] in ("", "|")
            if depth or not outside:
                raise ValueError(
                    f"{char} is only supported at an end of the pattern: move it there"
                )
        elif char == ")":
            depth -= 1
        elif char == "|" and depth == 0:
            alternatives.append(pattern[start:at])
            start = at + 1
        else:
            literal, end = _literal(pattern, at)
            if literal is not None and not _is_plain(literal):
                raise ValueError(
                    "a quote, a backslash or a control character alone is not supported: leave it "
                    "out"
                )
            at = end
            continue
        at += 1
    alternatives.append(pattern[start:])
    return "|".join(map(_with_rest, alternatives))


def _with_rest(alternative: str) -> str:
    begins = alternative.startswith("^")
    # The scan has refused a "$" inside, so an unescaped one is the last.
    ends = re.search(r"(?<!\\)(?:\\\\)*\$$", alternative) is not None
    if begins and not ends:
        return alternative + ".*$"
    return "^.*" + alternative if ends and not begins else alternative


def _after_class(pattern: str, at: int) -> int:
    """The position after the character class at `at`."""
    found = _CLASS.match(pattern, at)
    if found is None:
        raise ValueError("a class [...] is empty or does not end")
    negated, body = found.groups()
    position, has_plain = 0, bool(negated)
    while position < len(body):
        item = _CLASS_RANGE.match(body, position)
        if item is None:
            raise ValueError(_unknown_escape(body, position))
        first, last = (_literal(text, 0)[0] if text else None for text in item.groups())
        span = range(ord(first), ord(last or first) + 1) if first is not None else None
        has_plain = has_plain or span is None or any(map(_is_plain, map(chr, span[:64])))
        position = item.end()
    if not has_plain:
        raise ValueError("a class of quotes, backslashes or control characters is not supported")
    return found.end()


def _literal(pattern: str, at: int) -> tuple[str | None, int]:
    """The character at `at`, some control character for the letter of one, or None for a class of
    several; and the position after it."""
    if pattern[at] != "\\":
        return pattern[at], at + 1
    escape = _ESCAPE.match(pattern, at)
    if escape is None:
        raise ValueError(_unknown_escape(pattern, at))
    name = escape[0][1:]
    if name in tuple("dDwWsS"):
        return None, escape.end()
    if len(name) > 1:
        return chr(int(name[1:], 16)), escape.end()
    return ("\n" if name.isalpha() else name), escape.end()


def _is_plain(char: str) -> bool:
    return char >= " " and char not in '"\\'


def _unknown_escape(pattern: str, at: int) -> str:
    return f"the escape {pattern[at : at + 2]!r} is not supported: write the characters"
