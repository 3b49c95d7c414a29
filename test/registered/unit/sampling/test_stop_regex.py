"""Stop patterns are checked before they are compiled, because some would compile for hours."""

from __future__ import annotations

import pytest

from sglang.srt.sampling.stop_regex import verify_stop_regexes
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    "pattern",
    [
        r"\n\n+",
        r"(?i)(?:human|user):\s",
        r"(\w+\s+){50}END",
        r"[(){9}]{100}",
        r"\({3}(?#of( three)\)",
        r"[[:alpha:](]+x",
        r"(?P<quote>['\"]).{0,80}(?P=quote)",
        "(" * 255 + "a" + ")" * 255,
    ],
)
def test_valid_patterns_are_accepted(pattern: str) -> None:
    verify_stop_regexes([pattern])


@pytest.mark.parametrize(
    "pattern",
    [
        "(" * 30 + "a" + "){2}" * 30,
        "(" * 60 + "a" + "){2,}?" * 60,
        "(?:" * 80 + "a" + ")+" * 80,
        "((a){100}){100}",
        "(?=" * 60 + "a" + "){5}" * 60,
        # Brackets inside a class, and classes inside a group.
        "(" * 30 + "[a)]" + "){2}" * 30,
        "(" * 30 + "[[:alpha:])]" + "){2}" * 30,
        "(" * 30 + r"\[a" + r"\]){2}" * 30,
        "((" * 20 + "a[)(]" + "){9}b)" * 20,
    ],
)
def test_patterns_with_too_many_unrolled_repeats_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"stop_regex\[1\] has [0-9]+ parts"):
        verify_stop_regexes(["a", pattern])


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "is not a regular expression: missing"),
        ("", "matches the empty text"),
        ("a|b*", "matches the empty text"),
        (r"(?!x)", "matches the empty text"),
        ("(?r)a", "searches backwards"),
        ("(?x) a # (", "uses a mode"),
        ("(?iV1)[a--b]", "uses a mode"),
    ],
)
def test_invalid_patterns_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        verify_stop_regexes([pattern])
