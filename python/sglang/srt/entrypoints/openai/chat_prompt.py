"""The prompt of a chat request, made from its messages and tools by the chat template, and its
enforced calls. A wrong field is an `ApiError` of status 400 that names it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final

import msgspec
import xxhash

from sglang.srt.constrained.constraint import MAX_CONSTRAINT_BYTES, GrammarError
from sglang.srt.constrained.schema_check import loosen_json_schema, prepare_json_schema
from sglang.srt.entrypoints.http.body import TEXT_ALONE, refuse_fields
from sglang.srt.entrypoints.http.errors import ApiError, bad_request
from sglang.srt.entrypoints.openai.message_turns import check_effort, message_turns
from sglang.srt.entrypoints.openai.protocol import ChatBody, ChatMessage, Tool, ToolCall, ToolChoice
from sglang.srt.function_call.function_call_parser import TOOL_CALL_PARSERS
from sglang.srt.function_call.strict_calls import strict_calls
from sglang.srt.managers.tokenizer.chat_template import ChatTemplate

logger = logging.getLogger(__name__)

MAX_TOOLS: Final = 128
_ANY_OBJECT: Final = {"type": "object"}
_ENFORCED_FORMAT: Final = "llama3"
"""Parser format of an enforced call, which is a bare object with `name` and `parameters`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    shown: list[dict[str, Any]]
    """The tools in the form for chat templates."""
    parser: str
    """Format of the calls, one of `TOOL_CALL_PARSERS`."""
    json_schema: str | None = None
    """Schema of an output that must be one call; None: the model may answer freely."""
    structural_tag: str | None = None
    """Constraint on the calls of a free answer; None: the tools are not strict, or their format
    cannot be constrained."""
    parallel: bool = True
    """True if calls after the first one of an output are passed on."""


def tool_use(body: ChatBody, parser: str | None, template: ChatTemplate) -> ToolUse | None:
    """The tools that `body` uses; None: it uses no tools. `parser` is the value of
    `--tool-call-parser`.

    A model whose template shows no tools may still be made to call one, by a grammar. It never
    calls one by itself, so tools that it may call are ignored.
    """
    tools, choice = body.tools or [], body.tool_choice
    _check_choice(tools, choice)
    _check_tools(tools)
    if not tools or choice == "none":
        return None
    if choice in (None, "auto") and not template.takes_tools:
        template.warn_of_ignored_tools()
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
        if parser is None:
            raise bad_request(
                "tools: the server does not know how this model writes calls: start it with "
                "--tool-call-parser auto, or send tool_choice: required or none",
                "tools",
            )
        return ToolUse(
            shown=shown,
            parser=parser,
            structural_tag=_strict_calls(tools, parser),
            parallel=body.parallel_tool_calls is not False,
        )
    named = choice.function.name if isinstance(choice, ToolChoice) else None
    definitions: dict[str, Any] = {}
    branches = [
        _call_schema(index, tool, definitions)
        for index, tool in enumerate(tools)
        if named in (None, tool.function.name)
    ]
    schema: dict[str, Any] = branches[0] if len(branches) == 1 else {"anyOf": branches}
    if definitions:
        schema["$defs"] = definitions
    return ToolUse(
        shown=shown,
        parser=_ENFORCED_FORMAT,
        json_schema=msgspec.json.encode(schema).decode(),
        parallel=False,
    )


def _check_choice(tools: Sequence[Tool], choice: str | ToolChoice | None) -> None:
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise bad_request(
            f"tool_choice={choice[:32]!r} must be none, auto, required or a named function",
            "tool_choice",
        )
    if not tools and choice not in (None, "none", "auto"):
        raise bad_request(
            "tool_choice asks for a call, but there are no tools: send tools, or leave it out",
            "tool_choice",
        )
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


