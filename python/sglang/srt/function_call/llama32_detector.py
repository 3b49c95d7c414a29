"""Llama 3: `{"name": ..., "parameters": {...}}`, several with `;` between, after a marker or bare.

The marker `<|python_tag|>` is a special token, which detokenizing may drop; an output that begins
with an object is therefore looked at as well.
"""

from __future__ import annotations

from typing import ClassVar

from sglang.srt.function_call.base_format_detector import BaseFormatDetector


class Llama32Detector(BaseFormatDetector):
    """Calls follow each other with `;`; what follows without it is text."""

    start_marker: ClassVar[str] = "<|python_tag|>"
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
        if following.startswith(self.start_marker):
            self._start_call(len(self._buffer) - len(following) + len(self.start_marker))
            return True
        return None if self.start_marker.startswith(following) else False
