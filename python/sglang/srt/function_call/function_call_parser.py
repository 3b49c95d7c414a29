"""The parser of a request's tool calls, chosen by the name of the model's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from sglang.srt.environ import envs
from sglang.srt.function_call.deepseekv3_detector import DeepSeekV3Detector
from sglang.srt.function_call.deepseekv31_detector import DeepSeekV31Detector
from sglang.srt.function_call.deepseekv32_detector import DeepSeekV32Detector
from sglang.srt.function_call.format_detector import FormatDetector
from sglang.srt.function_call.llama32_detector import Llama32Detector
from sglang.srt.function_call.qwen3_coder_detector import Qwen3CoderDetector
from sglang.srt.function_call.qwen25_detector import Qwen25Detector

TOOL_CALL_PARSERS: Final[Mapping[str, type[FormatDetector]]] = MappingProxyType(
    {
        "qwen25": Qwen25Detector,
        "qwen": Qwen25Detector,
        "qwen3_coder": Qwen3CoderDetector,
        "llama3": Llama32Detector,
        "deepseekv3": DeepSeekV3Detector,
        "deepseekv31": DeepSeekV31Detector,
        "deepseekv32": DeepSeekV32Detector,
    }
)


def make_call_parser(tools: Sequence[Mapping[str, Any]], name: str) -> FormatDetector:
    """The parser of one output.

    Args:
        tools: The request's tools in OpenAI's form: `{"type": "function", "function": {"name",
            "parameters"}}`. Formats without types of their own take them from `parameters`.
        name: One of `TOOL_CALL_PARSERS`.

    Raises:
        ValueError: The parser's name is unknown, or a tool has no name.
    """
    detector = TOOL_CALL_PARSERS.get(name)
    if detector is None:
        raise ValueError(
            f"--tool-call-parser {name} is not known: use one of {', '.join(TOOL_CALL_PARSERS)}"
        )
    names = [_tool_name(i, tool) for i, tool in enumerate(tools)]
    schemas = {
        name: schema
        for name, tool in zip(names, tools, strict=True)
        if isinstance(schema := tool["function"].get("parameters"), Mapping)
    }
    known = None if envs.SGLANG_FORWARD_UNKNOWN_TOOLS.get() else names
    return detector(known, schemas)


def _tool_name(index: int, tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f"tools[{index}].function.name is missing: give each tool a name")
    return name
