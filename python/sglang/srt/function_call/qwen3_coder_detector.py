"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

Qwen3-Next's coder and Qwen3.5 write the same. Values are plain text; the tool's schema gives their
types.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from sglang.srt.function_call.parameter_types import typed_value
from sglang.srt.function_call.tagged_format_detector import Parameter, ParameterFormatDetector
from sglang.srt.function_call.text_cursor import TextCursor

_NOT_IN_NAMES = "<\n"


class Qwen3CoderDetector(ParameterFormatDetector):
    """A newline at each end of a value belongs to the tags."""

    start_markers: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    section_ends: ClassVar[tuple[str, ...]] = ("</tool_call>",)

    def _read_head(self, cursor: TextCursor) -> str:
        cursor.expect("<function=")
        return cursor.until(">", forbidden=_NOT_IN_NAMES).strip()

    def _read_parameter(self, tool: str, cursor: TextCursor) -> Parameter | None:
        if cursor.expect("<parameter=", "</function>") == "</function>":
            return None
        name = cursor.until(">", forbidden=_NOT_IN_NAMES).strip()
        schema = self._schemas.get(tool, {})
        return Parameter(name, "</parameter>", partial(_convert, schema=schema, name=name))


def _convert(text: str, *, schema: Mapping[str, Any], name: str) -> object:
    return typed_value(text.removeprefix("\n").removesuffix("\n"), schema, name)
