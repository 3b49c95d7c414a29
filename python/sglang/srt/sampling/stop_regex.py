"""`stop_regex`: which patterns are taken, and what one may cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import regex

MAX_STOP_REGEXES: Final = 8
MAX_STOP_REGEX_CHARS: Final = 512
"""Of a request's patterns together. Compiling that many characters takes a few milliseconds, which
the server and the scheduler spend on their event loops."""
MAX_MATCH_CHARS: Final = 512
"""A match is looked for in this many characters at the end of an output."""
_PROBE_SECONDS: Final = 0.01


def compile_stop_regex(pattern: str) -> regex.Pattern[str]:
    """`pattern` in the syntax of the `regex` library, which adds to that of `re`. Kept by the
    library, so that the samples of a prompt share it.

    Raises:
        ValueError: It is no pattern, or one that searches backwards; without the field's name.
    """
    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    except RecursionError:
        raise ValueError("is nested too deeply: flatten it") from None
    if compiled.flags & regex.REVERSE:
        raise ValueError("searches backwards, which a growing text rules out: leave (?r) out")
    return compiled


def verify_stop_regexes(patterns: Sequence[str]) -> None:
    """Check number, length and syntax of a request's patterns.

    Raises:
        ValueError: Names `stop_regex` and what is wrong with it.
    """
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
    compiled = compile_stop_regex(pattern)
    try:
        matches_nothing = compiled.search("", timeout=_PROBE_SECONDS) is not None
    except TimeoutError:
        raise ValueError("takes too long to match: simplify it") from None
    if matches_nothing:
        raise ValueError(
            "matches the empty text, which every output begins with: let it ask for a character"
        )
