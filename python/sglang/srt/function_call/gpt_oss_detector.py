"""Messages as gpt-oss writes them (OpenAI's harmony format): reasoning, text and calls.

    <|channel|>analysis<|message|>REASONING<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>TEXT<|return|>

Source: OpenAI's guide to the format. The prompt ends with `<|start|>assistant`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Final

from sglang.srt.function_call.format_detector import FormatDetector, StreamingParseResult
from sglang.srt.function_call.json_text import JsonObjectScanner, ScanState
from sglang.srt.function_call.tagged_format import BrokenCall, as_object

GPT_OSS: Final = "gpt-oss"
"""Name of the parser, which reads reasoning and calls together."""
START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
HEADER_MARKS: Final[tuple[str, ...]] = (START, CHANNEL, MESSAGE, END)
"""Special tokens around the messages before the last one."""
_ENDS: Final = (END, "<|return|>", "<|call|>")
MAX_HEADER: Final = 256
"""Characters before `<|message|>`; more are text."""
MESSAGES_APART: Final = "\n\n"
"""Separates the texts of two messages that become one text."""

_MARKS: Final = (
    START, CHANNEL, CONSTRAIN, MESSAGE, *_ENDS, "<|startoftext|>", "<|endoftext|>",
    "<|endofprompt|>", "<|reserved_",
)  # fmt: skip
_RESERVED: Final = r"<\|reserved_[0-9]{1,9}\|>"
_MARK: Final = re.compile("|".join([*map(re.escape, _MARKS[:-1]), _RESERVED]))
_BEGINS: Final = {mark[:length] for mark in _MARKS for length in range(1, len(mark) + 1)}
_PART_OF_MARK: Final = re.compile(
    rf"(?:{'|'.join(map(re.escape, sorted(_BEGINS - {*_MARKS[:-1]})))}"
    r"|<\|reserved_[0-9]{1,9}\|?)\Z"
)
"""Text at the end that may become a mark."""
_LONGEST_MARK: Final = 24
_BLANKS: Final = re.compile(r"\s*")
_ROLES: Final = ("assistant", "system", "developer", "user", "tool")
_CHANNELS: Final = ("analysis", "commentary", "final")
_FUNCTIONS: Final = "functions."
_HEADER: Final = re.compile(
    r"(?P<role>[a-z]*)(?: ?\bto=(?P<first_to>[^ <]*))?"
    r" ?(?:<\|channel\|> ?(?P<channel>\w*)(?: to=(?P<to>[^ <]*))?)?"
    r" ?(?:<\|constrain\|> ?)?(?:json|code|text)?"
)
"""A header with single blanks."""


FINAL: Final = f"{CHANNEL}final{MESSAGE}"
"""Begins the answer, behind the role."""


def begun_message(prompt: str) -> str:
    """The header that `prompt` ends with or whose text it ends with, without its role; empty: it
    ends with the role, or has no messages."""
    begin = prompt.rfind(START)
    header, message, text = prompt[begin + len(START) :].partition(MESSAGE)
    if begin < 0 or len(header) > MAX_HEADER or any(end in header + text for end in _ENDS):
        return ""
    return header.removeprefix(_ROLES[0]) + message


class PartKind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of one message, in the order of the output."""

    kind: PartKind
    text: str
    """A call's arguments, a JSON object."""
    name: str = ""
    """A call's function."""


@dataclass(frozen=True, slots=True)
class Header:
    channel: str
    """Empty: the message has none."""
    recipient: str
    """Empty: the user."""


def read_header(text: str, *, is_cut: bool = False) -> Header | None:
    """The header `text`, from the role up to `<|message|>`; None: it is none. The last word of a
    header that `is_cut` may be incomplete."""
    found = _HEADER.fullmatch(_spaced(text))
    if found is None:
        return None
    role, channel = found["role"], found["channel"] or ""

    def is_known(word: str, words: Collection[str]) -> bool:
        return not word or word in words or (is_cut and any(w.startswith(word) for w in words))

    if not is_known(role, _ROLES) or not is_known(channel, _CHANNELS):
        return None
    return Header(channel, found["to"] or found["first_to"] or "")


def _spaced(text: str) -> str:
    """`text` with single blanks between its words."""
    return " ".join(text.split())


class _State(Enum):
    HEADER = "header"
    BODY = "body"
    ARGUMENTS = "arguments"
    BETWEEN = "between"


