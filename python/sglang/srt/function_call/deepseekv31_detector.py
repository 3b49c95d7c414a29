"""DeepSeek-V3.1: as V3, but the name comes at once, and the arguments have no fence."""

from __future__ import annotations

from sglang.srt.function_call.deepseekv3_detector import SEPARATOR, DeepSeekV3Detector
from sglang.srt.function_call.text_cursor import TextCursor


class DeepSeekV31Detector(DeepSeekV3Detector):
    """The name, the separator, and the arguments."""

    def _read_name(self, cursor: TextCursor) -> str:
        return cursor.until(SEPARATOR, forbidden="\n").strip()

    def _bare(self, arguments: str) -> str:
        return arguments.strip()
