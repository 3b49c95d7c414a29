"""Stop strings in a stream: nothing of them is shown, nothing else is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.managers.tokenizer.request_state import StopTrimmer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


def trimmer(*stops: str, keep_match: bool = False) -> StopTrimmer:
    return StopTrimmer(stops, keep_match=keep_match)


def test_a_possible_beginning_is_held_until_it_is_none() -> None:
    t = trimmer("END")
    assert [t.feed("aE"), t.feed("N"), t.feed("x")] == ["a", "", "ENx"]


def test_the_stop_and_what_follows_is_cut() -> None:
    t = trimmer("END")
    assert t.feed("aEN") == "a"
    assert t.finish("Dtail", 1) == ""
    assert trimmer("X").finish("aXbX", 3) == "aXb", "an earlier one did not count"


def test_held_text_comes_out_when_the_request_ends_otherwise() -> None:
    t = trimmer("END")
    assert t.feed("aEN") == "a"
    assert t.finish("") == "EN"


def test_no_stop_trim_passes_everything_on() -> None:
    t = trimmer("END", keep_match=True)
    assert t.feed("aEN", 1) == "aEN"
    assert t.finish("D", 1) == "D"


def test_text_that_a_pattern_may_match_is_held() -> None:
    t = trimmer()
    assert [t.feed("a12", 1), t.feed("3", 1), t.feed("b7", 5)] == ["a", "", "123b"]
    assert t.finish("") == "7"


def test_strings_and_patterns_hold_together() -> None:
    t = trimmer("END")
    assert [t.feed("12E", 1), t.feed("N", 4)] == ["1", "2"]
    assert t.finish("D", 2) == ""


@given(st.text(alphabet="ab", max_size=30), st.text(alphabet="ab", min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_character_by_character_equals_the_cut_at_the_first_match(text: str, stop: str) -> None:
    t = trimmer(stop)
    shown = ""
    for position, character in enumerate(text):
        if stop in text[: position + 1]:
            shown += t.finish(character, text.find(stop))
            break
        shown += t.feed(character)
    else:
        shown += t.finish("")
    assert shown == text.split(stop)[0]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
