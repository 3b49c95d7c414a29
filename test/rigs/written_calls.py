"""Tool calls as models write them, one writer for each format, and tools for tests of parsers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": "array"},
        "text": {"type": "string"},
        "flag": {"type": ["boolean", "null"]},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "say"}},
]
ADD: dict[str, Any] = {"a": 1, "b": [2, {"c": "</parameter"}], "flag": True}
SAY: dict[str, Any] = {"text": ' two\n"lines" <b>é</b> '}
Calls = list[tuple[str | None, dict[str, Any]]]


def bars(text: str) -> str:
    """DeepSeek's tokens have full-width bars."""
    return text.replace("|", "\uff5c")


def qwen3_coder(*calls: tuple[str, dict[str, Any]]) -> str:
    out = []
    for name, arguments in calls:
        values = []
        for key, value in arguments.items():
            written = value if isinstance(value, str) else json.dumps(value)
            values.append(f"<parameter={key}>\n{written}\n</parameter>\n")
        out.append(f"<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>")
    return "\n".join(out)


def deepseekv3(*calls: tuple[str, dict[str, Any]]) -> str:
    made = [
        f"<|tool▁call▁begin|>function<|tool▁sep|>{name}\n```json\n{json.dumps(arguments)}\n```"
        "<|tool▁call▁end|>"
        for name, arguments in calls
    ]
    joined = "\n".join(made)
    return bars(f"<|tool▁calls▁begin|>{joined}<|tool▁calls▁end|>")


def deepseekv31(*calls: tuple[str, dict[str, Any]]) -> str:
    made = [
        f"<|tool▁call▁begin|>{name}<|tool▁sep|>{json.dumps(arguments)}<|tool▁call▁end|>"
        for name, arguments in calls
    ]
    return bars(f"<|tool▁calls▁begin|>{''.join(made)}<|tool▁calls▁end|>")


def dsml(section: str, *calls: tuple[str, dict[str, Any]]) -> str:
    out = []
    for name, arguments in calls:
        values = []
        for key, value in arguments.items():
            is_string = isinstance(value, str)
            written = value if is_string else json.dumps(value)
            attribute = "true" if is_string else "false"
            values.append(
                f'<|DSML|parameter name="{key}" string="{attribute}">{written}</|DSML|parameter>\n'
            )
        out.append(f'<|DSML|invoke name="{name}">\n{"".join(values)}</|DSML|invoke>\n')
    return bars(f"<|DSML|{section}>\n{''.join(out)}</|DSML|{section}>")


deepseekv32 = partial(dsml, "function_calls")


def kimi_k2(*calls: tuple[str, dict[str, Any]]) -> str:
    made = [
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        f"{json.dumps(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(made)}<|tool_calls_section_end|>"


def glm(newline: str, *calls: tuple[str, dict[str, Any]]) -> str:
    out = []
    for name, arguments in calls:
        values = []
        for key, value in arguments.items():
            written = value if isinstance(value, str) else json.dumps(value)
            values.append(
                f"<arg_key>{key}</arg_key>{newline}<arg_value>{written}</arg_value>{newline}"
            )
        out.append(f"<tool_call>{name}{newline}{''.join(values)}</tool_call>")
    return newline.join(out)


def minimax_m2(*calls: tuple[str, dict[str, Any]]) -> str:
    out = []
    for name, arguments in calls:
        values = [
            f'<parameter name="{key}">{value if isinstance(value, str) else json.dumps(value)}'
            "</parameter>\n"
            for key, value in arguments.items()
        ]
        out.append(f'<invoke name="{name}">\n{"".join(values)}</invoke>\n')
    return f"<minimax:tool_call>\n{''.join(out)}</minimax:tool_call>"


def mistral(*calls: tuple[str, dict[str, Any]]) -> str:
    listed = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"[TOOL_CALLS] {json.dumps(listed)}"


def mistral_v11(*calls: tuple[str, dict[str, Any]]) -> str:
    made = [f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls]
    return "".join(made) or "[TOOL_CALLS]"


def qwen25(*calls: tuple[str, dict[str, Any]]) -> str:
    made = [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    ]
    return "\n".join(made)


def llama3(*calls: tuple[str, dict[str, Any]]) -> str:
    made = [json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls]
    return "<|python_tag|>" + "; ".join(made)


WRITERS: dict[str, Callable[..., str]] = {
    "qwen3_coder": qwen3_coder,
    "deepseekv3": deepseekv3,
    "deepseekv31": deepseekv31,
    "deepseekv32": deepseekv32,
    "deepseekv4": partial(dsml, "tool_calls"),
    "kimi_k2": kimi_k2,
    "glm45": partial(glm, "\n"),
    "glm47": partial(glm, ""),
    "minimax-m2": minimax_m2,
    "mistral": mistral,
    "mistral v11": mistral_v11,
}
"""Writers of the formats whose calls are sent when they are complete. `mistral v11` is a form of
`mistral`."""
ALL_WRITERS = WRITERS | {"qwen25": qwen25, "llama3": llama3}


def cut(text: str, points: list[int]) -> list[str]:
    """The pieces of `text` between `points`, each taken modulo its length."""
    bounds = [0, *sorted(point % (len(text) + 1) for point in points), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]
