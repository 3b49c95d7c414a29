"""Tool calls as JSON objects between markers: one state machine for streams and whole texts."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum
from typing import Any, ClassVar, Final

from sglang.srt.function_call.core_types import StreamingParseResult, ToolCallItem
from sglang.srt.function_call.json_scanner import JsonObjectScanner, ScanState

_HEAD: Final = re.compile(
    r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class _State(Enum):
    TEXT = "text"
    CALL = "call"
    AFTER_CALL = "after call"


class BaseFormatDetector:
    """Splits one output into text and calls. One object for each output; not thread-safe.

    A call is an object with `name`, the name of a known tool, and `arguments` or `parameters`, an
    object. Everything else is normal text and remains unchanged: broken JSON, and calls of unknown
    tools, which the client could not run.

    A stream commits to a call as soon as it has the name and the start of the arguments. If the
    call breaks after that, its pieces have already been sent: the call stays incomplete, `num_cut`
    counts it, and text follows. `parse_non_stream` returns such a call as text. Apart from cut
    calls, the pieces of a stream add up to the result of `parse_non_stream`.

    Args:
        tool_names: The tools that the request named; None allows any name.
        commits_early: Whether to send a call before its end; `parse_non_stream` does not.
    """

    start_marker: ClassVar[str] = ""
    bare_at_start: ClassVar[bool] = False
    """Whether an object at the start of the output is a call even without a marker."""

    def __init__(self, tool_names: Collection[str] | None, *, commits_early: bool = True) -> None:
        self._names = None if tool_names is None else frozenset(tool_names)
        self._commits_early = commits_early
        self._buffer = ""
        self._state = _State.TEXT
        self._may_be_bare = self.bare_at_start
        self._after_call = False
        self._result = StreamingParseResult()
        self._num_calls = 0
        self.num_cut = 0
        self._opener = ""
        self._scanner = JsonObjectScanner()
        self._sent = 0

    def parse_non_stream(self, text: str) -> tuple[str, list[ToolCallItem]]:
        """The normal text and the calls of a whole output."""
        detector = type(self)(self._names, commits_early=False)
        first, last = detector.parse_stream_increment(text), detector.finish()
        return first.normal_text + last.normal_text, merge_calls(first.calls + last.calls)

    def parse_stream_increment(self, new_text: str) -> StreamingParseResult:
        """The text and calls that `new_text` adds. Holds back text that may become a call."""
        self._buffer += new_text
        while self._step():
            pass
        return self._take_result()

    def finish(self) -> StreamingParseResult:
        """End the output. Returns the text that was held back.

        The rest of a call that was already sent is not text, nor are blanks after the last call.
        """
        if self._state is _State.CALL:
            if self._sent_head:
                self.num_cut += 1
            else:
                self._emit_text(self._opener + self._buffer)
        elif not (self._after_call and not self._buffer.strip()):
            self._emit_text(self._buffer)
        self._buffer = ""
        self._state = _State.TEXT
        return self._take_result()

    def _read_separator(self) -> bool | None:
        """Consume the separator after a call; `_start_call` if it also starts the next call.

        Returns:
            True if a separator was consumed, None if more text is needed to decide, False if
            something else follows.
        """
        raise NotImplementedError

    @property
    def _sent_head(self) -> bool:
        return self._scanner.argument_start is not None

    def _step(self) -> bool:
        """Consume some text. Returns whether another step may consume more."""
        if self._state is _State.TEXT:
            return self._step_text()
        if self._state is _State.CALL:
            return self._step_call()
        consumed = self._read_separator()
        if consumed is None:
            return False
        if self._state is _State.AFTER_CALL:
            self._state = _State.TEXT
        return True

    def _step_text(self) -> bool:
        if self._may_be_bare:
            stripped = self._buffer.lstrip()
            if not stripped:
                return False
            self._may_be_bare = False
            if stripped[0] == "{":
                self._start_call(len(self._buffer) - len(stripped))
                return True
        found = self._buffer.find(self.start_marker)
        end = (
            found if found >= 0 else len(self._buffer) - held_back(self._buffer, self.start_marker)
        )
        before = self._buffer[:end]
        if self._after_call and not before.strip():
            # Blanks between two calls are not text; the text after them decides.
            if found < 0:
                return False
        else:
            self._emit_text(before)
            self._after_call = self._after_call and not before
        if found < 0:
            self._buffer = self._buffer[end:]
            return False
        self._buffer = self._buffer[found:]
        self._start_call(len(self.start_marker))
        return True

    def _start_call(self, opener_length: int) -> None:
        """Expect a call after `opener_length` characters, which are text if no call follows."""
        self._opener = self._buffer[:opener_length]
        self._buffer = self._buffer[opener_length:]
        self._scanner = JsonObjectScanner()
        self._sent = 0
        self._state = _State.CALL

    def _step_call(self) -> bool:
        if self._scanner.position == 0:
            stripped = self._buffer.lstrip()
            self._opener += self._buffer[: len(self._buffer) - len(stripped)]
            self._buffer = stripped
            if not stripped:
                return False
            if stripped[0] != "{":
                return self._reject()
        if self._commits_early and not self._sent_head:
            self._try_head()
        state = self._scanner.feed(self._buffer)
        if self._sent_head:
            self._send_arguments()
        if state is ScanState.OPEN:
            return False
        return self._end_call(state)

    def _knows(self, name: str) -> bool:
        return bool(name) if self._names is None else name in self._names

    def _try_head(self) -> None:
        head = _HEAD.match(self._buffer)
        if head is None or not self._knows(head[1]):
            return
        # A new scanner: the old one may have read past the arguments' start.
        scanner = JsonObjectScanner()
        scanner.watch_argument(head.end(), self._buffer)
        self._scanner = scanner
        self._sent = head.end()
        self._emit_call(head[1], "")

    def _send_arguments(self) -> None:
        end = self._scanner.argument_end or self._scanner.position
        if end > self._sent:
            self._emit_call(None, self._buffer[self._sent : end])
            self._sent = end

    def _end_call(self, state: ScanState) -> bool:
        end = self._scanner.position
        call = _as_call(self._buffer[:end]) if state is ScanState.CLOSED else None
        if not self._sent_head:
            if call is None or not self._knows(call[0]):
                return self._reject()
            self._emit_whole(call)
        elif call is None:
            self.num_cut += 1
        self._num_calls += 1
        self._buffer = self._buffer[end:]
        self._state = _State.AFTER_CALL if call is not None else _State.TEXT
        self._after_call = call is not None
        return True

    def _emit_whole(self, call: tuple[str, dict[str, Any]]) -> None:
        """Send a call that ended before any part of it was sent."""
        self._try_head()
        if not self._sent_head:
            self._emit_call(call[0], json.dumps(call[1], ensure_ascii=False))
            return
        self._scanner.feed(self._buffer)
        self._send_arguments()

    def _reject(self) -> bool:
        """Give up a call: its opener becomes text, and the rest is parsed again."""
        self._emit_text(self._opener)
        self._state = _State.TEXT
        self._after_call = False
        return True

    def _emit_text(self, text: str) -> None:
        self._result.normal_text += text

    def _emit_call(self, name: str | None, parameters: str) -> None:
        self._result.calls.append(ToolCallItem(self._num_calls, name, parameters))

    def _take_result(self) -> StreamingParseResult:
        result, self._result = self._result, StreamingParseResult()
        return result


def held_back(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
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
            else ToolCallItem(piece.tool_index, before.name, before.parameters + piece.parameters)
        )
    return list(merged.values())


def _as_call(text: str) -> tuple[str, dict[str, Any]] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, arguments
