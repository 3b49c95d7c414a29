"""The parsers that `auto` stands for, found by the model's chat template and its architecture.

A chat template shows the model its earlier calls, and the model writes further ones in that form.
The parser that reads a call back from the template therefore reads the model's calls.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from sglang.srt.arg_groups.cli import flag_name
from sglang.srt.constrained.constraint import THINK_END
from sglang.srt.function_call.function_call_parser import TOOL_CALL_PARSERS, make_call_parser
from sglang.srt.function_call.gpt_oss_detector import GPT_OSS
from sglang.srt.managers.tokenizer.chat_template import ChatTemplate
from sglang.srt.managers.tokenizer.generate_request import InvalidRequest
from sglang.srt.parser.reasoning_parser import (
    AUTO,
    REASONING_PARSER_NAMES,
    opened_reasoning,
)
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

_NAME: Final = "lookup123"
"""Name and id of the probe's call. Kimi's template writes the id alone, and Mistral's takes ids of
nine letters and digits."""
_ARGUMENTS: Final = {"place": "Kyoto", "days": 3}
_QUESTION: Final = "What is the weather in Kyoto?"
_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Looks up the weather.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["place", "days"],
        },
    },
}
_CALL: Final = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": _NAME, "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    ],
}
_FAMILY_CALLS: Final[Mapping[str, str]] = {
    "DeepseekV4": "deepseekv4",
    "Glm5": "glm47",
    "GlmMoeDsa": "glm47",
    "Glm": "glm45",
    "GptOss": GPT_OSS,
    "Kimi": "kimi_k2",
    "MiniMax": "minimax-m2",
    "Mistral": "mistral",
    "Ministral": "mistral",
    "Qwen2": "qwen25",
    "Qwen3_5": "qwen3_coder",
}
"""Begin of an architecture's name to the parser, for families whose models all write calls in one
way."""
_FAMILY_REASONING: Final[Mapping[str, tuple[str, str]]] = {
    "DeepseekV4": ("deepseek-v4", "deepseek-v4"),
    "Deepseek": ("deepseek-v3", "deepseek-r1"),
    "Glm": ("glm45", "glm45"),
    "Kimi": ("kimi_k2", "kimi_k2"),
    "MiniMax": ("minimax", "minimax"),
    "": ("qwen3", "qwen3-thinking"),
}
"""Begin of an architecture's name to its parser, and to its parser if prompts open the reasoning. A
prompt with a marker decides by itself; they differ in what a prompt without one means."""


def with_parsers(args: ServerArgs, template: ChatTemplate, architecture: str) -> ServerArgs:
    """Resolved arguments with a parser's name where they have `auto`; the log says which.

    Raises:
        ValueError: No parser fits the chat template. One line with the flag and the remedy.
    """
    chosen: dict[str, Any] = {}
    for field, choose in _CHOICES.items():
        if getattr(args, field) == AUTO:
            chosen[field], why = choose(template, architecture)
            logger.info("%s auto: %s, %s", flag_name(field), chosen[field], why)
    return dataclasses.replace(args, **chosen).resolve() if chosen else args


def call_parser(template: ChatTemplate, architecture: str) -> tuple[str, str]:
    """The name of the parser that reads calls as the template shows them, and why; if it shows
    none, of the architecture's. Raises ValueError if there is neither."""
    if not template.takes_tools:
        raise ValueError(
            "--tool-call-parser auto: the chat template shows the model no tools, so it writes no "
            "calls: leave the flag out, or name a --chat-template that shows tools"
        )
    shown = _after_question(template, _CALL)
    begin = _after_question(template)
    for name, kind in TOOL_CALL_PARSERS.items():
        # A call without a marker is one only where the answer begins.
        text = shown if not kind.bare_at_start else _answer_after(begin, shown)
        _, calls = make_call_parser([_TOOL], name).parse_non_stream(text)
        if [(one.name, json.loads(one.parameters)) for one in calls] == [(_NAME, _ARGUMENTS)]:
            return name, "which reads the calls that the chat template shows"
    if template.has_channels:
        return GPT_OSS, "by the channels in the chat template"
    for family, name in _FAMILY_CALLS.items():
        if architecture.startswith(family) and _NAME not in shown:
            return name, f"as {architecture} writes calls; the chat template shows none"
    raise ValueError(
        "--tool-call-parser auto: no parser reads the calls that the chat template of "
        f"{architecture} shows: name one of {', '.join(TOOL_CALL_PARSERS)}, or leave the flag out"
    )


def reasoning_parser(template: ChatTemplate, architecture: str) -> tuple[str, str]:
    """The name of the parser of the architecture, for a template with markers of reasoning, and
    why. Raises ValueError if it has none."""
    if template.has_channels or architecture.startswith("GptOss"):
        return GPT_OSS, f"for {architecture}, whose outputs have channels"
    opened = opened_reasoning(_after_question(template))
    if opened is None and THINK_END not in template.source:
        raise ValueError(
            f"--reasoning-parser auto: the chat template of {architecture} has no "
            f"{THINK_END}: leave the flag out, or name one of {', '.join(REASONING_PARSER_NAMES)}"
        )
    family = next(one for one in _FAMILY_REASONING if architecture.startswith(one))
    why = "whose chat template opens the reasoning" if opened else "by its chat template"
    return _FAMILY_REASONING[family][opened is True], f"for {architecture}, {why}"


_CHOICES: Final[Mapping[str, Callable[[ChatTemplate, str], tuple[str, str]]]] = {
    "tool_call_parser": call_parser,
    "reasoning_parser": reasoning_parser,
}


def _after_question(template: ChatTemplate, *turns: dict[str, Any]) -> str:
    """Text that the template writes after a question: the `turns`, or the begin of an answer if
    there are none. Empty if the template refuses the turns."""
    try:
        text = template.render(
            [{"role": "user", "content": _QUESTION}, *turns],
            add_generation_prompt=not turns,
            tools=[_TOOL],
        )
    except InvalidRequest:
        return ""
    return text.rpartition(_QUESTION)[2]


def _answer_after(begin: str, text: str) -> str:
    """The answer in `text`, whose first part is `begin`; empty if it is not."""
    return text[len(begin) :] if text.startswith(begin) else ""
