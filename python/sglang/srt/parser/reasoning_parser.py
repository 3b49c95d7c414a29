"""Splits an output into reasoning, `<think>...</think>`, and answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from sglang.srt.constrained.constraint import THINK_END, THINK_START, Reasoning
from sglang.srt.function_call.format_detector import FormatDetector, without_begun
from sglang.srt.function_call.gpt_oss_detector import GPT_OSS, begun_message

AUTO: Final = "auto"
"""Name that stands for the parser that fits the chat template."""
_MAX_PROMPT_END: Final = 64
"""Characters at the end of a prompt that may have a marker, and blanks that templates append."""

REASONING_PARSERS: Final[Mapping[str, bool]] = {
    "qwen3": False,
    "qwen3-thinking": True,
    "deepseek-r1": True,
    "deepseek-v3": False,
    "deepseek-v4": False,
    "glm45": False,
    "kimi_k2": False,
    "interns1": False,
    "mimo": False,
    "minimax": True,
    "nano_v3": True,
    "nemotron_3": True,
    "step3": True,
}
"""Parser name to whether an output begins inside the reasoning if the prompt has no marker."""
REASONING_PARSER_NAMES: Final = (*REASONING_PARSERS, GPT_OSS)
"""The parsers, and the one that reads calls and reasoning together."""


def opened_reasoning(prompt: str) -> bool | None:
    """True if `prompt` ends by opening the reasoning, False if by closing it, else None."""
    end = prompt[-_MAX_PROMPT_END:].rstrip()
    if end.endswith(THINK_END):
        return False
    return True if end.endswith(THINK_START) else None


def reasoning_before(parser: str, prompt: str) -> Reasoning:
    """The reasoning with which an output after `prompt` begins, for one of
    `REASONING_PARSER_NAMES`."""
    if parser == GPT_OSS:
        return Reasoning.NONE if begun_message(prompt) else Reasoning.MESSAGES
    opened = opened_reasoning(prompt)
    if opened is False:
        return Reasoning.NONE
    return Reasoning.BEGUN if opened or REASONING_PARSERS[parser] else Reasoning.POSSIBLE


@dataclass
class ReasoningParseResult:
    """The text that one increment of a stream added to each part."""

    reasoning_text: str = ""
    normal_text: str = ""


class _Part(Enum):
    START = "start"
    REASONING = "reasoning"
    BETWEEN = "between"
    NORMAL = "normal"


class ReasoningParser:
    """Splits one output. Blanks around the reasoning belong to neither part.

    The reasoning ends at its end marker, or where a call of a known tool begins, because models
    forget the marker before a call. A marker of calls that the reasoning only mentions does not end
    it. Without an end the whole output is reasoning. A marker in the middle of the answer is part
    of the answer.

    Args:
        name: One of `REASONING_PARSERS`.
        begins_inside: True if the output begins inside its reasoning, see `opened_reasoning`.
            None means the default of `name`.
        find_calls: Makes a parser that finds calls; None: the request has no tools.
    """

    def __init__(
        self,
        name: str,
        *,
        begins_inside: bool | None = None,
        find_calls: Callable[[], FormatDetector] | None = None,
    ) -> None:
        self._name = name
        self._begins_inside = REASONING_PARSERS[name] if begins_inside is None else begins_inside
        self._find_calls = find_calls
        self._calls = None if find_calls is None else find_calls()
        self._part = _Part.START
        self._num_chars = 0
        self._buffer = ""
        self._is_cut = False
        self._at_calls = ""
        """Text that `_calls` holds, because it may become a call."""
        self._num_passed = 0
        """Characters that `_calls` has found to be no call."""
        self._blanks: str | None = None
        """Blanks behind the reasoning so far; None: it has not begun."""
        self.reasoning_end: int | None = None
        """Characters of the output up to the end of the reasoning, its marker included; None: the
        reasoning has not ended."""
        self.ended_by_call = False
        """True if a call ended the reasoning. An end marker may still follow the call."""

    def parse_non_stream(self, text: str, *, is_cut: bool = False) -> tuple[str, str]:
        """The reasoning and the normal text of a whole output; `is_cut` as `finish`."""
        parser = ReasoningParser(
            self._name, begins_inside=self._begins_inside, find_calls=self._find_calls
        )
        first, last = parser.parse_stream_increment(text), parser.finish(is_cut=is_cut)
        self.reasoning_end, self.ended_by_call = parser.reasoning_end, parser.ended_by_call
        return (
            first.reasoning_text + last.reasoning_text,
            first.normal_text + last.normal_text,
        )

    def parse_stream_increment(self, new_text: str) -> ReasoningParseResult:
        """The text that `new_text` adds to each part. Holds back what may become a marker, or a
        call."""
        self._buffer += new_text
        self._num_chars += len(new_text)
        return self._advance(ended=False)

    def finish(self, *, is_cut: bool = False) -> ReasoningParseResult:
        """End the stream. Returns the text that was held back. `is_cut`: see `FormatDetector`."""
        self._is_cut = is_cut
        return self._advance(ended=True)

    def _advance(self, *, ended: bool) -> ReasoningParseResult:
        result = ReasoningParseResult()
        if self._part is _Part.START:
            self._read_start(ended=ended)
        if self._part is _Part.REASONING:
            result.reasoning_text = self._read_reasoning(ended=ended)
        if self._part is _Part.BETWEEN:
            self._buffer = self._buffer.lstrip()
            if self._buffer:
                self._part = _Part.NORMAL
        if self._part is _Part.NORMAL:
            result.normal_text, self._buffer = self._buffer, ""
        return result

    def _read_start(self, *, ended: bool) -> None:
        stripped = self._buffer.lstrip()
        if stripped.startswith(THINK_START):
            self._buffer = stripped[len(THINK_START) :]
            self._part = _Part.REASONING
        elif ended or not THINK_START.startswith(stripped):
            if self._is_cut:
                self._buffer = without_begun(self._buffer, [THINK_START])
            self._part = _Part.REASONING if self._begins_inside else _Part.NORMAL

    def _read_reasoning(self, *, ended: bool) -> str:
        """The reasoning up to its end, or to what may become its end, without the blanks before
        it."""
        found = self._buffer.find(THINK_END)
        is_marked = found >= 0
        if not is_marked:
            is_text = ended and not self._is_cut
            shown = self._buffer if is_text else without_begun(self._buffer, [THINK_END])
            found = len(shown)
        text, self._buffer = self._buffer[:found], self._buffer[found:]
        text = self._before_call(text, ended=ended or is_marked)
        if is_marked and not self.ended_by_call:
            self._buffer = self._buffer[len(THINK_END) :]
        if is_marked or self.ended_by_call:
            self.reasoning_end = self._num_chars - len(self._buffer)
            self._part = _Part.BETWEEN
        return self._without_last_blanks(text)

    def _before_call(self, text: str, *, ended: bool) -> str:
        """The reasoning in `text` and in what was held back before it. If a call begins in it, the
        call is put in front of the buffer."""
        calls = self._calls
        if calls is None:
            return text
        self._at_calls += text
        passed = len(calls.parse_stream_increment(text).normal_text)
        if ended and calls.first_head is None:
            passed += len(calls.finish(is_cut=self._is_cut).normal_text)
        if calls.first_head is not None:
            passed = calls.first_head - self._num_passed
            self.ended_by_call = True
        self._num_passed += passed
        reasoning, self._at_calls = self._at_calls[:passed], self._at_calls[passed:]
        if self.ended_by_call:
            self._buffer, self._at_calls = self._at_calls + self._buffer, ""
        return reasoning

    def _without_last_blanks(self, text: str) -> str:
        if self._blanks is None:
            text = text.lstrip()
        else:
            text = self._blanks + text
        shown = text.rstrip()
        if shown or self._blanks is not None:
            self._blanks = text[len(shown) :]
        return shown
