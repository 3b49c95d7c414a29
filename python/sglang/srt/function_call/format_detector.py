"""Base of tool-call parsers: text around the calls, and text that a stream holds back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self


@dataclass(frozen=True)
class ToolCallItem:
    """A call, or a piece of a call in a stream.

    Attributes:
        tool_index: Index of the call in the output, from 0.
        name: The tool's name; None in later pieces of a call.
        parameters: The arguments, a JSON object as the model wrote it. In a stream: the part that
            follows the last piece.
        id: Id that the model wrote; None: it writes none.
    """

    tool_index: int
    name: str | None
    parameters: str
    id: str | None = None


@dataclass
class StreamingParseResult:
    """The text and calls that one increment of a stream added."""

    normal_text: str = ""
    calls: list[ToolCallItem] = field(default_factory=list)


@dataclass(frozen=True)
class CallFrame:
    """The way a format writes a call whose arguments are a JSON object.

    Attributes:
        begin: Text that begins each call, and nothing else.
        head: Pieces between `begin` and the arguments; `{name}` is the tool's name. There may be
            blanks around the pieces.
        tail: Pieces between the arguments and `end`.
        end: Text that ends the call.
    """

    begin: str
    head: tuple[str, ...]
    tail: tuple[str, ...]
    end: str


class FormatDetector(ABC):
    """Splits one output into text and calls. One object for each output; not thread-safe.

    Everything that is no call of a known tool is normal text and remains unchanged; blanks
    between calls and behind the last one belong to the calls. `tool_names` None allows any name;
    tools may be missing in `schemas`, the JSON schemas of their parameters.
    """

    start_markers: ClassVar[tuple[str, ...]]
    """Any of them may begin a call."""
    has_special_markers: ClassVar[bool] = False
    """True if markers are special tokens, which texts otherwise lack."""

    call_frame: ClassVar[CallFrame | None] = None
    """Frame in which a grammar enforces schemas of arguments, or None if it cannot. It cannot if
    the arguments are no JSON, or if the markers are special tokens, which grammars never allow."""

    bare_at_start: ClassVar[bool] = False
    """True if an object at the start of the output is a call even without a marker."""

    def __init__(
        self, tool_names: Collection[str] | None, schemas: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._names = None if tool_names is None else frozenset(tool_names)
        self._schemas = schemas
        self._buffer = ""
        self._after_call = False
        self._result = StreamingParseResult()
        self._num_calls = 0
        self._call_id: str | None = None
        self._num_text = 0
        self.num_cut = 0
        """Calls that broke after a stream had sent a part of them."""
        self.first_head: int | None = None
        """Characters of text before the first call that named a known tool; None: none has. The
        call may break later."""
        self.end_of_reasoning: str | None = None
        """Marker that may follow the calls: the first of them ended a reasoning that was not
        closed. It is not text."""

    def parse_non_stream(
        self, text: str, *, is_cut: bool = False
    ) -> tuple[str, list[ToolCallItem]]:
        """The normal text and the calls of a whole output; `is_cut` as `finish`."""
        detector = self._for_whole_output()
        first, last = detector.parse_stream_increment(text), detector.finish(is_cut=is_cut)
        return first.normal_text + last.normal_text, merge_calls(first.calls + last.calls)

    def parse_stream_increment(self, new_text: str) -> StreamingParseResult:
        """The text and calls that `new_text` adds. Holds back text that may become a call."""
        self._buffer += new_text
        while self._step():
            pass
        return self._take_result()

    @abstractmethod
    def finish(self, *, is_cut: bool = False) -> StreamingParseResult:
        """End the output. Returns the text that was held back.

        `is_cut`: the output ended at a limit, and not where the model ended it. The part of a
        marker at its end is then no text.
        """

    def _for_whole_output(self) -> Self:
        detector = self._new()
        detector.end_of_reasoning = self.end_of_reasoning
        return detector

    def _new(self) -> Self:
        return type(self)(self._names, self._schemas)

    @abstractmethod
    def _step(self) -> bool:
        """Consume some text. Returns whether another step may consume more."""

    @abstractmethod
    def _start_call(self, opener_length: int) -> None:
        """Expect a call after `opener_length` characters, which are text if no call follows."""

    def _knows(self, name: str) -> bool:
        return bool(name) if self._names is None else name in self._names

    def _note_head(self) -> None:
        """Note that a call has named a known tool."""
        if self.first_head is None:
            self.first_head = self._num_text

    def _step_text(self) -> bool:
        if self._after_call and self.end_of_reasoning is not None:
            following = self._buffer.lstrip()
            if following.startswith(self.end_of_reasoning):
                self._buffer = following[len(self.end_of_reasoning) :]
                self.end_of_reasoning = None
            elif self.end_of_reasoning.startswith(following):
                return False
        found = [(self._buffer.find(marker), -len(marker)) for marker in self.start_markers]
        begin, negative_length = min((f for f in found if f[0] >= 0), default=(-1, 0))
        end = begin
        if begin < 0:
            end = len(without_begun(self._buffer, self.start_markers))
        before = self._buffer[:end]
        if self._after_call and not before.strip():
            # Blanks between two calls are not text; the text after them decides.
            if begin < 0:
                return False
        else:
            self._emit_text(before)
            self._after_call = self._after_call and not before
        self._buffer = self._buffer[end:]
        if begin < 0:
            return False
        self._start_call(-negative_length)
        return True

    def _finish_text(self, *, is_cut: bool, markers: tuple[str, ...] = ()) -> None:
        """Emit what was held back, except blanks behind the last call. `markers` may come here
        besides those that begin a call."""
        if is_cut:
            if self._after_call and self.end_of_reasoning is not None:
                markers += (self.end_of_reasoning,)
            self._buffer = without_begun(self._buffer, self.start_markers + markers)
        if not (self._after_call and not self._buffer.strip()):
            self._emit_text(self._buffer)
        self._buffer = ""

    def _emit_text(self, text: str) -> None:
        self._num_text += len(text)
        self._result.normal_text += text

    def _emit_call(self, name: str | None, parameters: str) -> None:
        self._result.calls.append(ToolCallItem(self._num_calls, name, parameters, self._call_id))

    def _take_result(self) -> StreamingParseResult:
        result, self._result = self._result, StreamingParseResult()
        return result


def without_begun(text: str, markers: Iterable[str]) -> str:
    """`text` without its longest suffix that is a proper prefix of one of `markers`. A stream holds
    this suffix back until more text decides; where the output is cut, it is shown nowhere."""
    return text[: len(text) - max(_begun(text, marker) for marker in markers)]


def _begun(text: str, marker: str) -> int:
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def merge_calls(pieces: list[ToolCallItem]) -> list[ToolCallItem]:
    """Join the pieces of a stream to whole calls."""
    merged: dict[int, ToolCallItem] = {}
    for piece in pieces:
        before = merged.get(piece.tool_index)
        merged[piece.tool_index] = (
            piece
            if before is None
            else replace(before, parameters=before.parameters + piece.parameters)
        )
    return list(merged.values())
