"""`stop_regex`: the patterns that are accepted, and limits of their cost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import regex

MAX_STOP_REGEXES: Final = 8
MAX_STOP_REGEX_CHARS: Final = 512
"""Most characters of a request's patterns together. Compiling them takes a few milliseconds of the
event loops of the server and of the scheduler."""
MAX_MATCH_CHARS: Final = 512
"""Characters at the end of an output in which a match is searched."""
MAX_UNROLLED: Final = 1024
"""Most parts of a pattern with its repeats unrolled; see `_unrolled_size`."""
_PROBE_SECONDS: Final = 0.01
_TOKEN: Final = re.compile(
    r"(?P<atom>\\.|\[\^?\]?(?:\[:\^?\w+:\]|\\.|[^\]\\])*\]|\(\?\#[^)]*\))"
    r"|(?P<mode>\(\?[A-Za-z0-9-]*[Vx])"
    r"|(?P<open>\(\??)|(?P<close>\))"
    r"|(?P<least>[*?+])|\{(?P<count>[0-9]*)(?:,[0-9]*)?\}|.",
    re.DOTALL,
)


def compile_stop_regex(pattern: str) -> regex.Pattern[str]:
    """Compile `pattern` in the syntax of the `regex` library, which extends that of `re` and caches
    the result for the samples of a prompt. Raises ValueError, without the field's name, if it is
    invalid or searches backwards."""
    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    if compiled.flags & regex.REVERSE:
        raise ValueError("searches backwards, which a growing text rules out: leave (?r) out")
    return compiled


def verify_stop_regexes(patterns: Sequence[str]) -> None:
    """Check number, length, syntax and cost of a request's patterns; a ValueError names
    `stop_regex` and the cause."""
    if len(patterns) > MAX_STOP_REGEXES:
        raise ValueError(
            f"stop_regex has {len(patterns)} patterns, at most {MAX_STOP_REGEXES} are allowed"
        )
    total = sum(map(len, patterns))
    if total > MAX_STOP_REGEX_CHARS:
        raise ValueError(
            f"stop_regex has {total} characters, at most {MAX_STOP_REGEX_CHARS} are allowed"
        )
    for index, pattern in enumerate(patterns):
        try:
            _verify(pattern)
        except ValueError as error:
            raise ValueError(f"stop_regex[{index}] {error}") from None


def _verify(pattern: str) -> None:
    size = _unrolled_size(pattern)
    if size > MAX_UNROLLED:
        raise ValueError(
            f"has {size} parts when its repeats are written out, at most {MAX_UNROLLED} are "
            "allowed: nest fewer repeats"
        )
    compiled = compile_stop_regex(pattern)
    try:
        matches_empty = compiled.search("", timeout=_PROBE_SECONDS) is not None
    except TimeoutError:
        raise ValueError("takes too long to match: simplify it") from None
    if matches_empty:
        raise ValueError(
            "matches the empty text, which every output begins with: let it match at least one "
            "character"
        )


def _unrolled_size(pattern: str) -> int:
    """Number of characters, classes and groups of `pattern` after unrolling its repeats. Raises
    ValueError for a mode that changes the syntax.

    The library unrolls a repeat to its minimal count plus one when it compiles. Nested repeats,
    as in `((((a){9}){9}){9}){9}`, could take hours and all memory. The result is an upper bound
    where this function misreads a pattern.
    """
    opened: list[list[int]] = []
    parts: list[int] = []
    for token in _TOKEN.finditer(pattern):
        if token["mode"]:
            raise ValueError("uses a mode other than i, m and s: leave (?x) and (?V1) out")
        if token["open"]:
            opened.append(parts)
            parts = []
        elif token["close"]:
            group = 1 + sum(parts)
            # A surplus bracket closes everything before it.
            parts = opened.pop() if opened else []
            parts.append(group)
        elif token["least"] or token["count"] is not None:
            least = (
                int(token["count"] or 0) if token["count"] is not None else token["least"] == "+"
            )
            parts[-1:] = [(1 + least) * part for part in parts[-1:]]
        else:
            parts.append(1)
    return sum(parts) + sum(map(sum, opened))
