"""Splits an output into reasoning, `<think>...</think>`, and answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from sglang.srt.function_call.format_detector import held_back

_START: Final = "<think>"
_END: Final = "</think>"
_MAX_PROMPT_END: Final = 64
"""Characters at the end of a prompt that may have a marker, and blanks that templates append."""

REASONING_PARSERS: Final[Mapping[str, bool]] = {
    "qwen3": False,
    "qwen3-thinking": True,
    "deepseek-r1": True,
    "deepseek-v3": False,
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


def opened_reasoning(prompt: str) -> bool | None:
    """True if `prompt` ends by opening the reasoning, False if by closing it, else None."""
    end = prompt[-_MAX_PROMPT_END:].rstrip()
    if end.endswith(_END):
        return False
    return True if end.endswith(_START) else None


def reasoning_end(output: str) -> int:
    """The position in `output`, which begins with reasoning, at which the answer's part begins."""
    end = output.find(_END)
    return len(output) if end < 0 else end + len(_END)


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

    If the reasoning has no end marker, the whole output is reasoning. A marker in the middle of
    the answer is part of the answer.

    Args:
        name: One of `REASONING_PARSERS`.
        begins_inside: Whether the output begins inside its reasoning, see `opened_reasoning`;
            None means the default of `name`.
    """

    def __init__(self, name: str, *, begins_inside: bool | None = None) -> None:
        self._name = name
        self._begins_inside = REASONING_PARSERS[name] if begins_inside is None else begins_inside
        self._part = _Part.START
        self._buffer = ""
        self._reasoned = False

    def parse_non_stream(self, text: str) -> tuple[str, str]:
        """The reasoning and the normal text of a whole output."""
        parser = ReasoningParser(self._name, begins_inside=self._begins_inside)
        first, last = parser.parse_stream_increment(text), parser.finish()
        return (
            first.reasoning_text + last.reasoning_text,
            first.normal_text + last.normal_text,
        )

    def parse_stream_increment(self, new_text: str) -> ReasoningParseResult:
        """The text that `new_text` adds to each part. Holds back the start of a marker."""
        self._buffer += new_text
        return self._advance(ended=False)

    def finish(self) -> ReasoningParseResult:
        """End the stream. Returns the text that was held back."""
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
        if stripped.startswith(_START):
            self._buffer = stripped[len(_START) :]
            self._part = _Part.REASONING
        elif ended or not _START.startswith(stripped):
            self._part = _Part.REASONING if self._begins_inside else _Part.NORMAL

    def _read_reasoning(self, *, ended: bool) -> str:
        """The reasoning up to a whole or partial end marker, without the blanks before it."""
        if not self._reasoned:
            self._buffer = self._buffer.lstrip()
        found = self._buffer.find(_END)
        if found >= 0:
            text, self._buffer = self._buffer[:found].rstrip(), self._buffer[found + len(_END) :]
            self._part = _Part.BETWEEN
            return text
        end = len(self._buffer) - (0 if ended else held_back(self._buffer, _END))
        text = self._buffer[:end].rstrip()
        self._buffer = "" if ended else self._buffer[len(text) :]
        self._reasoned = self._reasoned or bool(text)
        return text
