"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.constrained.constraint import ConstraintKind
from sglang.srt.entrypoints.http_body import read_json, refuse_fields
from sglang.srt.entrypoints.http_errors import bad_request
from sglang.srt.entrypoints.openai.chat_output import ChatOutput
from sglang.srt.entrypoints.openai.chat_prompt import chat_prompt
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
    NEUTRAL,
    ChatBody,
)
from sglang.srt.entrypoints.openai.token_logprobs import TokenShower, chat_logprobs
from sglang.srt.entrypoints.openai.tools import ToolUse, tool_use
from sglang.srt.entrypoints.server_context import ServerContext, context_of
from sglang.srt.entrypoints.sse import json_response, start_stream, unless_client_leaves
from sglang.srt.entrypoints.streams import gather_or_cancel, merge
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.managers.tokenizer.request_state import OutputCursor, RequestState
from sglang.srt.managers.tokenizer.samples import expand_samples
from sglang.srt.parser.reasoning_parser import ReasoningParser, opened_reasoning

MAX_TOP_LOGPROBS: Final = 20
MESSAGES_AT_ONCE: Final = 256
"""Rendered where they are, which takes a millisecond or two; more go to a thread."""


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, streaming or not."""
    context = context_of(request)
    body = await read_json(request, ChatBody)
    if len(body.messages) > MESSAGES_AT_ONCE:
        engine_request, tools = await asyncio.get_running_loop().run_in_executor(
            context.renderer, to_request, body, context
        )
    else:
        engine_request, tools = to_request(body, context)
    samples = expand_samples([engine_request])
    answers = ChatAnswers(body, context, tools, engine_request)
    if body.stream:
        return await start_stream(request, answers.stream(samples))
    work = gather_or_cancel([context.manager.generate_whole(one) for one in samples])
    return json_response(await answers.whole(await unless_client_leaves(request, work)))


def to_request(body: ChatBody, context: ServerContext) -> tuple[GenerateRequest, ToolUse | None]:
    """The engine's request for `body`, and how it uses tools.

    Raises:
        ApiError: 400 that names the field.
    """
    check_common(body)
    tools = tool_use(body, context.args.tool_call_parser)
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
    params = sampling_params(body, max_tokens, field)
    if tools is not None and tools.json_schema is not None:
        params.json_schema = tools.json_schema
    request = GenerateRequest(
        text=chat_prompt(body, context.chat_template, tools, context.manager.limits.context_len),
        add_special_tokens=False,
        sampling_params=params,
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
    return request, tools


class ChatAnswers:
    """Writes the answers to one chat request."""

    def __init__(
        self,
        body: ChatBody,
        context: ServerContext,
        tools: ToolUse | None,
        request: GenerateRequest,
    ) -> None:
        """Args:
        tools: How the request uses tools.
        request: What `to_request` made of `body`.
        """
        self._body = body
        self._manager = context.manager
        self._shower = TokenShower(context.manager.tokenizer) if body.logprobs else None
        self._tools = tools
        # A grammar that holds from the first token leaves the model no room to reason.
        constraint = request.sampling_params.constraint
        # A structural tag leaves free text, and with it reasoning, to the model.
        is_free = constraint is None or constraint.kind is ConstraintKind.STRUCTURAL_TAG
        splits = body.separate_reasoning is not False and is_free
        self._reasoning_parser = context.args.reasoning_parser if splits else None
        self._begins_inside = opened_reasoning(request.text or "")
        self._cache_report = context.args.enable_cache_report
        self._head: dict[str, Any] = {
            "id": new_id("chatcmpl"),
            "created": created_now(),
            "model": body.model or context.model_name,
        }

    async def whole(self, states: Sequence[RequestState]) -> dict[str, Any]:
        """The one answer of a request that does not stream."""
        answer = {
            **self._head,
            "object": "chat.completion",
            "choices": [await self._choice(index, state) for index, state in enumerate(states)],
            "usage": usage_of(states, self._cache_report),
        }
        if self._body.return_cached_tokens_details:
            answer["sglext"] = sglext_of(states[0])
        return answer

    async def _choice(self, index: int, state: RequestState) -> dict[str, Any]:
        output = self._new_output()
        return {
            "index": index,
            "message": output.message(state.text),
            "logprobs": await self._logprobs(state, 0),
            "finish_reason": _finish_reason(state, output),
            "matched_stop": matched_stop(state),
        }

    def _new_output(self) -> ChatOutput:
        name = self._reasoning_parser
        return ChatOutput(
            None if name is None else ReasoningParser(name, begins_inside=self._begins_inside),
            None if self._tools is None else self._tools.new_parser(),
            parallel=self._tools is None or self._tools.parallel,
            stream_reasoning=self._body.stream_reasoning is not False,
        )

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
        output = self._new_output()
        async with aclosing(self._manager.generate(request)) as updates:
            async for state in updates:
                if cursor is None:
                    cursor = OutputCursor(state)
                    states[index] = state
                    yield self._chunk(index, state, {"role": "assistant", "content": ""})
                deltas = output.feed(cursor.advance())
                if state.ended:
                    deltas += output.finish()
                logprobs = await self._logprobs(state, cursor.first_new_token)
                if not deltas and logprobs is not None and logprobs["content"]:
                    deltas = [{"content": ""}]
                for delta in deltas:
                    yield self._chunk(index, state, delta, logprobs=logprobs)
                    logprobs = None
        assert cursor is not None, "every request yields at least its end"
        yield self._last_chunk(index, cursor.state, output)

    def _last_chunk(self, index: int, state: RequestState, output: ChatOutput) -> dict[str, Any]:
        chunk = self._chunk(index, state, {})
        chunk["choices"][0]["finish_reason"] = _finish_reason(state, output)
        chunk["choices"][0]["matched_stop"] = matched_stop(state)
        if self._body.return_cached_tokens_details:
            chunk["sglext"] = sglext_of(state)
        return chunk

    def _chunk(
        self,
        index: int,
        state: RequestState,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        delta = {"reasoning_content": None, **delta}
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        options = self._body.stream_options
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = usage_of([state], self._cache_report)
        return chunk

    async def _logprobs(self, state: RequestState, first: int) -> dict[str, Any] | None:
        return None if self._shower is None else await chat_logprobs(state, first, self._shower)


def _finish_reason(state: RequestState, output: ChatOutput) -> str | None:
    reason = finish_reason(state)
    return "tool_calls" if reason == "stop" and output.has_calls else reason
