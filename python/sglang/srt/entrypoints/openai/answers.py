"""Answers of OpenAI's two completion endpoints: whole, or as a stream of chunks."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.http.server_context import ServerContext
from sglang.srt.entrypoints.http.sse import EventStream, json_response, unless_client_leaves
from sglang.srt.entrypoints.http.streams import gather_or_cancel, merge
from sglang.srt.entrypoints.openai.protocol import CommonBody
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.managers.tokenizer.request_state import RequestState
from sglang.srt.managers.tokenizer.tokenizer_manager import TokenizerManager


class Answers(ABC):
    """Writes the answers to one body. A body has one choice for each sample.

    Args:
        body: The body, whose samples may stream.
        context: State of the server.
    """

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    """The field `object` of a whole answer."""
    chunk_kind: ClassVar[str]
    """The same of a chunk."""

    def __init__(self, body: CommonBody, context: ServerContext) -> None:
        self._options = body.stream_options
        self._with_tiers = bool(body.return_cached_tokens_details)
        self._cache_report = context.args.enable_cache_report
        self._head: dict[str, Any] = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),  # noqa: TID251 (a date, for clients)
            "model": body.model or context.model_name,
        }

    async def whole(self, states: Sequence[RequestState]) -> dict[str, Any]:
        """The only answer of a request that does not stream."""
        answer = {
            **self._head,
            "object": self.kind,
            "choices": [await self._choice(index, state) for index, state in enumerate(states)],
            "usage": self._usage(states),
        }
        if self._with_tiers:
            answer["sglext"] = _tiers_of(states[0])
        return answer

    async def stream(self, states: Sequence[RequestState]) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of all choices as they grow; then the usage if it is asked for."""
        streams = [self._chunks(index, state) for index, state in enumerate(states)]
        async with aclosing(merge(streams)) as merged:
            async for _, chunk in merged:
                yield chunk
        if self._options is not None and self._options.include_usage:
            usage = self._usage(states)
            yield {**self._head, "object": self.chunk_kind, "choices": [], "usage": usage}

    @abstractmethod
    async def _choice(self, index: int, state: RequestState) -> dict[str, Any]:
        """A choice of the whole answer."""

    @abstractmethod
    def _chunks(self, index: int, state: RequestState) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of one choice."""

    def _chunk(self, state: RequestState, choice: dict[str, Any], *, ended: bool) -> dict[str, Any]:
        """A chunk with one choice; `ended` marks the choice's last chunk."""
        chunk = {**self._head, "object": self.chunk_kind, "choices": [choice]}
        if ended and self._with_tiers:
            chunk["sglext"] = _tiers_of(state)
        if self._options is not None and self._options.continuous_usage_stats:
            chunk["usage"] = self._usage([state])
        return chunk

    def _usage(self, states: Sequence[RequestState]) -> dict[str, Any]:
        """Token counts over all prompts and samples of one request; a prompt counts once."""
        firsts = [state for state in states if state.request.sample_of is None] or states
        prompt = sum(state.prompt_tokens for state in firsts)
        completion = sum(len(state.output_ids) for state in states)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        if self._cache_report:
            cached = sum(state.cached_tokens_details.total for state in firsts)
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage


def _tiers_of(state: RequestState) -> dict[str, Any]:
    """The field that `return_cached_tokens_details` adds to an answer."""
    return {"cached_tokens_details": msgspec.to_builtins(state.cached_tokens_details)}


def finish_reason(state: RequestState) -> str | None:
    """OpenAI's word for why the request ended."""
    return None if state.finish_reason is None else state.finish_reason.type


def matched_stop(state: RequestState) -> int | str | None:
    """The stop token or string that ended the request."""
    return None if state.finish_reason is None else state.finish_reason.matched


async def respond(
    request: Request,
    manager: TokenizerManager,
    samples: Sequence[GenerateRequest],
    make_answers: Callable[[], Answers],
) -> Response:
    """Run all samples and answer, streaming or not; a failed sample ends the others.

    Args:
        make_answers: Called once the engine has the samples, so that they do not wait for it.
    """
    if samples[0].stream:
        chunks = _stream(manager, samples, make_answers)
        first = await unless_client_leaves(request.receive, anext(chunks), chunks)
        return EventStream(first, chunks)
    work = _whole(manager, samples, make_answers)
    return json_response(await unless_client_leaves(request.receive, work))


async def _whole(
    manager: TokenizerManager,
    samples: Sequence[GenerateRequest],
    make_answers: Callable[[], Answers],
) -> dict[str, Any]:
    with manager.submit(samples) as states:
        await gather_or_cancel([state.wait_for_end() for state in states])
        return await make_answers().whole(states)


async def _stream(
    manager: TokenizerManager,
    samples: Sequence[GenerateRequest],
    make_answers: Callable[[], Answers],
) -> AsyncGenerator[dict[str, Any], None]:
    with manager.submit(samples) as states:
        async with aclosing(make_answers().stream(states)) as chunks:
            async for chunk in chunks:
                yield chunk
