"""Bodies of OpenAI's endpoints, as its clients and `sglang_router` send them, and their conversion.

`http/body.py` has what the marks on fields mean, and the errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, ClassVar, Final, TypeAlias

import msgspec

from sglang.srt.constrained.constraint import Constraint, constraint_of_response_format
from sglang.srt.entrypoints.http.body import (
    BOOKKEEPING,
    EQUAL_PREFIXES,
    IMAGES_ALONE,
    NOTHING,
    TEXT_ALONE,
    Ignored,
    Refused,
    SharedFields,
    refuse_fields,
    refuse_own_ids,
)
from sglang.srt.entrypoints.http.errors import bad_request, client_names
from sglang.srt.sampling.sampling_params import MAX_SEED, NO_DEFAULTS, SamplingParams

_TEMPLATE: Final = "send it in chat_template_kwargs, under the name that the chat template has"
_TOOLS: Final = "use tools and tool_choice"
_CONTINUE: Final = "send continue_final_message: true"

Text: TypeAlias = str | None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
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


class CommonBody(SharedFields, kw_only=True):
    """Fields of both kinds of completion. `null` means absent."""

    elsewhere: ClassVar[dict[str, str]] = {
        "sampling_params": "send its fields beside the others of this body",
        "max_new_tokens": "send max_tokens",
        "min_new_tokens": "send min_tokens",
        "text": "the text's field is prompt in completions, and messages in chats",
        "extra_body": "send its fields beside the others of this body",
    }

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
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    n: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    rid: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    return_cached_tokens_details: bool | None = None

    user: Annotated[str | None, Ignored(BOOKKEEPING)] = None
    metadata: Annotated[dict[str, Any] | None, Ignored(BOOKKEEPING)] = None
    store: Annotated[bool | None, Ignored("bookkeeping; nothing is stored")] = None
    service_tier: Annotated[str | None, Ignored("there is one tier")] = None
    safety_identifier: Annotated[str | None, Ignored(BOOKKEEPING)] = None
    prompt_cache_key: Annotated[str | None, Ignored(EQUAL_PREFIXES)] = None
    prompt_cache_retention: Annotated[str | None, Ignored("the cache evicts what is old")] = None
    prompt_cache_options: Annotated[Any, Ignored("the cache evicts what is old")] = None

    structural_tag: Annotated[Any, Refused("use response_format of type structural_tag")] = None
    custom_params: Annotated[Any, Refused("use logit_bias")] = None
    return_token_ids: Annotated[Any, Refused("ask /generate, whose answers have output_ids")] = None
    return_meta_info: Annotated[Any, Refused("ask /generate, whose answers have it")] = None
    # Names of vLLM's.
    guided_json: Annotated[Any, Refused("use response_format or json_schema")] = None
    guided_regex: Annotated[Any, Refused("use regex")] = None
    guided_grammar: Annotated[Any, Refused("use ebnf")] = None
    guided_choice: Annotated[Any, Refused("use regex, with alternatives")] = None
    structured_outputs: Annotated[
        Any, Refused("use response_format, json_schema, regex or ebnf")
    ] = None
    include_stop_str_in_output: Annotated[Any, Refused("use no_stop_trim")] = None
    spaces_between_special_tokens: Annotated[Any, Refused("leave it out", (True,))] = None
    use_beam_search: Annotated[Any, Refused("use n")] = None
    prompt_logprobs: Annotated[
        Any, Refused("ask /generate with logprob_start_len, or completions with echo")
    ] = None


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None
    """Arguments as a JSON object, or as its text."""


class ToolCall(msgspec.Struct, kw_only=True):
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
    function: FunctionSpec
    type: str = "function"
    cache_control: Annotated[Any, Ignored(EQUAL_PREFIXES)] = None


class FunctionName(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
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
    reasoning: str | None = None
    """Another name of `reasoning_content`."""
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    annotations: Annotated[Any, Ignored("the text has what it is about")] = None
    cache_control: Annotated[Any, Ignored(EQUAL_PREFIXES)] = None
    provider_specific_fields: Annotated[Any, Ignored("notes of a client library")] = None

    refusal: Annotated[Any, Refused("send its text as content")] = None
    audio: Annotated[Any, Refused(TEXT_ALONE)] = None
    function_call: Annotated[Any, Refused("use tool_calls", (*NOTHING, "none"))] = None
    reasoning_details: Annotated[Any, Refused("send reasoning_content")] = None
    thinking_blocks: Annotated[Any, Refused("send reasoning_content")] = None
    prefix: Annotated[Any, Refused(_CONTINUE)] = None
    partial: Annotated[Any, Refused(_CONTINUE)] = None


class ChatBody(CommonBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    """Variable for the chat template; `none` also switches its thinking off."""
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: str | ToolChoice | None = None
    tools: list[Tool] | None = None

    prediction: Annotated[Any, Ignored("a hint for speed alone")] = None
    mm_processor_kwargs: Annotated[Any, Ignored(IMAGES_ALONE)] = None
    verbosity: Annotated[Any, Ignored("a wish that chat templates do not know")] = None

    functions: Annotated[Any, Refused(_TOOLS)] = None
    function_call: Annotated[Any, Refused(_TOOLS, (*NOTHING, "none", "auto"))] = None
    modalities: Annotated[Any, Refused(TEXT_ALONE, (*NOTHING, "text"))] = None
    audio: Annotated[Any, Refused(TEXT_ALONE)] = None
    use_audio_in_video: Annotated[Any, Refused(TEXT_ALONE)] = None
    web_search_options: Annotated[Any, Refused("the model has what the messages say", ())] = None
    moderation: Annotated[Any, Refused("moderate the messages and the answer yourself", ())] = None
    reasoning: Annotated[Any, Refused("send reasoning_effort")] = None
    include_reasoning: Annotated[Any, Refused("send separate_reasoning", (None, True))] = None
    enable_thinking: Annotated[Any, Refused(_TEMPLATE, (None,))] = None
    thinking: Annotated[Any, Refused(_TEMPLATE, (None,))] = None
    chat_template: Annotated[Any, Refused("start the server with --chat-template")] = None
    documents: Annotated[Any, Refused("send their text in messages")] = None
    input_ids: Annotated[Any, Refused("send token ids to /generate")] = None


class CompletionBody(CommonBody, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None

    separate_reasoning: Annotated[bool | None, Ignored("completions are not split")] = None
    stream_reasoning: Annotated[bool | None, Ignored("completions are not split")] = None

    best_of: Annotated[Any, Refused("ask for n outputs", (None, 1))] = None
    suffix: Annotated[Any, Refused("write the model's infilling tokens into prompt")] = None


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


MAX_TEMPERATURE: Final = 2.0
MAX_MODEL_CHARS: Final = 4096
"""Longest model name in characters, enough for a path. It is limited because each event of a stream
repeats the name."""

_SAME_NAME: Final = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "logit_bias", "stop", "stop_regex", "stop_token_ids", "ignore_eos",
    "skip_special_tokens", "n", "json_schema", "regex", "ebnf",
)  # fmt: skip


def check_common(body: CommonBody) -> None:
    """Refuse fields that are not supported, contradict each other or are out of range."""
    refuse_fields(body)
    refuse_own_ids(body.rid)
    if body.model is not None and len(body.model) > MAX_MODEL_CHARS:
        raise bad_request(
            f"model has {len(body.model)} characters, at most {MAX_MODEL_CHARS} are allowed",
            "model",
        )
    if body.temperature is not None and not 0 <= body.temperature <= MAX_TEMPERATURE:
        raise bad_request(
            f"temperature={body.temperature} must be from 0 to {MAX_TEMPERATURE:g}", "temperature"
        )
    for name in ("seed", "sampling_seed"):
        seed = getattr(body, name)
        if seed is not None and not -(2**63) <= seed <= MAX_SEED:
            raise bad_request(f"{name}={seed} must be a signed 64-bit integer", name)


def sampling_params(
    body: CommonBody,
    max_tokens: int | None,
    field: str,
    defaults: Mapping[str, float] = NO_DEFAULTS,
    *,
    least: int = 1,
) -> SamplingParams:
    """The engine's parameters for `body`.

    Args:
        max_tokens: Limit of new tokens that the client named, or None.
        field: Name of that field.
        defaults: Fields of `SamplingParams` for what the client does not name.
        least: Least value of `max_tokens`.
    """
    values = {name: getattr(body, name) for name in _SAME_NAME}
    if max_tokens is not None:
        if max_tokens < least:
            raise bad_request(f"{field}={max_tokens} must be at least {least}", field)
        values["max_new_tokens"] = max_tokens
    elif body.min_tokens is not None:
        # A minimum number of tokens raises the default limit.
        values["max_new_tokens"] = max(SamplingParams().max_new_tokens, body.min_tokens)
    if body.min_tokens is not None:
        if body.min_tokens < 0 or (max_tokens is not None and body.min_tokens > max_tokens):
            raise bad_request(
                f"min_tokens={body.min_tokens} must be from 0 to {field}", "min_tokens"
            )
        values["min_new_tokens"] = body.min_tokens
    if body.response_format is not None:
        constraint = _constraint_of_format(body, body.response_format)
        if constraint is not None:
            values[constraint.kind.value] = constraint.text
    seed = body.seed if body.sampling_seed is None else body.sampling_seed
    if seed is not None:
        # OpenAI's seeds are signed. Without the sign bit two of them are rarely equal.
        values["sampling_seed"] = seed & MAX_SEED
    given = {name: value for name, value in values.items() if value is not None}
    return SamplingParams(**{**defaults, **given})


_FORMAT_NAMES: Final = (
    (r"^json_schema\b", "response_format.json_schema.schema"),
    (r"^structural_tag\b", "response_format"),
)


NO_FORMAT: Final = nullcontext()
"""The context in place of `naming_format` for a body without `response_format`."""


def naming_format() -> AbstractContextManager[None]:
    """Context in which the engine runs requests for a body with `response_format`: its errors about
    the constraint name that field."""
    return client_names(*_FORMAT_NAMES)


def _constraint_of_format(body: CommonBody, wanted: ResponseFormat) -> Constraint | None:
    """The constraint of the `response_format` of `body`; None: it has none."""
    try:
        constraint = constraint_of_response_format(msgspec.to_builtins(wanted))
    except ValueError as error:
        raise bad_request(str(error), "response_format") from None
    except RecursionError:
        raise bad_request(
            "response_format is nested too deeply: flatten it", "response_format"
        ) from None
    for name in ("json_schema", "regex", "ebnf"):
        if constraint is not None and getattr(body, name) is not None:
            raise bad_request(f"{name} contradicts response_format: keep one", "response_format")
    return constraint
