"""Tool calls between tags, several of them in a section: read part by part."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sglang.srt.function_call.core_types import StreamingParseResult
from sglang.srt.function_call.format_detector import NO_SCHEMAS, FormatDetector
from sglang.srt.function_call.text_cursor import BrokenCall, NeedMoreText, TextCursor


class TaggedFormatDetector(FormatDetector):
    """A section has a start marker, calls, maybe blanks between them, and an end marker.

    A stream sends a call when it is complete, so no call is ever cut, and a stream gives what
    `parse_non_stream` gives. A call that breaks off is text. The end of the section may be missing.
    """

    section_ends: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        tool_names: Collection[str] | None,
        schemas: Mapping[str, Mapping[str, Any]] = NO_SCHEMAS,
    ) -> None:
        super().__init__(tool_names, schemas)
        self._in_section = False
        self._opener = ""
        """Text that was read and belongs to no complete call yet."""
        self._in_call = False
        self._searched = 0
        """Characters of the buffer in which the end of the part does not begin."""

    def finish(self) -> StreamingParseResult:
        """End the output. Returns the text that was held back."""
        self._buffer, self._opener = self._opener + self._buffer, ""
        self._in_section = False
        self._finish_text()
        return self._take_result()

    @abstractmethod
    def _begin_call(self) -> None:
        """Forget the call before."""

    @abstractmethod
    def _read_part(self, cursor: TextCursor) -> tuple[str, str] | None:
        """Read the next part of a call.

        Returns:
            Name and arguments, a JSON object, if the call ends with this part.

        Raises:
            NeedMoreText: The part is not complete.
            BrokenCall: The text is no part of a call, or the call names an unknown tool.
        """

    def _step(self) -> bool:
        return self._step_section() if self._in_section else self._step_text()

    def _start_call(self, opener_length: int) -> None:
        self._opener = self._buffer[:opener_length]
        self._buffer = self._buffer[opener_length:]
        self._in_section = True
        self._after_call = False
        self._new_call()

    def _new_call(self) -> None:
        self._in_call = False
        self._searched = 0
        self._begin_call()

    def _step_section(self) -> bool:
        cursor = TextCursor(self._buffer)
        try:
            if not self._in_call:
                cursor.skip_blanks()
                if self._after_call and cursor.accept(*self.section_ends):
                    self._buffer = self._buffer[cursor.position :]
                    self._in_section = False
                    return True
            call = self._read_part(cursor)
        except NeedMoreText:
            return False
        except BrokenCall:
            self._emit_text(self._opener)
            self._opener = ""
            self._in_section = self._after_call = False
            return True
        self._opener += self._buffer[: cursor.position]
        self._buffer = self._buffer[cursor.position :]
        self._in_call = True
        self._searched = 0
        if call is not None:
            self._emit_call(*call)
            self._num_calls += 1
            self._opener = ""
            self._after_call = True
            self._new_call()
        return True

    def _read_value(self, cursor: TextCursor, end: str) -> str:
        """Read a part that is all text up to `end`."""
        try:
            return cursor.until(end, searched=self._searched)
        except NeedMoreText:
            self._searched = max(0, len(self._buffer) - len(end) + 1)
            raise


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter whose value follows."""

    name: str
    end: str
    """Text that ends the value."""
    convert: Callable[[str], Any]
    """Converts the text of the value."""


class ParameterFormatDetector(TaggedFormatDetector):
    """Calls that name each parameter in a tag of its own. The last of equal names counts."""

    def _begin_call(self) -> None:
        self._name: str | None = None
        self._arguments: dict[str, Any] = {}
        self._parameter: Parameter | None = None

    @abstractmethod
    def _read_head(self, cursor: TextCursor) -> str:
        """Read the start of a call. Returns the tool's name; raises as `_read_part`."""

    @abstractmethod
    def _read_parameter(self, tool: str, cursor: TextCursor) -> Parameter | None:
        """Read a parameter's opening tag, or the end of the call; raises as `_read_part`.

        Returns:
            None: the call has ended.
        """

    def _read_part(self, cursor: TextCursor) -> tuple[str, str] | None:
        if self._name is None:
            name = self._read_head(cursor)
            if not self._knows(name):
                raise BrokenCall
            self._name = name
        elif self._parameter is not None:
            text = self._read_value(cursor, self._parameter.end)
            self._arguments[self._parameter.name] = self._parameter.convert(text)
            self._parameter = None
        else:
            cursor.skip_blanks()
            self._parameter = self._read_parameter(self._name, cursor)
            if self._parameter is None:
                return self._name, json.dumps(self._arguments, ensure_ascii=False)
        return None
