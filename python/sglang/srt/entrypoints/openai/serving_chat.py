"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.http_body import read_json, refuse_fields
from sglang.srt.entrypoints.http_errors import bad_request
from sglang.srt.entrypoints.openai.convert import (
    check_common,
    created_now,
    finish_reason,
    matched_stop,
    new_id,
    sampling_params,
    sglext_of,
    usage_of,
)
from sglang.srt.entrypoints.openai.protocol import (
    CHAT_NOT_SERVED,
    MESSAGE_NOT_SERVED,
    NEUTRAL,
    ChatBody,
    ChatMessage,
)
from sglang.srt.entrypoints.openai.token_logprobs import TokenShower, chat_logprobs
from sglang.srt.entrypoints.server_context import ServerContext, context_of
from sglang.srt.entrypoints.sse import json_response, start_stream, unless_client_leaves
from sglang.srt.entrypoints.streams import gather_or_cancel, merge
from sglang.srt.managers.generate_request import GenerateRequest
from sglang.srt.managers.request_state import OutputCursor, RequestState
from sglang.srt.managers.samples import expand_samples

MAX_TOP_LOGPROBS: Final = 20
_RENDER_ARGUMENTS: Final = frozenset(
    {
        "conversation", "messages", "chat_template", "tokenize", "tools", "documents", "padding",
        "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
        "return_assistant_tokens_mask", "add_generation_prompt", "continue_final_message",
    }
)  # fmt: skip
"""Arguments of the renderer itself, which a client may not set through template variables."""
_ROLES: Final = ("system", "developer", "user", "assistant")


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, streaming or not."""
    context = context_of(request)
    body = await read_json(request, ChatBody)
    samples = expand_samples([to_request(body, context)])
    answers = ChatAnswers(body, context)
    if body.stream:
        return await start_stream(request, answers.stream(samples))
    work = gather_or_cancel([context.manager.generate_whole(one) for one in samples])
    return json_response(answers.whole(await unless_client_leaves(request, work)))


def to_request(body: ChatBody, context: ServerContext) -> GenerateRequest:
    """The engine's request for `body`.

    Raises:
        ApiError: 400 that names the field.
    """
    check_common(body)
    refuse_fields(body, CHAT_NOT_SERVED, NEUTRAL)
    top_logprobs = body.top_logprobs or 0
    if not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
        raise bad_request(
            f"top_logprobs={top_logprobs} must be from 0 to {MAX_TOP_LOGPROBS}", "top_logprobs"
        )
    if top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    field = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    max_tokens = getattr(body, field)
    request = GenerateRequest(
        text=_prompt(body, context),
        add_special_tokens=False,
        sampling_params=sampling_params(body, max_tokens, field),
        default_max_new_tokens=0 if max_tokens is None else None,
        max_tokens_field=field,
        prompt_field="messages",
        stream=bool(body.stream),
        return_logprob=bool(body.logprobs),
        top_logprobs_num=top_logprobs,
        no_stop_trim=bool(body.no_stop_trim),
        extra_key=body.extra_key,
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
    )
    if body.rid is not None:
        request.rid = body.rid
    return request


class ChatAnswers:
    """Writes the answers to one chat request."""

    def __init__(self, body: ChatBody, context: ServerContext) -> None:
        self._body = body
        self._manager = context.manager
        self._shower = TokenShower(context.manager.tokenizer) if body.logprobs else None
        self._cache_report = context.args.enable_cache_report
        self._head: dict[str, Any] = {
            "id": new_id("chatcmpl"),
            "created": created_now(),
            "model": body.model or context.model_name,
        }

    def whole(self, states: Sequence[RequestState]) -> dict[str, Any]:
        """The one answer of a request that does not stream."""
        answer = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, state) for index, state in enumerate(states)],
            "usage": usage_of(states, self._cache_report),
        }
        if self._body.return_cached_tokens_details:
            answer["sglext"] = sglext_of(states[0])
        return answer

    def _choice(self, index: int, state: RequestState) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": state.text, "refusal": None},
            "logprobs": self._logprobs(state, 0),
            "finish_reason": finish_reason(state),
            "matched_stop": matched_stop(state),
        }

    async def stream(
        self, samples: Sequence[GenerateRequest]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Chunks of all samples: the role, the text as it grows, the end; then the usage."""
        states: dict[int, RequestState] = {}
        pieces = [self._pieces(index, sample, states) for index, sample in enumerate(samples)]
        async with aclosing(merge(pieces)) as merged:
            async for _, piece in merged:
                yield piece
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield {
                **self._head,
                "object": "chat.completion.chunk",
                "choices": [],
                "usage": usage_of(list(states.values()), self._cache_report),
            }

    async def _pieces(
        self, index: int, request: GenerateRequest, states: dict[int, RequestState]
    ) -> AsyncGenerator[dict[str, Any], None]:
        cursor: OutputCursor | None = None
        async with aclosing(self._manager.generate(request)) as updates:
            async for state in updates:
                if cursor is None:
                    cursor = OutputCursor(state)
                    states[index] = state
                    yield self._chunk(index, state, {"role": "assistant", "content": ""})
                text = cursor.advance()
                logprobs = self._logprobs(state, cursor.first_new_token)
                if text or (logprobs is not None and logprobs["content"]):
                    yield self._chunk(index, state, {"content": text}, logprobs=logprobs)
        assert cursor is not None, "every request yields at least its end"
        end = self._chunk(index, cursor.state, {}, ended=True)
        if self._body.return_cached_tokens_details:
            end["sglext"] = sglext_of(cursor.state)
        yield end

    def _chunk(
        self,
        index: int,
        state: RequestState,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        ended: bool = False,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason(state) if ended else None,
        }
        if ended:
            choice["matched_stop"] = matched_stop(state)
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        options = self._body.stream_options
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = usage_of([state], self._cache_report)
        return chunk

    def _logprobs(self, state: RequestState, first: int) -> dict[str, Any] | None:
        return None if self._shower is None else chat_logprobs(state, first, self._shower)


