"""Tool calls as JSON objects between markers: one state machine for streams and whole texts."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any, ClassVar, Final, Self

from sglang.srt.function_call.format_detector import (
    CallFrame,
    FormatDetector,
    StreamingParseResult,
)
from sglang.srt.function_call.json_text import JsonObjectScanner, ScanState

_HEAD: Final = re.compile(
    r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class _State(Enum):
    TEXT = "text"
    CALL = "call"
    AFTER_CALL = "after call"


class BaseFormatDetector(FormatDetector):
    """Calls as JSON objects, which a stream sends while they are written.

    A call is an object with `name`, the name of a known tool, and `arguments` or `parameters`, an
    object. Broken JSON, and calls of unknown tools, which the client could not run, are text.
    Strings are mended (see `JsonObjectScanner`), so that the arguments are JSON.

    A stream commits to a call as soon as it has the name and the start of the arguments. If the
    output ends before the call does, the call has the arguments so far. If the call breaks, its
    pieces have already been sent: it stays incomplete, `num_cut` counts it, and text follows.
    `parse_non_stream` returns a call that breaks as text. Apart from these, the pieces of a stream
    add up to the result of `parse_non_stream`.

    Args:
        tool_names: The tools that the request named; None allows any name.
        schemas: Not needed: JSON has types.
        commits_early: True to send a call before it or the output ends. `parse_non_stream` sets it
            to false.
    """

    def __init__(
        self,
        tool_names: Collection[str] | None,
        schemas: Mapping[str, Mapping[str, Any]],
        *,
        commits_early: bool = True,
    ) -> None:
        super().__init__(tool_names, schemas)
        self._commits_early = commits_early
        self._state = _State.TEXT
        self._may_be_bare = self.bare_at_start
        self._opener = ""
        self._scanner = JsonObjectScanner()
        self._sent = 0

    def finish(self, *, is_cut: bool = False) -> StreamingParseResult:
        """End the output. Returns the text that was held back, and the call that a whole output
        ends in. The rest of a call is not text, nor are blanks after the last call.
        """
        if self._state is _State.CALL:
            if not self._sent_head:
                self._commit()
            if not self._sent_head:
                self._emit_text(self._opener + self._buffer)
        elif not (is_cut and self._state is _State.AFTER_CALL):  # There it is a cut separator.
            self._finish_text(is_cut=is_cut)
        self._buffer = ""
        self._state = _State.TEXT
        return self._take_result()

    def _new(self) -> Self:
        return type(self)(self._names, self._schemas, commits_early=False)

    @abstractmethod
    def _read_separator(self) -> bool | None:
        """Consume the separator after a call; `_start_call` if it also starts the next call. None:
        more text is needed to decide; False: something else follows."""

    @property
    def _sent_head(self) -> bool:
        return self._scanner.argument_start is not None

    def _step(self) -> bool:
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
        return super()._step_text()

    def _start_call(self, opener_length: int) -> None:
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

    def _try_head(self) -> None:
        head = _HEAD.match(self._buffer)
        if head is None or not self._knows(head[1]):
            return
        # A new scanner: the old one may have read past the arguments' start.
        scanner = JsonObjectScanner()
        scanner.feed(self._buffer, head.end())
        scanner.argument_start = head.end()
        self._scanner = scanner
        self._sent = head.end()
        self._note_head()
        self._emit_call(head[1], "")

    def _send_arguments(self) -> None:
        end = self._scanner.argument_end or self._scanner.settled
        if end > self._sent:
            self._emit_call(None, self._scanner.mended(self._buffer, self._sent, end))
            self._sent = end

    def _end_call(self, state: ScanState) -> bool:
        end = self._scanner.position
        call = None
        if state is ScanState.CLOSED:
            call = _as_call(self._scanner.mended(self._buffer, 0, end))
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
        self._note_head()
        self._commit()
        if not self._sent_head:
            self._emit_call(call[0], json.dumps(call[1], ensure_ascii=False))

    def _commit(self) -> None:
        """Send the name and the arguments of a call so far, if they can be sent already."""
        self._try_head()
        if self._sent_head:
            self._scanner.feed(self._buffer)
            self._send_arguments()

    def _reject(self) -> bool:
        """Give up a call: its opener becomes text, and the rest is parsed again."""
        self._emit_text(self._opener)
        self._state = _State.TEXT
        self._after_call = False
        return True


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


_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"


class Qwen25Detector(BaseFormatDetector):
    """Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    The end marker may be missing.
    """

    start_markers: ClassVar[tuple[str, ...]] = (_BEGIN,)
    call_frame: ClassVar[CallFrame | None] = CallFrame(
        _BEGIN, ("{", '"name"', ":", '"{name}"', ",", '"arguments"', ":"), ("}",), _END
    )

    def _read_separator(self) -> bool | None:
        rest = self._buffer.lstrip()
        if rest.startswith(_END):
            self._buffer = rest[len(_END) :]
            return True
        return None if _END.startswith(rest) else False


_MARKER: Final = "<|python_tag|>"


class Llama32Detector(BaseFormatDetector):
    """Llama 3: `{"name": ..., "parameters": {...}}`, separated by `;`, with or without a marker.

    The marker is a special token, which detokenizing may drop. Therefore an object at the start of
    the output counts as a call even without it. After a call, anything but a `;` is text.
    """

    start_markers: ClassVar[tuple[str, ...]] = (_MARKER,)
    bare_at_start: ClassVar[bool] = True

    def _read_separator(self) -> bool | None:
        rest = self._buffer.lstrip()
        if not rest:
            return None
        if rest[0] != ";":
            return False
        following = rest[1:].lstrip()
        if following.startswith("{"):
            self._start_call(len(self._buffer) - len(following))
            return True
        if following.startswith(_MARKER):
            self._start_call(len(self._buffer) - len(following) + len(_MARKER))
            return True
        return None if _MARKER.startswith(following) else False
