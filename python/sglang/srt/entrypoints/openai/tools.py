"""Tools of a chat request: their form in templates, enforced calls, the parser of calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from sglang.srt.constrained.constraint import GrammarError
from sglang.srt.constrained.schema_check import prepare_json_schema
from sglang.srt.entrypoints.http.errors import bad_request
from sglang.srt.entrypoints.openai.protocol import ChatBody, Tool, ToolChoice

MAX_TOOLS: Final = 128
_ENFORCED_FORMAT: Final = "llama3"
"""Parser format of an enforced call, which is a bare object with `name` and `parameters`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Use of tools by one request."""

    shown: list[dict[str, Any]]
    """The tools in the form for chat templates."""
    parser: str
    """Format of the calls, one of `TOOL_CALL_PARSERS`."""
    json_schema: str | None = None
    """Schema of an output that must be one call; None: the model may answer freely."""
    parallel: bool = True
    """Whether calls after the first one of an output are passed on."""


def tool_use(body: ChatBody, parser: str | None) -> ToolUse | None:
    """The tools that `body` uses; None: it uses no tools.

    Args:
        parser: Value of `--tool-call-parser`.

    Raises:
        ApiError: 400 that names the field.
    """
    tools, choice = body.tools or [], body.tool_choice
    _check_choice(tools, choice)
    _check_tools(tools)
    if not tools or choice == "none":
        return None
    for field in ("response_format", "json_schema", "regex", "ebnf"):
        value = getattr(body, field)
        if value is not None and getattr(value, "type", "") != "text":
            raise bad_request(
                f"{field} with tools is not supported, because a call would not fit it: leave one "
                "out, or send tool_choice: none",
                field,
            )
    shown = [_shown(tool) for tool in tools]
    if choice in (None, "auto"):
        return _decided_by_the_model(tools, shown, parser, parallel=body.parallel_tool_calls)
    named = choice.function.name if isinstance(choice, ToolChoice) else None
    branches = [
        _call_schema(index, tool)
        for index, tool in enumerate(tools)
        if named in (None, tool.function.name)
    ]
    schema = branches[0] if len(branches) == 1 else {"anyOf": branches}
    return ToolUse(
        shown=shown,
        parser=_ENFORCED_FORMAT,
        json_schema=msgspec.json.encode(schema).decode(),
        parallel=False,
    )


def _decided_by_the_model(
    tools: Sequence[Tool],
    shown: list[dict[str, Any]],
    parser: str | None,
    *,
    parallel: bool | None,
) -> ToolUse:
    if parser is None:
        raise bad_request(
            "tools: the server does not know how this model writes calls: start it with "
            "--tool-call-parser, or send tool_choice: required or none",
            "tools",
        )
    for index, tool in enumerate(tools):
        if tool.function.strict:
            raise bad_request(
                f"tools[{index}].function.strict is enforced only with tool_choice required or a "
                "named function: leave it out",
                "tools",
            )
    return ToolUse(shown=shown, parser=parser, parallel=parallel is not False)


def _check_choice(tools: Sequence[Tool], choice: str | ToolChoice | None) -> None:
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise bad_request(
            f"tool_choice={choice[:32]!r} must be none, auto, required or a named function",
            "tool_choice",
        )
    if not tools and choice not in (None, "none", "auto"):
        raise bad_request("tool_choice asks for a call, but there are no tools", "tool_choice")
    if isinstance(choice, ToolChoice):
        if choice.type != "function":
            raise bad_request("tool_choice.type must be function", "tool_choice")
        known = [tool.function.name for tool in tools]
        if choice.function.name not in known:
            raise bad_request(
                f"tool_choice.function.name={choice.function.name[:64]!r} is not among the tools",
                "tool_choice",
            )


def _check_tools(tools: Sequence[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools has {len(tools)} tools, at most {MAX_TOOLS}", "tools")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool.function.name
        if tool.type != "function":
            raise bad_request(f"tools[{index}].type={tool.type[:32]!r} must be function", "tools")
        if not name or name in seen:
            problem = f"{name[:64]!r} is there twice" if name else "must not be empty"
            raise bad_request(f"tools[{index}].function.name {problem}", "tools")
        seen.add(name)


def _shown(tool: Tool) -> dict[str, Any]:
    function = {
        name: value
        for name in ("name", "description", "parameters")
        if (value := getattr(tool.function, name)) is not None
    }
    return {"type": "function", "function": function}


def _call_schema(index: int, tool: Tool) -> dict[str, Any]:
    """JSON schema of one call of `tool`."""
    parameters = tool.function.parameters
    field = f"tools[{index}].function.parameters"
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if parameters.get("type") != "object":
        raise bad_request(f'{field}.type must be "object" for a call to be enforced', "tools")
    if _has_reference(parameters):
        raise bad_request(
            f"{field} has a $ref, which tool_choice required or a named function cannot enforce: "
            "write the schema out",
            "tools",
        )
    try:
        prepare_json_schema(msgspec.json.encode(parameters).decode())
    except (GrammarError, RecursionError) as error:
        problem = "nested too deeply: flatten it" if isinstance(error, RecursionError) else error
        problem = str(problem).removeprefix("json_schema: ")
        raise bad_request(f"{field}: {problem}", "tools") from None
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _has_reference(value: object) -> bool:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            if "$ref" in item:
                return True
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
    return False
