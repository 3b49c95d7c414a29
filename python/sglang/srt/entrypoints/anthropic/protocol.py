"""Bodies of Anthropic's endpoints, and the chat request that has the same prompt and limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, TypeAlias

import msgspec

from sglang.srt.entrypoints.anthropic.context_management import ContextManagement
from sglang.srt.entrypoints.http.body import (
    BOOKKEEPING,
    EQUAL_PREFIXES,
    TEXT_ALONE,
    Ignored,
    Refused,
    convert,
    refuse_fields,
)
from sglang.srt.entrypoints.http.errors import bad_request
from sglang.srt.entrypoints.openai.protocol import (
    ChatBody,
    ChatMessage,
    FunctionCall,
    FunctionName,
    FunctionSpec,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoice,
)

_BUILT_IN: Final = "it is a tool of Anthropic's: declare one with name and input_schema"
_OWN: Final = "leave it out"


class MessageParam(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn; `content` is text or blocks."""

    role: str
    content: str | list[dict[str, Any]]


class ToolParam(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that the model may call. `type` is checked first: others are not declared here."""

    name: str
    input_schema: dict[str, Any]
    type: str | None = None
    description: str | None = None
    strict: bool | None = None

    cache_control: Annotated[Any, Ignored(EQUAL_PREFIXES)] = None
    eager_input_streaming: Annotated[Any, Ignored("the parser decides")] = None
    allowed_callers: Annotated[Any, Refused(_OWN, (None, ["direct"]))] = None
    defer_loading: Annotated[Any, Refused("declare the tools that the model is to see")] = None
    input_examples: Annotated[Any, Refused("put them into the description")] = None


class ToolChoiceParam(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`auto`, `any`, `none`, or `tool` with its name."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`enabled`, `adaptive` or `disabled`: variables of the chat template."""

    type: str
    budget_tokens: Annotated[int | None, Ignored("a target; max_tokens bounds all output")] = None
    display: Annotated[Any, Refused("leave it out", (None, "summarized"))] = None


class FormatParam(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    schema: dict[str, Any]


class OutputParam(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: FormatParam | None = None
    effort: str | None = None
    """Variable for the chat template, as chat's `reasoning_effort`."""


class CountTokensBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/messages/count_tokens`. `null` means absent."""

    elsewhere: ClassVar[dict[str, str]] = {
        "stop": "send stop_sequences",
        "max_completion_tokens": "send max_tokens",
        "response_format": "send it as output_config.format",
        "extra_body": "send its fields beside the others of this body",
    }

    messages: list[MessageParam]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputParam | None = None
    context_management: ContextManagement | None = None

    cache_control: Annotated[Any, Ignored(EQUAL_PREFIXES)] = None
    speed: Annotated[Any, Ignored("there is one speed")] = None
    user_profile_id: Annotated[Any, Ignored(BOOKKEEPING)] = None
    workspace_id: Annotated[Any, Ignored(BOOKKEEPING)] = None

    mcp_servers: Annotated[Any, Refused("call them yourself, as tools")] = None


class MessagesBody(CountTokensBody, kw_only=True):
    """`POST /v1/messages`. `null` means absent."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    priority: int | None = None
    session_id: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    return_cache_report: bool | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None

    metadata: Annotated[Any, Ignored(BOOKKEEPING)] = None
    service_tier: Annotated[Any, Ignored("there is one tier")] = None

    container: Annotated[Any, Refused("there are no containers")] = None
    diagnostics: Annotated[Any, Refused("usage has the cached tokens")] = None
    inference_geo: Annotated[Any, Refused("the model runs where this server is")] = None


class TextBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    text: str
    type: str = "text"
    cache_control: Annotated[Any, Ignored(EQUAL_PREFIXES)] = None
    citations: Annotated[Any, Ignored("the text has what it is about")] = None


class ThinkingBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    thinking: str
    type: str
    signature: Annotated[str | None, Ignored("this server signs nothing")] = None


class ToolUseBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    id: str
    name: str
    input: dict[str, Any]
    type: str
    cache_control: Annotated[Any, Ignored(EQUAL_PREFIXES)] = None
    caller: Annotated[Any, Ignored(BOOKKEEPING)] = None
    toolset_name: Annotated[Any, Ignored(BOOKKEEPING)] = None


class ToolResultBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tool_use_id: str
    type: str
    content: str | list[dict[str, Any]] | None = None
    is_error: Annotated[Any, Ignored("its text says what failed")] = None
    cache_control: Annotated[Any, Ignored(EQUAL_PREFIXES)] = None
    toolset_name: Annotated[Any, Ignored(BOOKKEEPING)] = None


ContentBlock: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
_BLOCKS: Final[dict[str, dict[str, type[ContentBlock]]]] = {
    "system": {"text": TextBlock},
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
}
"""Role to the types of its blocks."""

_SAME_NAME: Final = (
    "max_tokens", "temperature", "top_p", "top_k", "stream", "priority", "session_id", "extra_key",
    "cache_salt", "return_cache_report", "bootstrap_host", "bootstrap_port", "bootstrap_room",
)  # fmt: skip
"""Fields that a chat request has too."""
NAMES: Final = (
    (r"\bresponse_format\.json_schema\b", "output_config.format"),
    (r"\bresponse_format\b", "output_config.format"),
    (r"\breasoning_effort\b", "output_config.effort"),
    (r"\bfunction\.parameters\b", "input_schema"),
    (r"\bfunction\.(name|strict)\b", r"\1"),
    (r"^stop\b", "stop_sequences"),
    (r"\btool_choice(:?) required\b", r"tool_choice\1 any"),
)
"""Chat's names to those of this API, for `client_names`."""


def chat_body(body: CountTokensBody) -> ChatBody:
    """The chat request for `body`. A field that is wrong or not supported is an `ApiError` of
    status 400 that names it."""
    refuse_fields(body)
    messages = [] if body.system is None else [_system(body.system)]
    for index, message in enumerate(body.messages):
        messages += _turns(f"messages[{index}]", message)
    if messages and messages[-1].tool_calls:
        raise bad_request(
            f"messages[{len(body.messages) - 1}] has tool_use: send a message with its tool_result "
            "after it",
            "messages",
        )
    output = body.output_config or OutputParam()
    choice = body.tool_choice
    chat = ChatBody(
        messages=messages,
        model=body.model,
        tools=_tools(body.tools),
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        response_format=None if output.format is None else _response_format(output.format),
        reasoning_effort=output.effort,
        chat_template_kwargs=None if body.thinking is None else _thinking(body.thinking),
        # An answer goes on where the last message ends.
        continue_final_message=bool(messages) and messages[-1].role == "assistant",
    )
    if isinstance(body, MessagesBody):
        for name in _SAME_NAME:
            setattr(chat, name, getattr(body, name))
        chat.stop = body.stop_sequences
    return chat


def _response_format(given: FormatParam) -> ResponseFormat:
    if given.type != "json_schema":
        raise bad_request(
            f"output_config.format.type={given.type[:32]!r} must be json_schema",
            "output_config.format",
        )
    return ResponseFormat(type="json_schema", json_schema={"schema": given.schema})


def _thinking(given: ThinkingParam) -> dict[str, Any]:
    """Variables that switch thinking on or off; templates have different names for it."""
    refuse_fields(given)
    if given.type not in ("enabled", "adaptive", "disabled"):
        raise bad_request(
            f"thinking.type={given.type[:32]!r} must be enabled, adaptive or disabled", "thinking"
        )
    return dict.fromkeys(("enable_thinking", "thinking"), given.type != "disabled")


def _tools(given: list[dict[str, Any]] | None) -> list[Tool] | None:
    if not given:
        return None
    tools = []
    for index, one in enumerate(given):
        if one.get("type") not in (None, "custom"):
            raise bad_request(
                f"tools[{index}].type={str(one['type'])[:32]!r} is not supported: {_BUILT_IN}",
                "tools",
            )
        tool = convert(one, ToolParam, f"tools[{index}]")
        refuse_fields(tool)
        function = FunctionSpec(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        )
        tools.append(Tool(function=function))
    return tools


def _tool_choice(given: ToolChoiceParam) -> str | ToolChoice:
    words = {"auto": "auto", "any": "required", "none": "none"}
    if given.type in words:
        return words[given.type]
    if given.type != "tool":
        raise bad_request(
            f"tool_choice.type={given.type[:32]!r} must be auto, any, tool or none", "tool_choice"
        )
    if given.name is None:
        raise bad_request("tool_choice.name: this field is required with type tool", "tool_choice")
    return ToolChoice(function=FunctionName(name=given.name))


def _system(given: str | list[dict[str, Any]]) -> ChatMessage:
    content = given if isinstance(given, str) else _joined("system", given)
    return ChatMessage(role="system", content=content)


def _turns(field: str, message: MessageParam) -> list[ChatMessage]:
    """The turns of one message: the results in it are turns of their own."""
    role = message.role
    if role not in _BLOCKS:
        raise bad_request(
            f"{field}.role={role[:32]!r} must be one of user, assistant, system", "messages"
        )
    if isinstance(message.content, str):
        return [ChatMessage(role=role, content=message.content)]
    if not message.content:
        raise bad_request(f"{field}.content is empty: send at least one block", "messages")
    blocks = [
        _block(f"{field}.content[{i}]", one, _BLOCKS[role]) for i, one in enumerate(message.content)
    ]
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    results = [
        ChatMessage(
            role="tool",
            content=_result(f"{field}.content[{index}]", block.content),
            tool_call_id=block.tool_use_id,
        )
        for index, block in enumerate(blocks)
        if isinstance(block, ToolResultBlock)
    ]
    if results:
        # Results answer the turn before, so they come first.
        own = [ChatMessage(role=role, content="\n".join(texts))] if texts else []
        return [*results, *own]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        ToolCall(function=FunctionCall(name=block.name, arguments=block.input), id=block.id)
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return [
        ChatMessage(
            role=role,
            content="\n".join(texts),
            reasoning_content="\n".join(thoughts) if thoughts else None,
            tool_calls=calls or None,
        )
    ]


def _block(field: str, given: dict[str, Any], kinds: dict[str, type[ContentBlock]]) -> ContentBlock:
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise bad_request(
            f"{field}.type={str(kind)[:32]!r} is not supported here: {TEXT_ALONE}; send blocks of "
            f"type {', '.join(kinds)}",
            "messages",
        )
    return convert(given, kinds[kind], field)


def _result(field: str, content: str | list[dict[str, Any]] | None) -> str:
    return content or "" if not isinstance(content, list) else _joined(f"{field}.content", content)


def _joined(field: str, blocks: Sequence[dict[str, Any]]) -> str:
    """The texts of `blocks`, which must all be text."""
    texts = []
    for index, given in enumerate(blocks):
        block = _block(f"{field}[{index}]", given, _BLOCKS["system"])
        assert isinstance(block, TextBlock)
        texts.append(block.text)
    return "\n".join(texts)
