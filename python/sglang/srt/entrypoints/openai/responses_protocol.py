"""`POST /v1/responses`: its body, and the chat request that has the same prompt and limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, TypeAlias

import msgspec

from sglang.srt.entrypoints.http.body import (
    BOOKKEEPING,
    EQUAL_PREFIXES,
    NOTHING,
    TEXT_ALONE,
    Ignored,
    Refused,
    convert,
    refuse_fields,
)
from sglang.srt.entrypoints.http.errors import bad_request
from sglang.srt.entrypoints.openai.chat_prompt import text_of
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

_STATELESS: Final = "this server stores no responses: send the whole conversation as input items"
_BUILT_IN: Final = "built-in tools run at OpenAI: declare a function, and run it yourself"
_DEEPER: Final = 32
"""Levels at which an answer repeats the body's values, at most."""
MAX_METADATA: Final = 16
"""Most pairs of `metadata`, which the answer and events repeat; limits of OpenAI's."""
MAX_METADATA_KEY: Final = 64
MAX_METADATA_VALUE: Final = 512
_INCLUDABLE: Final = (
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""Values of `include` that add nothing: reasoning is plain text, and there are neither images nor
built-in tools."""


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`text`, `json_object`, or `json_schema` with its schema."""

    type: str
    name: str | None = None
    schema: Any = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: Annotated[Any, Ignored("a wish that chat templates do not know")] = None


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    effort: str | None = None
    """Variable for the chat template, as chat's `reasoning_effort`."""
    summary: Annotated[str | None, Ignored("the answer has the reasoning itself")] = None
    generate_summary: Annotated[str | None, Ignored("the answer has the reasoning itself")] = None
    context: Annotated[str | None, Ignored("the chat template decides")] = None
    mode: Annotated[Any, Refused("leave it out", (None, "standard"))] = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """A function that the model may call. `type` is checked first: others are built-in tools."""

    name: str
    type: str = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/responses`. `null` means absent."""

    elsewhere: ClassVar[dict[str, str]] = {
        "messages": "send them as input",
        "max_tokens": "send max_output_tokens",
        "max_completion_tokens": "send max_output_tokens",
        "response_format": "send it as text.format",
        "reasoning_effort": "send it as reasoning.effort",
        "rid": "send request_id",
        "extra_body": "send its fields beside the others of this body",
    }

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: dict[str, str] | None = None
    """Repeated in the answer."""
    truncation: str | None = None
    """`auto` or `disabled`: an input that fits is the same under both, and one that does not is
    refused."""
    include: list[str] | None = None
    # SGLang's; routers add some of them to every request.
    request_id: str | None = None
    """Id of the request and of its answer; absent: the server draws them."""
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    priority: int | None = None
    session_id: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    return_cache_report: bool | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None

    stream_options: Annotated[dict[str, Any] | None, Ignored("they are about padding")] = None
    user: Annotated[str | None, Ignored(BOOKKEEPING)] = None
    safety_identifier: Annotated[str | None, Ignored(BOOKKEEPING)] = None
    service_tier: Annotated[str | None, Ignored("there is one tier")] = None
    prompt_cache_key: Annotated[str | None, Ignored(EQUAL_PREFIXES)] = None
    prompt_cache_retention: Annotated[str | None, Ignored("the cache evicts what is old")] = None
    prompt_cache_options: Annotated[Any, Ignored("the cache evicts what is old")] = None
    max_tool_calls: Annotated[int | None, Ignored("it counts built-in tools alone")] = None
    image: Annotated[Any, Ignored("shapes images, which are refused")] = None
    store: Annotated[bool | None, Ignored("nothing is stored, as the answer says")] = None

    previous_response_id: Annotated[Any, Refused(_STATELESS)] = None
    conversation: Annotated[Any, Refused(_STATELESS)] = None
    background: Annotated[Any, Refused("keep the connection open")] = None
    background_options: Annotated[Any, Refused("keep the connection open")] = None
    prompt: Annotated[
        Any, Refused("this server stores no prompts: send instructions and input")
    ] = None
    context_management: Annotated[Any, Refused("shorten the input yourself")] = None
    top_logprobs: Annotated[Any, Refused("ask /v1/chat/completions", (*NOTHING, 0))] = None
    moderation: Annotated[Any, Refused("moderate the input and the answer yourself", (None,))] = (
        None
    )
    access_programs: Annotated[Any, Refused("leave it out")] = None


class MessageItem(msgspec.Struct, kw_only=True):
    """A message of the input, or one of an earlier answer, which has further fields."""

    role: str
    content: str | list[dict[str, Any]]


class CallItem(msgspec.Struct, kw_only=True):
    """A call that the model made."""

    call_id: str
    name: str
    arguments: str


class CallOutputItem(msgspec.Struct, kw_only=True):
    """The result of a call."""

    call_id: str
    output: str | list[dict[str, Any]]


class ReasoningItem(msgspec.Struct, kw_only=True):
    """Reasoning of an earlier answer; `content` is the reasoning itself."""

    content: list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None
    encrypted_content: Annotated[
        str | None, Refused("another server encrypted it: send the item's content")
    ] = None


Item: TypeAlias = MessageItem | CallItem | CallOutputItem | ReasoningItem
_ITEMS: Final[dict[str, type[Item]]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}

_SAME_NAME: Final = (
    "temperature", "top_p", "stream", "parallel_tool_calls", "top_k", "min_p", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "stop", "priority", "session_id", "extra_key",
    "cache_salt", "return_cache_report", "bootstrap_host", "bootstrap_port", "bootstrap_room",
)  # fmt: skip
"""Fields that a chat request has too."""
NAMES: Final = (
    (r"\bmax_completion_tokens\b", "max_output_tokens"),
    (r"\bresponse_format\.json_schema\b", "text.format"),
    (r"\bresponse_format\b", "text.format"),
    (r"\breasoning_effort\b", "reasoning.effort"),
    (r"^rid\b", "request_id"),
    (r"\bfunction\.(name|parameters|strict)\b", r"\1"),
    (r"\bmessages\b", "input"),
)
"""Chat's names to those of this API, for `client_names`."""


def chat_body(body: ResponsesBody) -> ChatBody:
    """The chat request for `body`. A field that is wrong or not supported is an `ApiError` of
    status 400 that names it."""
    refuse_fields(body)
    text = body.text or TextConfig()
    refuse_fields(text)
    reasoning = body.reasoning or ReasoningConfig()
    refuse_fields(reasoning)
    if body.truncation not in (None, "auto", "disabled"):
        raise bad_request(
            f"truncation={body.truncation[:32]!r} must be auto or disabled", "truncation"
        )
    for value in body.include or ():
        if value not in _INCLUDABLE:
            raise bad_request(
                f"include: {value[:64]!r} is not supported: leave it out; logprobs are in "
                "/v1/chat/completions",
                "include",
            )
    _check_metadata(body.metadata or {})
    _check_depth([body.tools, body.tool_choice, body.text])
    return ChatBody(
        messages=_messages(body),
        model=body.model,
        max_completion_tokens=body.max_output_tokens,
        tools=_tools(body.tools),
        tool_choice=_tool_choice(body.tool_choice),
        response_format=None if text.format is None else _response_format(text.format),
        reasoning_effort=reasoning.effort,
        rid=body.request_id,
        **{name: getattr(body, name) for name in _SAME_NAME},
    )


def _check_depth(repeated: object) -> None:
    """Refuse values that an answer, which has them at a deeper level, could not repeat."""
    for _ in range(_DEEPER):
        repeated = [repeated]
    try:
        msgspec.json.encode(repeated)
    except RecursionError:
        raise bad_request(
            "tools, tool_choice or text is nested too deeply: flatten it", "tools"
        ) from None


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise bad_request(
            f"metadata has {len(metadata)} pairs, at most {MAX_METADATA} are allowed", "metadata"
        )
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise bad_request(
                f"metadata.{key[:MAX_METADATA_KEY]}: a key has at most {MAX_METADATA_KEY} "
                f"characters, and a value {MAX_METADATA_VALUE}",
                "metadata",
            )


def _response_format(given: TextFormat) -> ResponseFormat:
    if given.type not in ("text", "json_object", "json_schema"):
        raise bad_request(
            f"text.format.type={given.type[:32]!r} must be text, json_object or json_schema",
            "text.format",
        )
    schema = None if given.type != "json_schema" else {"schema": given.schema}
    return ResponseFormat(type=given.type, json_schema=schema)


def _tools(given: list[dict[str, Any]] | None) -> list[Tool] | None:
    if not given:
        return None
    tools = []
    for index, one in enumerate(given):
        kind = one.get("type")
        if kind != "function":
            raise bad_request(
                f"tools[{index}].type={str(kind)[:32]!r} is not supported: {_BUILT_IN}", "tools"
            )
        tool = convert(one, FunctionTool, f"tools[{index}]")
        tools.append(
            Tool(
                function=FunctionSpec(
                    name=tool.name,
                    description=tool.description,
                    parameters=tool.parameters,
                    strict=tool.strict,
                )
            )
        )
    return tools


def _tool_choice(given: str | dict[str, Any] | None) -> str | ToolChoice | None:
    if not isinstance(given, dict):
        return given
    if given.get("type") != "function":
        raise bad_request(
            f"tool_choice.type={str(given.get('type'))[:32]!r} is not supported: send none, auto, "
            "required, or type function with a name",
            "tool_choice",
        )
    if not isinstance(given.get("name"), str):
        raise bad_request("tool_choice.name: this field is required, as text", "tool_choice")
    return ToolChoice(function=FunctionName(name=given["name"]))


def _messages(body: ResponsesBody) -> list[ChatMessage]:
    turns = _Turns()
    if body.instructions is not None:
        turns.add(ChatMessage(role="system", content=body.instructions))
    if isinstance(body.input, str):
        turns.add(ChatMessage(role="user", content=body.input))
        return turns.made
    if not body.input:
        raise bad_request("input is empty: send text, or at least one item", "input")
    for index, given in enumerate(body.input):
        turns.add_item(f"input[{index}]", _item(f"input[{index}]", given))
    return turns.made


def _item(field: str, given: dict[str, Any]) -> Item:
    kind = given.get("type") or "message"
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise bad_request(
            f"{field}.type={str(kind)[:32]!r} is not supported: send items of type "
            f"{', '.join(_ITEMS)}",
            "input",
        )
    item = convert(given, _ITEMS[kind], field)
    refuse_fields(item)
    return item


class _Turns:
    """Joins items to the turns that chat templates know: an assistant's reasoning, text and calls
    are one turn, and so are instructions and the system messages after them."""

    def __init__(self) -> None:
        self.made: list[ChatMessage] = []

    def add(self, message: ChatMessage) -> None:
        self.made.append(message)

    def add_item(self, field: str, item: Item) -> None:
        if isinstance(item, MessageItem):
            self._add_message(field, item)
        elif isinstance(item, ReasoningItem):
            parts = item.content or item.summary or ()
            thought = _text(f"{field}.content", parts, ("reasoning_text", "summary_text"))
            self.add(ChatMessage(role="assistant", content="", reasoning_content=thought))
        elif isinstance(item, CallItem):
            function = FunctionCall(name=item.name, arguments=item.arguments)
            call = ToolCall(function=function, id=item.call_id)
            turn = self._assistant()
            turn.tool_calls = [*(turn.tool_calls or ()), call]
        else:
            text = _text(f"{field}.output", item.output)
            self.add(ChatMessage(role="tool", content=text, tool_call_id=item.call_id))

    def _add_message(self, field: str, item: MessageItem) -> None:
        text = _text(f"{field}.content", item.content)
        role = "system" if item.role == "developer" else item.role
        if role not in ("system", "user", "assistant"):
            raise bad_request(
                f"{field}.role={role[:32]!r} must be one of system, developer, user, assistant",
                "input",
            )
        last = self.made[-1] if self.made else None
        if role == "assistant":
            turn = self._assistant()
            if turn.content or turn.tool_calls:
                self.add(turn := ChatMessage(role="assistant", content=""))
            turn.content = text
        elif role == "system" and last is not None and last.role == "system":
            last.content = f"{last.content}\n\n{text}"
        else:
            self.add(ChatMessage(role=role, content=text))

    def _assistant(self) -> ChatMessage:
        """The assistant's turn at the end, a new one if another's is there."""
        if not self.made or self.made[-1].role != "assistant":
            self.add(ChatMessage(role="assistant", content=""))
        return self.made[-1]


def _text(
    field: str,
    content: str | Sequence[dict[str, Any]],
    kinds: Sequence[str] = ("input_text", "output_text", "text"),
) -> str:
    return text_of(field, content, kinds, "input", _remedy)


def _remedy(kind: object) -> str:
    return "send its text as output_text" if kind == "refusal" else TEXT_ALONE
