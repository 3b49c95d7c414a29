"""Bodies of OpenAI's endpoints, as its clients and `sglang_router` send them.

An unsupported field that would change the answer is refused by name; a field without effect
(bookkeeping, or a neutral value) is accepted.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec

from sglang.srt.entrypoints.http.body import TEXT_ALONE

Text: TypeAlias = str | None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Options of a stream beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """`text`, `json_object`, `json_schema` with its schema, or `structural_tag` with the others."""

    type: str
    json_schema: Any = None
    format: Any = None
    structures: Any = None
    triggers: Any = None


class CommonBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of both kinds of completion. `null` means absent."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    sampling_seed: int | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    n: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    rid: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    return_cached_tokens_details: bool | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None
    # Bookkeeping of clients and routers, without effect here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    log_metrics: bool | None = None
    custom_labels: dict[str, str] | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    # Refused by name, unless neutral.
    structural_tag: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    custom_params: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    data_parallel_rank: Any = None
    routed_dp_rank: Any = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """The function and arguments of a call in an earlier answer."""

    name: str
    arguments: str | dict[str, Any] | None = None
    """Arguments as a JSON object, or as its text."""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call in an earlier answer."""

    function: FunctionCall
    id: str | None = None
    type: str = "function"
    index: int | None = None


class FunctionSpec(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool of a request."""

    function: FunctionSpec
    type: str = "function"


class FunctionName(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The name of a tool."""

    name: str


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The only tool that must be called."""

    function: FunctionName
    type: str = "function"


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn. `content` is text, or parts of type `text`."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatBody(CommonBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    """Variable for the chat template."""
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: str | ToolChoice | None = None
    tools: list[Tool] | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    verbosity: Any = None


class CompletionBody(CommonBody, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/tokenize`: `prompt`, or `messages` with a chat request's fields that shape its
    prompt."""

    prompt: str | list[str] | None = None
    messages: list[ChatMessage] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/detokenize`."""

    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool | None = None


_TOOLS: Final = "use tools and tool_choice"

NOT_SERVED: Final = {
    "structural_tag": "use response_format of type structural_tag",
    "lora_path": "SGLang has LoRA, this engine does not",
    "session_params": "send the whole conversation, its cached prefix is reused",
    "custom_logit_processor": "use logit_bias",
    "custom_params": "leave it out",
    "return_hidden_states": "leave it out",
    "return_routed_experts": "leave it out",
    "data_parallel_rank": "SGLang has data parallelism, this engine does not",
    "routed_dp_rank": "SGLang has data parallelism, this engine does not",
}
"""Refused fields of both endpoints, with the remedy."""

CHAT_NOT_SERVED: Final = {
    "functions": _TOOLS,
    "function_call": _TOOLS,
    "modalities": TEXT_ALONE,
    "audio": TEXT_ALONE,
    "prediction": "leave it out",
    "web_search_options": "leave it out",
    "verbosity": "say it in the messages",
}
MESSAGE_NOT_SERVED: Final = {
    "function_call": "use tool_calls",
    "audio": TEXT_ALONE,
}
COMPLETION_NOT_SERVED: Final = {
    "suffix": "leave it out",
}
NEUTRAL: Final[tuple[Any, ...]] = (None, False, [], "none", "", "auto", ["text"])
"""Neutral values of the fields above, which are accepted."""
