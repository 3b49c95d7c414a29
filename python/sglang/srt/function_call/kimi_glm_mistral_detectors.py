"""Tool calls as Kimi-K2, GLM-4.5 and later, and Mistral write them.

Sources: the chat templates of these models, which show earlier calls in the same form.
"""

from __future__ import annotations

import json
import re
from functools import partial
from typing import ClassVar, Final

from sglang.srt.function_call.json_text import JsonObjectScanner, ScanState
from sglang.srt.function_call.tagged_detectors import typed_value
from sglang.srt.function_call.tagged_format import (
    BrokenCall,
    NeedMoreText,
    Parameter,
    ParameterFormatDetector,
    TaggedFormatDetector,
    Tags,
    TextCursor,
    as_object,
)

_KIMI_ID: Final = re.compile(r"(?:functions\.)?(?P<name>[^\s:]+)(?::\d+)?")
_KIMI_CALL: Final = "<|tool_call_begin|>"
_KIMI_CALL_END: Final = "<|tool_call_end|>"
_KIMI_SECTION_END: Final = "<|tool_calls_section_end|>"
_KIMI_OBJECT_ENDS: Final = Tags(_KIMI_CALL_END, _KIMI_CALL, _KIMI_SECTION_END)


class KimiK2Detector(TaggedFormatDetector):
    """Kimi-K2: an id such as `functions.NAME:0`, which later messages repeat, then JSON.

    The markers are special tokens.
    """

    start_markers: ClassVar[tuple[str, ...]] = ("<|tool_calls_section_begin|>",)
    section_ends: ClassVar[tuple[str, ...]] = (_KIMI_SECTION_END,)
    after_calls: ClassVar[tuple[str, ...]] = (_KIMI_SECTION_END, _KIMI_CALL)
    has_special_markers: ClassVar[bool] = True

    def _begin_call(self) -> None:
        self._name: str | None = None

    def _read_part(self, cursor: TextCursor) -> tuple[str, str] | None:
        if self._name is None:
            cursor.expect(_KIMI_CALL)
            written = cursor.until("<|tool_call_argument_begin|>", forbidden="\n").strip()
            found = _KIMI_ID.fullmatch(written)
            if found is None:
                raise BrokenCall
            self._check_known(found["name"])
            self._name, self._call_id = found["name"], written
            return None
        return self._name, self._read_object(cursor, _KIMI_CALL_END, _KIMI_OBJECT_ENDS)


_CALL: Final = "<tool_call>"
_END_OF_CALL: Final = "</tool_call>"
_GLM_KEY: Final = "<arg_key>"
_GLM_VALUE_ENDS: Final = Tags("</arg_value>", _GLM_KEY, _END_OF_CALL)


class Glm4MoeDetector(ParameterFormatDetector):
    """GLM-4.5 and later: the name, then `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`.

    The tool's schema gives the types of values. GLM-4.5 writes newlines between the tags, GLM-4.7
    none.
    """

    start_markers: ClassVar[tuple[str, ...]] = (_CALL,)
    # Calls follow one another without a section around them.
    section_ends: ClassVar[tuple[str, ...]] = (_END_OF_CALL,)
    after_calls: ClassVar[tuple[str, ...]] = (_CALL,)

    def _read_head(self, cursor: TextCursor) -> str:
        if self._after_call:
            cursor.expect(_CALL)
        name = cursor.word(ends="<")
        # Prose may name the marker and a tool.
        cursor.at(cursor.position).expect(_GLM_KEY, _END_OF_CALL)
        return name

    def _read_parameter(self, tool: str, cursor: TextCursor) -> Parameter | None:
        if cursor.expect(_GLM_KEY, _END_OF_CALL) == _END_OF_CALL:
            return None
        name = cursor.until("</arg_key>", forbidden="\n").strip()
        cursor.skip_blanks()
        cursor.expect("<arg_value>")
        convert = partial(typed_value, parameters=self._schemas.get(tool, {}), name=name)
        return Parameter(name, "</arg_value>", _GLM_VALUE_ENDS, convert)


_MARKER: Final = "[TOOL_CALLS]"


class MistralDetector(TaggedFormatDetector):
    """Mistral: `[TOOL_CALLS]`, a special token, then a JSON list of objects with `name` and
    `arguments`; later models write `[TOOL_CALLS]NAME[ARGS]{...}` for each call."""

    start_markers: ClassVar[tuple[str, ...]] = (_MARKER,)
    section_ends: ClassVar[tuple[str, ...]] = ("]",)
    after_calls: ClassVar[tuple[str, ...]] = ("]", _MARKER)
    has_special_markers: ClassVar[bool] = True

    def _begin_call(self) -> None:
        self._name: str | None = None
        self._is_listed = False
        self._scanner = JsonObjectScanner()

    def _read_part(self, cursor: TextCursor) -> tuple[str, str] | None:
        if self._in_call:
            return self._read_call(cursor)
        if cursor.accept("," if self._after_call else "["):
            self._is_listed = True
            return None
        if self._after_call:
            cursor.expect(_MARKER)
        name = cursor.word(ends="[{")
        cursor.expect("[ARGS]")
        self._check_known(name)
        self._name = name
        return None

    def _read_call(self, cursor: TextCursor) -> tuple[str, str]:
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
        if not self._is_listed:
            assert self._name is not None
            return self._name, as_object(text)
        value = json.loads(as_object(text))
        name, arguments = value.get("name"), value.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise BrokenCall
        self._check_known(name)
        return name, json.dumps(arguments, ensure_ascii=False)