class GptOssDetector(FormatDetector):
    """Reads messages until the output ends, in any order and number.

    The channel `analysis` is reasoning; `final`, and `commentary` without a recipient, are text. A
    call is a message to `functions.NAME`, a known tool, with a JSON object. It is sent when the
    object is complete. Other headers and calls are text. All text between marks is kept; no mark
    is, except in strings of arguments.

    Broken arguments are read again, as text. A quote that begins a string in later arguments ends
    one in the broken ones, which therefore end before the next mark. The work stays linear.

    Args:
        tool_names: The tools that the request named; None allows any `functions.NAME`.
        schemas: Not needed: JSON has types.
        separates_reasoning: False: reasoning is text.
    """

    start_markers: ClassVar[tuple[str, ...]] = (CHANNEL,)
    has_special_markers: ClassVar[bool] = True

    def __init__(
        self,
        tool_names: Collection[str] | None,
        schemas: Mapping[str, Mapping[str, Any]],
        *,
        separates_reasoning: bool = False,
    ) -> None:
        super().__init__(tool_names, schemas)
        self._separates_reasoning = separates_reasoning
        self._state = _State.HEADER
        self._is_first = True
        """True until the first header has been read; the prompt has begun it."""
        self._kind = PartKind.TEXT
        self._begins = False
        """True if the message has no text yet."""
        self._shown_kinds: set[PartKind] = set()
        self._parts: list[Part] = []
        self._call = ""
        """Name of the function that the arguments are for."""
        self._opener = ""
        """Header and blanks before the arguments, as text."""
        self._scanner = JsonObjectScanner()
        self._at = 0
        """Place in the buffer up to which it has been read."""
        self._num_fed = 0
        self._has_ended = False
        self._is_cut = False
        self.reasoning_end = 0
        """Characters of the output up to the end of its last reasoning."""

    def begin_with(self, begun: str) -> None:
        """Continue a message of which the prompt has the part `begun`; call it first."""
        self.take_parts(begun)
        self._num_fed = 0

    def take_parts(self, new_text: str) -> list[Part]:
        """The parts that `new_text` adds, as `parse_stream_increment` but in order."""
        self._num_fed += len(new_text)
        self._buffer += new_text
        while self._step():
            pass
        self._buffer, self._at = self._buffer[self._at :], 0
        parts, self._parts = self._parts, []
        return parts

    def last_parts(self, *, is_cut: bool = False) -> list[Part]:
        """End the output. Returns the parts that were held back; `is_cut` as `finish`."""
        self._has_ended, self._is_cut = True, is_cut
        parts = self.take_parts("")
        if self._state is _State.BODY and self._kind is PartKind.REASONING:
            self.reasoning_end = self._num_fed
        return parts

    def parse_stream_increment(self, new_text: str) -> StreamingParseResult:
        self._add_to_result(self.take_parts(new_text))
        return self._take_result()

    def finish(self, *, is_cut: bool = False) -> StreamingParseResult:
        self._add_to_result(self.last_parts(is_cut=is_cut))
        return self._take_result()

    def _add_to_result(self, parts: list[Part]) -> None:
        for part in parts:
            if part.kind is PartKind.CALL:
                self._emit_call(part.name, part.text)
                self._num_calls += 1
            else:
                self._emit_text(part.text)

    def _step(self) -> bool:
        if self._state is _State.HEADER:
            return self._step_header()
        if self._state is _State.BODY:
            return self._step_body()
        if self._state is _State.ARGUMENTS:
            return self._step_arguments()
        return self._step_between()

    def _start_call(self, opener_length: int) -> None:
        self._at += opener_length
        self._state = _State.HEADER

    def _step_header(self) -> bool:
        limit = self._at + MAX_HEADER
        marks = _MARK.finditer(self._buffer, self._at, limit + _LONGEST_MARK)
        end = next((one for one in marks if one[0] not in (CHANNEL, CONSTRAIN)), None)
        if end is not None:
            is_long = end.start() > limit
        else:
            is_long = len(self._buffer) > limit + (0 if self._has_ended else _LONGEST_MARK)
        begin = self._buffer[self._at : limit]
        if is_long or (self._is_first and not _may_begin_header(begin)):
            first = _MARK.match(self._buffer, self._at)
            self._at = self._at if first is None else first.end()
            self._begin_text()
            return True
        if end is None:
            if not self._has_ended:
                return False
            text = _PART_OF_MARK.sub("", begin)
            self._at += len(text)
            self._end_header(text, has_body=False)
            return True
        has_body = end[0] == MESSAGE
        text = self._buffer[self._at : end.start()]
        self._at = end.end() if has_body else end.start()
        self._end_header(text, has_body=has_body)
        return True

    def _end_header(self, text: str, *, has_body: bool) -> None:
        self._is_first = False
        header = read_header(text, is_cut=not has_body)
        if header is not None and not (has_body or self._may_be_cut(header.recipient)):
            header = None
        words = _spaced(_MARK.sub(" ", text))
        if header is None:
            self._begin_text()
            self._show(words)
            if not has_body:
                self._state = _State.BETWEEN
            elif words:
                self._show("\n")
        elif not has_body:
            self._state = _State.BETWEEN
        elif header.recipient:
            self._begin_arguments(header.recipient, words.removeprefix("assistant ") + "\n")
        else:
            self._begin_text()
            if header.channel == "analysis":
                self._kind = PartKind.REASONING

    def _may_be_cut(self, recipient: str) -> bool:
        """True if `recipient` is empty or begins the name of a function that may be called."""
        if self._names is None:
            return recipient.startswith(_FUNCTIONS) or _FUNCTIONS.startswith(recipient)
        return not recipient or any(
            name.startswith(recipient) or (_FUNCTIONS + name).startswith(recipient)
            for name in self._names
        )

    def _begin_text(self) -> None:
        self._is_first = False
        self._state = _State.BODY
        self._kind = PartKind.TEXT
        self._begins = True

    def _step_body(self) -> bool:
        mark = _MARK.search(self._buffer, self._at)
        end = self._end_of_text() if mark is None else mark.start()
        self._show(self._buffer[self._at : end])
        self._at = end if mark is None else mark.end()
        if mark is None:
            return False
        if mark[0] in (START, CHANNEL, *_ENDS):
            self._end_message(mark)
        return True

    def _end_of_text(self) -> int:
        """The end of the buffer, without what may become a mark."""
        begin = max(self._at, len(self._buffer) - _LONGEST_MARK)
        is_text = self._has_ended and not self._is_cut
        held = None if is_text else _PART_OF_MARK.search(self._buffer, begin)
        return len(self._buffer) if held is None else held.start()

    def _end_message(self, mark: re.Match[str]) -> None:
        """End a message at `mark`, which has been read."""
        if self._kind is PartKind.REASONING:
            self.reasoning_end = self._num_fed - len(self._buffer) + self._at
        self._state = _State.BETWEEN
        if mark[0] == CHANNEL:
            self._at = mark.start()
        if mark[0] in (START, CHANNEL):
            self._start_call(0)

    def _step_between(self) -> bool:
        blanks = _BLANKS.match(self._buffer, self._at)
        assert blanks is not None, "it matches nothing, too"
        self._at = blanks.end()
        mark = _MARK.match(self._buffer, self._at)
        if mark is None:
            if self._end_of_text() == self._at:
                return False
            self._begin_text()
            return True
        if mark[0] == CHANNEL:
            self._start_call(0)
            return True
        self._at = mark.end()
        if mark[0] == START:
            self._start_call(0)
        elif mark[0] == MESSAGE:
            self._begin_text()
        return True

    def _begin_arguments(self, recipient: str, opener: str) -> None:
        name = recipient.removeprefix(_FUNCTIONS)
        is_function = name != recipient or self._names is not None
        if not is_function or not self._knows(name):
            self._begin_text()
            self._show(opener)
            return
        self._state = _State.ARGUMENTS
        self._kind = PartKind.CALL
        self._call, self._opener = name, opener
        self._buffer, self._at = self._buffer[self._at :], 0
        self._scanner = JsonObjectScanner()

    def _step_arguments(self) -> bool:
        if self._scanner.position == 0:
            stripped = self._buffer.lstrip()
            self._opener += self._buffer[: len(self._buffer) - len(stripped)]
            self._buffer = stripped
            if not stripped and not self._has_ended:
                return False
            if not stripped.startswith("{"):
                return self._break_call()
        state = self._scanner.feed(self._buffer)
        if state is ScanState.OPEN and not self._has_ended:
            return False
        if state is not ScanState.CLOSED:
            return self._break_call()
        self._at = self._scanner.position
        try:
            arguments = as_object(self._buffer[: self._at])
        except BrokenCall:
            self._at = 0
            return self._break_call()
        self._parts.append(Part(PartKind.CALL, arguments, self._call))
        self._state = _State.BETWEEN
        return True

    def _break_call(self) -> bool:
        """The arguments are none: they are text."""
        self._begin_text()
        self._show(self._opener)
        return True

    def _show(self, text: str) -> None:
        """Add text to the message."""
        if not text:
            return
        kind = self._kind if self._separates_reasoning else PartKind.TEXT
        if self._begins and kind in self._shown_kinds:
            text = MESSAGES_APART + text
        self._begins = False
        self._shown_kinds.add(kind)
        self._parts.append(Part(kind, text))


def _may_begin_header(text: str) -> bool:
    """True if an output that begins with `text` may begin with the rest of a header."""
    text = text.lstrip()
    if _MARK.match(text) or _PART_OF_MARK.match(text):
        return True
    return text.startswith("to=") or "to=".startswith(text)
