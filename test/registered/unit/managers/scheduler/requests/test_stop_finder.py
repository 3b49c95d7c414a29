"""Stops in a growing text: found when they are complete, at a cost that does not grow with it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rigs.servers.fake_engine import byte_tokenizer
from sglang.srt.managers.detokenizer.detokenizer_manager import make_decoder_factory
from sglang.srt.managers.scheduler.requests.stop_finder import (
    StopFinder,
    StopMatch,
    StopRegexTooSlow,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.stop_regex import MAX_MATCH_CHARS
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

BYTES = byte_tokenizer()
NEW_DECODER = make_decoder_factory(BYTES)


def finder(*patterns: str, stop: Sequence[str] = ()) -> StopFinder:
    params = SamplingParams(stop=list(stop), stop_regex=list(patterns))
    params.normalize()
    return StopFinder(params, NEW_DECODER(True))


class Growing:
    """Feeds a finder a text piece by piece; `shown` is what may be shown after each."""

    def __init__(self, finder: StopFinder) -> None:
        self.finder = finder
        self.ids: list[int] = []
        self.shown: list[int | None] = []

    def feed(self, piece: str, *, may_stop: bool = True) -> StopMatch | None:
        self.ids += BYTES.encode(piece, add_special_tokens=False)
        match = self.finder.advance(self.ids, may_stop=may_stop)
        self.shown.append(self.finder.shown_chars(ended=match is not None))
        return match


def test_a_string_is_found_when_its_last_token_comes() -> None:
    text = Growing(finder(stop=["é!", "zz"]))
    half_a_character, rest = BYTES.encode("é", add_special_tokens=False)
    assert text.feed("a") is None
    text.ids.append(half_a_character)
    assert text.feed("") is None
    text.ids.append(rest)
    assert text.feed("") is None
    assert text.feed("!") == StopMatch(1, "é!")


def test_a_pattern_is_found_when_it_matches_first() -> None:
    text = Growing(finder(r"\d{3}", r"[A-Z]+\."))
    assert [text.feed(piece) for piece in "ab12cD"] == [None] * 6
    assert text.feed("E.") == StopMatch(5, r"[A-Z]+\.")


def test_of_several_stops_the_first_in_the_text_counts() -> None:
    assert Growing(finder(r"b\d", stop=["c"])).feed("ab1c") == StopMatch(1, r"b\d")
    assert Growing(finder(r"b\d", stop=["a"])).feed("ab1c") == StopMatch(0, "a")


def test_nothing_is_shown_that_may_be_part_of_a_match() -> None:
    text = Growing(finder(r"\d+END"))
    for piece in ("a", "1", "2", "E", "x", "y", "z"):
        assert text.feed(piece) is None
    # One token later than it could be: an assertion may have failed for the text's end alone.
    assert text.shown == [0, 1, 1, 1, 1, 5, 6]
    assert text.feed("1END") == StopMatch(7, r"\d+END")
    assert text.shown[-1] == 7


def test_an_assertion_about_the_next_character_waits_for_it() -> None:
    text = Growing(finder(r"ab\B"))
    assert [text.feed("a"), text.feed("b")] == [None, None]
    assert text.feed("c") == StopMatch(0, r"ab\B")
    assert text.shown == [0, 0, 0]


def test_the_begin_of_the_text_is_where_the_output_begins() -> None:
    text = Growing(finder(r"^b", r"(?<=ab)c"))
    assert [text.feed("x" * 5 * MAX_MATCH_CHARS), text.feed("b"), text.feed("ab")] == [None] * 3
    assert text.feed("c") == StopMatch(5 * MAX_MATCH_CHARS + 3, r"(?<=ab)c")


def test_a_match_that_is_longer_than_the_window_is_none() -> None:
    fits, too_long = "<" + "x" * (MAX_MATCH_CHARS - 2), "<" + "x" * MAX_MATCH_CHARS
    for opening, expected in ((fits, StopMatch(0, "<x*>")), (too_long, None)):
        text = Growing(finder("<x*>"))
        for character in opening:
            assert text.feed(character) is None
        assert text.feed(">") == expected


def test_what_was_complete_before_it_counted_never_counts() -> None:
    for given_stop in ({"stop": ["ab"]}, {"stop_regex": ["ab"]}):
        params = SamplingParams(**given_stop)  # type: ignore[arg-type]
        params.normalize()
        text = Growing(StopFinder(params, NEW_DECODER(True)))
        assert text.feed("xab ab a", may_stop=False) is None
        assert text.feed("b") == StopMatch(7, "ab"), "it was complete afterwards"
        text = Growing(StopFinder(params, NEW_DECODER(True)))
        assert text.feed("xab ab", may_stop=False) is None
        assert text.feed("-") is None


def test_a_catastrophic_pattern_ends_its_own_request() -> None:
    text = Growing(finder(r"(a|aa)+[0-9]"))
    assert text.feed("a" * 10) is None
    with pytest.raises(StopRegexTooSlow):
        text.feed("a" * 100)


def test_many_tame_patterns_never_run_out_of_time() -> None:
    patterns = [r"\n\n+", r"(?i)human:\s", r"\bEND\b", r"\d{5,}", r"[.!?]{4}", r"</?[a-z]+>"]
    text = Growing(finder(*patterns))
    for number in range(400):
        assert text.feed(f"word {number % 100}, ") is None


@given(
    st.text(alphabet="ab1é", max_size=40),
    st.lists(st.integers(1, 5), min_size=1, max_size=40),
    st.sampled_from([r"a1", r"b+1", r"1(?!a)b", r"\Bb1", r"^ab", r"(?<=é)1", r"a.b", r"é|bb"]),
)
@settings(max_examples=300, deadline=None)
def test_any_text_in_any_pieces_stops_where_it_first_matches(
    text: str, sizes: list[int], pattern: str
) -> None:
    growing = Growing(finder(pattern))
    end = 0
    for size in sizes * 40:
        begin, end = end, min(end + size, len(text))
        if begin == end:
            break
        match = growing.feed(text[begin:end])
        expected = re.search(pattern, text[:end])
        assert (match and match.begin) == (expected and expected.start())
        assert all(shown is None or shown <= growing.shown[-1] for shown in growing.shown)  # type: ignore[operator]
        if match is not None:
            break
