"""Tool calls as Kimi-K2, GLM-4.5 and later, and Mistral write them.

Sources: the chat templates of these models, which show earlier calls in the same form.
"""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any, ClassVar, Final

from sglang.srt.function_call.json_detectors import JsonObjectScanner, ScanState
from sglang.srt.function_call.tagged_detectors import (
    BrokenCall,
    NeedMoreText,
    Parameter,
    ParameterFormatDetector,
    TaggedFormatDetector,
    TextCursor,
    parse_json,
    typed_value,
)

_KIMI_ID: Final = re.compile(r"(?:functions\.)?(?P<name>[^\s:]+)(?::\d+)?")


class KimiK2Detector(TaggedFormatDetector):
    """Kimi-K2: an id such as `functions.NAME:0`, which later messages repeat, then JSON.

    The markers are special tokens.
    """

    start_markers: ClassVar[tuple[str, ...]] = ("<|tool_calls_section_begin|>",)
    section_ends: ClassVar[tuple[str, ...]] = ("<|tool_calls_section_end|>",)
    has_special_markers: ClassVar[bool] = True

    def _begin_call(self) -> None:
        self._name: str | None = None

    def _read_part(self, cursor: TextCursor) -> tuple[str, str] | None:
        if self._name is None:
            cursor.expect("<|tool_call_begin|>")
            written = cursor.until("<|tool_call_argument_begin|>", forbidden="\n").strip()
            found = _KIMI_ID.fullmatch(written)
            if found is None or not self._knows(found["name"]):
                raise BrokenCall
            self._name, self._call_id = found["name"], written
            return None
        arguments = self._read_value(cursor, "<|tool_call_end|>").strip()
        _check_object(arguments)
        return self._name, arguments


_CALL: Final = "<tool_call>"
_END_OF_CALL: Final = "</tool_call>"


class Glm4MoeDetector(ParameterFormatDetector):
    """GLM-4.5 and later: the name, then `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`.

    The tool's schema gives the types of values. GLM-4.5 writes newlines between the tags, GLM-4.7
    none.
    """

    start_markers: ClassVar[tuple[str, ...]] = (_CALL,)
    # Calls follow one another without a section around them.
    section_ends: ClassVar[tuple[str, ...]] = (_END_OF_CALL,)

    def _read_head(self, cursor: TextCursor) -> str:
        if self._after_call:
            cursor.expect(_CALL)
        name = cursor.until("<").strip()
        cursor.position -= 1
        if any(char.isspace() for char in name):
            raise BrokenCall
        return name

    def _read_parameter(self, tool: str, cursor: TextCursor) -> Parameter | None:
        if cursor.expect("<arg_key>", _END_OF_CALL) == _END_OF_CALL:
            return None
        name = cursor.until("</arg_key>", forbidden="\n").strip()
        cursor.skip_blanks()
        cursor.expect("<arg_value>")
        schema = self._schemas.get(tool, {})
        return Parameter(name, "</arg_value>", partial(typed_value, parameters=schema, name=name))


_MARKER: Final = "[TOOL_CALLS]"


class MistralDetector(TaggedFormatDetector):
    """Mistral: `[TOOL_CALLS]`, a special token, then a JSON list of objects with `name` and
    `arguments`; later models write `[TOOL_CALLS]NAME[ARGS]{...}` for each call."""

    start_markers: ClassVar[tuple[str, ...]] = (_MARKER,)
    section_ends: ClassVar[tuple[str, ...]] = ("]",)
    has_special_markers: ClassVar[bool] = True

    def _begin_call(self) -> None:
        self._name: str | None = None
        self._is_listed = False
        self._scanner = JsonObjectScanner()

    def _read_part(self, cursor: TextCursor) -> tuple[str, str] | None:
        if self._in_call:
            return self._read_object(cursor)
        if cursor.accept("," if self._after_call else "["):
            self._is_listed = True
            return None
        if self._after_call:
            cursor.expect(_MARKER)
        name = cursor.until("[ARGS]", forbidden="\n{").strip()
        if not self._knows(name):
            raise BrokenCall
        self._name = name
        return None

    def _read_object(self, cursor: TextCursor) -> tuple[str, str]:
        cursor.skip_blanks()
        begin = cursor.position
        if not cursor.accept("{"):
            raise BrokenCall
        # The part is read again when there is more text; the scanner goes on where it was.
        state = self._scanner.feed(self._buffer[begin:])
        if state is ScanState.OPEN:
            raise NeedMoreText
        cursor.position = begin + self._scanner.position
        text = self._buffer[begin : cursor.position]
        if state is ScanState.BROKEN:
            raise BrokenCall
        value = _check_object(text)
        if not self._is_listed:
            assert self._name is not None
            return self._name, text
        name, arguments = value.get("name"), value.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, dict) or not self._knows(name):
            raise BrokenCall
        return name, json.dumps(arguments, ensure_ascii=False)


def _check_object(text: str) -> dict[str, Any]:
    """The JSON object `text`; raises BrokenCall if it is none."""
    try:
        value = parse_json(text)
    except ValueError:
        raise BrokenCall from None
    if not isinstance(value, dict):
        raise BrokenCall
    return value