def _strict_calls(tools: Sequence[Tool], parser: str) -> str | None:
    """The structural tag that holds calls of strict tools to their schemas; None: there is none.

    A tool is never refused for what is not enforced: clients send `strict` by default.
    """
    if not any(tool.function.strict for tool in tools):
        return None
    frame = TOOL_CALL_PARSERS[parser].call_frame
    if frame is None:
        _warn_of_format(parser)
        return None
    schemas = {
        tool.function.name: _parameters(index, tool, refuses=False)
        if tool.function.strict
        else _ANY_OBJECT
        for index, tool in enumerate(tools)
    }
    tag = strict_calls(frame, schemas)
    if len(tag) > MAX_CONSTRAINT_BYTES:
        _warn_of_size()
        return None
    return tag


def _call_schema(index: int, tool: Tool, definitions: dict[str, Any]) -> dict[str, Any]:
    """JSON schema of one call of `tool`. Parameters with references, which are from the root of
    their schema, are added to `definitions`, the `$defs` of the whole schema."""
    parameters = _parameters(index, tool, refuses=bool(tool.function.strict))
    name = f"tool{index}"
    rebased = _rebased(parameters, f"#/$defs/{name}")
    if rebased != parameters:
        definitions[name] = rebased
        parameters = {"$ref": f"#/$defs/{name}"}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _rebased(schema: Any, root: str) -> Any:
    """The schema with references that are right if its own root is at `root`."""
    if isinstance(schema, list):
        return [_rebased(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value.removeprefix("#")
        if key == "$ref" and isinstance(value, str)
        else value
        if key in ("const", "enum")
        else _rebased(value, root)
        for key, value in schema.items()
    }


def _parameters(index: int, tool: Tool, *, refuses: bool) -> Any:
    """The schema of a tool's arguments as grammars hold it. Keywords that they cannot hold are
    refused if `refuses`, else dropped with a warning."""
    parameters = tool.function.parameters
    field = f"tools[{index}].function.parameters"
    if parameters is None:
        parameters = {**_ANY_OBJECT, "properties": {}}
    if parameters.get("type") != "object":
        raise bad_request(f'{field}.type must be "object" for a call to be enforced', "tools")
    try:
        given = msgspec.json.encode(parameters)
        if refuses:
            held = prepare_json_schema(given.decode())
        else:
            held, dropped = loosen_json_schema(given.decode())
            if dropped:
                keywords = {place.rpartition("/")[2] for place in dropped}
                _warn_of_dropped(xxhash.xxh3_64_hexdigest(given), ", ".join(sorted(keywords)))
    except (GrammarError, RecursionError) as error:
        problem = "nested too deeply: flatten it" if isinstance(error, RecursionError) else error
        problem = str(problem).removeprefix("json_schema: ")
        raise bad_request(f"{field}: {problem}", "tools") from None
    return msgspec.json.decode(held)


@lru_cache(maxsize=1024)
def _warn_of_dropped(digest: str, keywords: str) -> None:
    """Log that calls of a tool may break its schema, once for each of the latest schemas, of which
    `digest` is one's. Names of properties are a prompt's text, so it names the keywords alone."""
    logger.warning(
        "The parameters of a tool (schema %s) have keywords that are not enforced: %s: calls may "
        "break them; with tool_choice: required, strict: true refuses such a schema and says where",
        digest,
        keywords,
    )


@cache
def _warn_of_format(parser: str) -> None:
    logger.warning(
        "strict: true of tools is not enforced with tool_choice auto, because a grammar cannot "
        "hold calls in the format of --tool-call-parser %s. This is logged once.",
        parser,
    )


@cache
def _warn_of_size() -> None:
    logger.warning(
        "strict: true of tools is not enforced with tool_choice auto where all schemas together "
        "are larger than %d bytes: send fewer or smaller tools. This is logged once.",
        MAX_CONSTRAINT_BYTES,
    )


_RENDER_ARGUMENTS: Final = frozenset(
    {
        "conversation", "messages", "chat_template", "tokenize", "tools", "documents", "padding",
        "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
        "return_assistant_tokens_mask", "add_generation_prompt", "continue_final_message",
    }
)  # fmt: skip
"""Arguments of the renderer, which a client must not set as template variables."""
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")


def chat_prompt(
    body: ChatBody, template: ChatTemplate, tools: ToolUse | None, context_len: int
) -> str:
    """The text that the model continues. `context_len`, the tokens of the longest context, limits
    the number of messages and parts.

    Raises:
        InvalidRequest: The template refuses the messages.
    """
    if not body.messages:
        raise bad_request("messages is empty: send at least one message", "messages")
    _check_count(body.messages, context_len)
    continues = bool(body.continue_final_message)
    if continues and body.messages[-1].role != "assistant":
        raise bad_request(
            "continue_final_message needs a last message of role assistant",
            "continue_final_message",
        )
    adds = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and adds:
        raise bad_request(
            "add_generation_prompt contradicts continue_final_message: give one of them",
            "add_generation_prompt",
        )
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    if body.reasoning_effort == "none":
        # Templates have different names for it, and ignore names that they do not know.
        for name in ("enable_thinking", "thinking"):
            variables.setdefault(name, False)
    for name in variables.keys() & _RENDER_ARGUMENTS:
        raise bad_request(
            f"chat_template_kwargs.{name}: not a template's variable; leave it out",
            "chat_template_kwargs",
        )
    turns = [_turn(f"messages[{i}]", message) for i, message in enumerate(body.messages)]
    if template.has_channels:
        turns = message_turns(turns)
        if "reasoning_effort" in variables:
            check_effort(variables["reasoning_effort"])
    return template.render(
        turns,
        add_generation_prompt=adds,
        continue_final_message=continues,
        tools=None if tools is None else tools.shown,
        variables=variables,
    )


def _check_count(messages: Sequence[ChatMessage], context_len: int) -> None:
    """Refuse a conversation that surely does not fit, before it is rendered: each message and each
    part takes at least one token."""
    parts = sum(len(one.content) for one in messages if isinstance(one.content, list))
    for count, what in ((len(messages), "messages"), (parts, "parts of content")):
        if count > context_len:
            raise ApiError(
                400,
                f"messages has {count} {what}, more than fit into a context of {context_len} "
                "tokens: shorten the conversation",
                param="messages",
                code="context_length_exceeded",
            )


def _turn(field: str, message: ChatMessage) -> dict[str, Any]:
    """The message in the form that templates read."""
    if message.role not in _ROLES:
        raise bad_request(
            f"{field}.role={message.role[:32]!r} must be one of {', '.join(_ROLES)}", "messages"
        )
    refuse_fields(message)
    # `developer` is OpenAI's newer name for `system`; templates know the older one.
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role}
    if message.tool_calls:
        turn["content"] = (
            "" if message.content is None else text_of(f"{field}.content", message.content)
        )
        turn["tool_calls"] = [
            _call(f"{field}.tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls)
        ]
    else:
        turn["content"] = text_of(f"{field}.content", message.content)
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        turn["name"] = message.name
    reasoning = (
        message.reasoning if message.reasoning_content is None else message.reasoning_content
    )
    if reasoning is not None:
        turn["reasoning_content"] = reasoning
    return turn


def _call(field: str, call: ToolCall) -> dict[str, Any]:
    """An earlier call in the form that templates read, with the arguments as an object."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            raise bad_request(
                f"{field}.function.arguments: expected a JSON object", "messages"
            ) from None
    function = {"name": call.function.name, "arguments": arguments or {}}
    return {"id": call.id, "type": "function", "function": function}


def text_of(
    field: str,
    content: str | Sequence[dict[str, Any]] | None,
    kinds: Collection[str] = ("text",),
    param: str = "messages",
    remedy: Callable[[object], str] = lambda _: f"{TEXT_ALONE}, send parts of type text",
) -> str:
    """The text of a message's content: the string itself, or the texts of its parts, in lines.

    Args:
        field: The content's place in the body, for errors.
        kinds: Types of parts that have a text.
        param: Field of the body that an error names.
        remedy: Tells the client what to send instead of a part of an unsupported type.

    Raises:
        ApiError: The content is missing, or a part has another type or no text.
    """
    if content is None:
        raise bad_request(f"{field}: expected text, got null", param)
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type")
        if kind not in kinds:
            raise bad_request(
                f"{field}[{index}].type={str(kind)[:32]!r} is not supported: {remedy(kind)}", param
            )
        if not isinstance(part.get("text"), str):
            raise bad_request(f"{field}[{index}].text: expected text", param)
        texts.append(part["text"])
    return "\n".join(texts)
