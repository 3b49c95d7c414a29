"""The parser of a request's tool calls, chosen by the name of the model's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from sglang.srt.environ import envs
from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.core_types import StreamingParseResult, ToolCallItem
from sglang.srt.function_call.llama32_detector import Llama32Detector
from sglang.srt.function_call.qwen25_detector import Qwen25Detector

TOOL_CALL_PARSERS: Final[Mapping[str, type[BaseFormatDetector]]] = MappingProxyType(
    {"qwen25": Qwen25Detector, "qwen": Qwen25Detector, "llama3": Llama32Detector}
)


class FunctionCallParser:
    """Splits one output into text and calls. `BaseFormatDetector` defines what a call is.

    Args:
        tools: The request's tools in OpenAI's form: `{"type": "function", "function": {"name"}}`.
        tool_call_parser: One of `TOOL_CALL_PARSERS`.

    Raises:
        ValueError: The parser's name is unknown, or a tool has no name.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], tool_call_parser: str) -> None:
        detector = TOOL_CALL_PARSERS.get(tool_call_parser)
        if detector is None:
            raise ValueError(
                f"--tool-call-parser {tool_call_parser} is not known: use one of "
                f"{', '.join(TOOL_CALL_PARSERS)}"
            )
        names = [_tool_name(i, tool) for i, tool in enumerate(tools)]
        self._detector = detector(None if envs.SGLANG_FORWARD_UNKNOWN_TOOLS.get() else names)

    def parse_non_stream(self, text: str) -> tuple[str, list[ToolCallItem]]:
        """The normal text and the calls of a whole output. Never raises."""
        return self._detector.parse_non_stream(text)

    def parse_stream_increment(self, new_text: str) -> StreamingParseResult:
        """The text and calls that `new_text` adds to a streamed output. Never raises."""
        return self._detector.parse_stream_increment(new_text)

    def finish(self) -> StreamingParseResult:
        """End the stream. Returns the text that was held back; without this call it is lost."""
        return self._detector.finish()


def _tool_name(index: int, tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f"tools[{index}].function.name is missing: give each tool a name")
    return name
