"""The parser of a request's tool calls, chosen by the name of the model's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sglang.srt.environ import envs
from sglang.srt.function_call.format_detector import FormatDetector
from sglang.srt.function_call.gpt_oss_detector import GPT_OSS, GptOssDetector
from sglang.srt.function_call.json_detectors import Llama32Detector, Qwen25Detector
from sglang.srt.function_call.kimi_glm_mistral_detectors import (
    Glm4MoeDetector,
    KimiK2Detector,
    MistralDetector,
)
from sglang.srt.function_call.tagged_detectors import (
    DeepSeekV3Detector,
    DeepSeekV4Detector,
    DeepSeekV31Detector,
    DeepSeekV32Detector,
    MiniMaxM2Detector,
    Qwen3CoderDetector,
)

TOOL_CALL_PARSERS: Final[Mapping[str, type[FormatDetector]]] = {
    "qwen25": Qwen25Detector,
    "qwen": Qwen25Detector,
    "hermes": Qwen25Detector,
    "qwen3_coder": Qwen3CoderDetector,
    "llama3": Llama32Detector,
    "deepseekv3": DeepSeekV3Detector,
    "deepseekv31": DeepSeekV31Detector,
    "deepseekv32": DeepSeekV32Detector,
    "deepseekv4": DeepSeekV4Detector,
    "kimi_k2": KimiK2Detector,
    "glm45": Glm4MoeDetector,
    "glm47": Glm4MoeDetector,
    "glm": Glm4MoeDetector,
    "minimax-m2": MiniMaxM2Detector,
    "mistral": MistralDetector,
    GPT_OSS: GptOssDetector,
}


def make_call_parser(tools: Sequence[Mapping[str, Any]], name: str) -> FormatDetector:
    """The parser of one output.

    Args:
        tools: The request's tools in OpenAI's form: `{"type": "function", "function": {"name",
            "parameters"}}`. Formats without types of their own take them from `parameters`.
        name: One of `TOOL_CALL_PARSERS`.
    """
    return TOOL_CALL_PARSERS[name](*_names_and_schemas(tools))


def make_message_parser(
    tools: Sequence[Mapping[str, Any]], begun: str, *, separates_reasoning: bool
) -> GptOssDetector:
    """The parser of one output of gpt-oss, with or without tools.

    Args:
        begun: The part of its first message that the prompt has, see `begun_message`.
        separates_reasoning: False: reasoning is text.
    """
    names, schemas = _names_and_schemas(tools) if tools else ((), {})
    made = GptOssDetector(names, schemas, separates_reasoning=separates_reasoning)
    made.begin_with(begun)
    return made


def _names_and_schemas(
    tools: Sequence[Mapping[str, Any]],
) -> tuple[Sequence[str] | None, dict[str, Any]]:
    functions = [tool["function"] for tool in tools]
    schemas = {one["name"]: one["parameters"] for one in functions if "parameters" in one}
    known = None if envs.SGLANG_FORWARD_UNKNOWN_TOOLS.get() else [one["name"] for one in functions]
    return known, schemas
