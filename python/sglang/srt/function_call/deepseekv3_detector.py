"""DeepSeek-V3 and R1: a name, then the arguments as a fenced JSON object, each between markers."""

from __future__ import annotations

from typing import ClassVar, Final

from sglang.srt.function_call.parameter_types import parse_json_object
from sglang.srt.function_call.tagged_format_detector import TaggedFormatDetector
from sglang.srt.function_call.text_cursor import BrokenCall, TextCursor

BAR: Final = "\uff5c"
"""The full-width bar of DeepSeek's tokens."""
SEPARATOR: Final = f"<{BAR}tool▁sep{BAR}>"
_CALL_BEGIN: Final = f"<{BAR}tool▁call▁begin{BAR}>"
_CALL_END: Final = f"<{BAR}tool▁call▁end{BAR}>"
_FENCE: Final = "```"


class DeepSeekV3Detector(TaggedFormatDetector):
    """`function`, the separator, the name, a newline, and the arguments in a fence for JSON."""

    start_markers: ClassVar[tuple[str, ...]] = (f"<{BAR}tool▁calls▁begin{BAR}>",)
    section_ends: ClassVar[tuple[str, ...]] = (f"<{BAR}tool▁calls▁end{BAR}>",)

    def _begin_call(self) -> None:
        self._name: str | None = None

    def _read_part(self, cursor: TextCursor) -> tuple[str, str] | None:
        if self._name is None:
            cursor.expect(_CALL_BEGIN)
            name = self._read_name(cursor)
            if not self._knows(name):
                raise BrokenCall
            self._name = name
            return None
        arguments = self._bare(self._read_value(cursor, _CALL_END))
        try:
            parse_json_object(arguments)
        except ValueError:
            raise BrokenCall from None
        return self._name, arguments

    def _read_name(self, cursor: TextCursor) -> str:
        """Read the name of a call and the text up to the arguments."""
        cursor.expect(f"function{SEPARATOR}")
        return cursor.until("\n", forbidden="<").strip()

    def _bare(self, arguments: str) -> str:
        """The JSON text of the arguments, without a fence.

        Raises:
            BrokenCall: There is no fence around it.
        """
        fenced = arguments.strip()
        if not (fenced.startswith(f"{_FENCE}json") and fenced.endswith(_FENCE)):
            raise BrokenCall
        return fenced.removeprefix(f"{_FENCE}json").removesuffix(_FENCE).strip()
