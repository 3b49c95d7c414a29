"""Stops in a stream: nothing of them is shown, nothing else is lost."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from rigs.servers.fake_engine import byte_tokenizer
from sglang.srt.managers.detokenizer.detokenizer_manager import make_decoder_factory
from sglang.srt.managers.scheduler.requests.stop_finder import StopFinder
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.managers.tokenizer.request_state import RequestState
from sglang.srt.messages.io_struct import FinishReason, RequestOutput, TextOutput
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

BYTES = byte_tokenizer()
NEW_DECODER = make_decoder_factory(BYTES)


class Stream:
    """An output that grows in the scheduler's finder and in the server's state."""

    def __init__(
        self, *stops: str, patterns: Sequence[str] = (), no_stop_trim: bool = False
    ) -> None:
        params = SamplingParams(stop=list(stops), stop_regex=list(patterns))
        params.normalize()
        self.finder = StopFinder(params, NEW_DECODER(True))
        self.state = RequestState(GenerateRequest(rid="r", no_stop_trim=no_stop_trim), 0.0)
        self.ids: list[int] = []

    def feed(self, text: str, *, ends: bool = False, may_stop: bool = True) -> str:
        """Text that the client gets; `ends`: the output ends after `text`, at a stop or not."""
        self.ids += BYTES.encode(text, add_special_tokens=False)
        match = self.finder.advance(self.ids, may_stop=may_stop)
        assert match is None or ends
        before = len(self.state.text)
        reason = FinishReason(type="length" if match is None else "stop") if ends else None
        shown_chars = self.finder.shown_chars(ended=ends)
        output = RequestOutput(
            rid="r", output_ids=[], finish_reason=reason, shown_chars=shown_chars
        )
        self.state.apply(TextOutput(output=output, text=text))
        return self.state.text[before:]


def test_a_possible_beginning_is_held_until_it_is_none() -> None:
    t = Stream("END")
    assert [t.feed("aE"), t.feed("N"), t.feed("x")] == ["a", "", "ENx"]


def test_the_stop_and_what_follows_is_cut() -> None:
    t = Stream("END")
    assert t.feed("aEN") == "a"
    assert t.feed("Dtail", ends=True) == ""


def test_one_that_did_not_count_is_shown() -> None:
    t = Stream("X")
    assert t.feed("aX", may_stop=False) == "aX"
    assert t.feed("bX", ends=True) == "b"


def test_held_text_comes_out_when_the_request_ends_otherwise() -> None:
    t = Stream("END")
    assert t.feed("aEN") == "a"
    assert t.feed("", ends=True) == "EN"


def test_no_stop_trim_passes_everything_on() -> None:
    t = Stream("END", no_stop_trim=True)
    assert t.feed("aEN") == "aEN"
    assert t.feed("D", ends=True) == "D"


def test_text_that_a_pattern_may_match_is_held() -> None:
    t = Stream(patterns=[r"\d+END"])
    assert [t.feed(piece) for piece in ("a12", "3", "b7", "c")] == ["", "a", "", "123b"]
    assert t.feed("", ends=True) == "7c"


def test_strings_and_patterns_hold_together() -> None:
    t = Stream("END", patterns=[r"2.{5}"])
    assert [t.feed("12E"), t.feed("N")] == ["", "1"]
    assert t.feed("D", ends=True) == "2"


@given(st.text(alphabet="ab", max_size=30), st.text(alphabet="ab", min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_character_by_character_equals_the_cut_at_the_first_match(text: str, stop: str) -> None:
    t = Stream(stop)
    for position, character in enumerate(text):
        has_met = stop in text[: position + 1]
        t.feed(character, ends=has_met)
        if has_met:
            break
        beginnings = (n for n in range(len(stop)) if text[: position + 1].endswith(stop[:n]))
        assert t.state.text == text[: position + 1 - max(beginnings, default=0)]
    else:
        t.feed("", ends=True)
    assert t.state.text == text.split(stop)[0]