def _prompt(body: ChatBody, context: ServerContext) -> str:
    if not body.messages:
        raise bad_request("messages is empty: send at least one message", "messages")
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
    for name in variables.keys() & _RENDER_ARGUMENTS:
        raise bad_request(
            f"chat_template_kwargs.{name}: not a template's variable; leave it out",
            "chat_template_kwargs",
        )
    return context.chat_template.render(
        [_turn(f"messages[{i}]", message) for i, message in enumerate(body.messages)],
        add_generation_prompt=adds,
        continue_final_message=continues,
        variables=variables,
    )


def _turn(field: str, message: ChatMessage) -> dict[str, Any]:
    """The message as templates read it."""
    if message.role not in _ROLES:
        raise bad_request(
            f"{field}.role={message.role[:32]!r} must be one of {', '.join(_ROLES)}", "messages"
        )
    refuse_fields(message, MESSAGE_NOT_SERVED, NEUTRAL)
    # OpenAI's newer name for the same turn; templates know the older one.
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": _content(field, message.content)}
    if message.name is not None:
        turn["name"] = message.name
    if message.reasoning_content is not None:
        turn["reasoning_content"] = message.reasoning_content
    return turn


def _content(field: str, content: str | list[dict[str, Any]] | None) -> str:
    if content is None:
        raise bad_request(f"{field}.content: expected text, got null", "messages")
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.get("type") != "text":
            raise bad_request(
                f"{field}.content[{index}].type={str(part.get('type'))[:32]!r} is not supported: "
                "this engine serves text models, send parts of type text",
                "messages",
            )
        if not isinstance(part.get("text"), str):
            raise bad_request(f"{field}.content[{index}].text: expected text", "messages")
        texts.append(part["text"])
    return "\n".join(texts)
