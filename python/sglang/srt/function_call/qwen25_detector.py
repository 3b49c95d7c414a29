"""Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from typing import ClassVar, Final

from sglang.srt.function_call.base_format_detector import BaseFormatDetector

_END: Final = "</tool_call>"


class Qwen25Detector(BaseFormatDetector):
    """Each call has its own pair of markers. The end marker may be missing."""

    start_markers: ClassVar[tuple[str, ...]] = ("<tool_call>",)

    def _read_separator(self) -> bool | None:
        rest = self._buffer.lstrip()
        if rest.startswith(_END):
            self._buffer = rest[len(_END) :]
            return True
        return None if _END.startswith(rest) else False
