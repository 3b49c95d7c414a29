"""Llama 3: `{"name": ..., "parameters": {...}}`, separated by `;`, with or without a marker.

The marker `<|python_tag|>` is a special token, which detokenizing may drop. So an object at the
start of the output counts as a call too.
"""

from __future__ import annotations

from typing import ClassVar, Final

from sglang.srt.function_call.base_format_detector import BaseFormatDetector

_MARKER: Final = "<|python_tag|>"


class Llama32Detector(BaseFormatDetector):
    """A `;` separates two calls. Anything else after a call is text."""

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
