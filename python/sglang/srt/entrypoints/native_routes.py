"""`/generate` and its answers, `/abort_request` and `/flush_cache`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from sglang.srt.entrypoints.http.application import Route
from sglang.srt.entrypoints.http.body import read_json
from sglang.srt.entrypoints.http.errors import ApiError, bad_request
from sglang.srt.entrypoints.http.request import Request, Response
from sglang.srt.entrypoints.http.server_context import ServerContext, context_of
from sglang.srt.entrypoints.http.sse import (
    EventStream,
    Slices,
    gather_or_cancel,
    json_response,
    merge,
    unless_client_leaves,
)
from sglang.srt.entrypoints.native_protocol import GenerateBody, to_requests
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.managers.tokenizer.request_state import RequestState
from sglang.srt.managers.tokenizer.tokenizer_manager import TokenizerManager
from sglang.srt.messages.io_struct import TopLogprobs
from sglang.srt.utils.auth import AuthLevel, auth_level

FREE_ENTRIES: Final = 1024
"""Most output logprobs that are repeated in every event of a stream; see `AnswerWriter`."""
REPEAT_GROWTH: Final = 1.25
"""Factor by which the number of logprobs must grow before more than `FREE_ENTRIES` are repeated."""

Entry: TypeAlias = tuple[float, int, str | None]
"""Logprob, token id, and the token's text or None if it is not asked for."""
FirstEntry: TypeAlias = tuple[None, int, str | None]


class TokenText(Protocol):
    """The part of a tokenizer that gives a token's text."""

    def decode(self, token_ids: list[int]) -> str | list[str]:
        """Text of the tokens."""


class AnswerWriter:
    """Makes the answers of one request from its growing state.

    Answers are cumulative. Repeating all logprobs in each event would be quadratic in their number,
    so a stream repeats them less often; in all other events the lists are empty:

    - the prompt's logprobs are in the first event that has them, and in the last;
    - the output's are in every event up to `FREE_ENTRIES`, then whenever they have grown by
      `REPEAT_GROWTH`, and in the last.

    In total, a stream has at most five times the entries of its last event, besides the
    `FREE_ENTRIES`.
    """

    def __init__(
        self, request: GenerateRequest, tokenizer: TokenText, *, text_in_logprobs: bool = False
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._with_text = text_in_logprobs
        self._texts: dict[int, str | None] = {}
        """Cache of texts by token id, since the same tokens often recur among the alternatives."""
        self._logprobs: list[Entry] = []
        self._input_logprobs: list[Entry | FirstEntry] = []
        self._input_top_logprobs: list[list[Entry] | None] = []
        self._top_logprobs: list[list[Entry]] = []
        self._slices = Slices()
        self._sent_input = False
        self._num_sent = 0
        """Number of entries of the output's logprobs when they were last sent."""

    async def answer(self, state: RequestState) -> dict[str, Any]:
        """The whole answer so far, except logprobs that need not be repeated yet."""
        meta = self._meta_info(state)
        answer = {"text": state.text, "output_ids": state.output_ids, "meta_info": meta}
        if self._request.return_logprob:
            # The state may grow while logprobs are formatted; the answer must be consistent.
            answer["output_ids"] = state.output_ids.copy()
            ended = state.ended
            await self._catch_up(state)
            self._add_logprobs(meta, ended=ended)
        return answer

    def _meta_info(self, state: RequestState) -> dict[str, Any]:
        reason = state.finish_reason
        meta: dict[str, Any] = {
            "id": state.rid,
            "finish_reason": None if reason is None else msgspec.to_builtins(reason),
            "prompt_tokens": state.prompt_tokens,
            "completion_tokens": len(state.output_ids),
            "cached_tokens": state.cached_tokens_details.total,
            "cached_tokens_details": msgspec.to_builtins(state.cached_tokens_details),
            "queue_time": state.queue_time,
        }
        if state.seconds is not None:
            meta["e2e_latency"] = state.seconds
        if state.stages is not None:
            meta["stages"] = state.shown_stages()
        if state.verifications is not None:
            meta["spec_verify_ct"] = state.verifications.count
            meta["spec_accept_length"] = state.verifications.accept_length
        if self._request.return_cache_report and state.ended:
            meta["cache_report"] = state.shown_cache_report()
        return meta

    def _add_logprobs(self, meta: dict[str, Any], *, ended: bool) -> None:
        tops = self._request.top_logprobs_num
        with_input = ended or not self._sent_input
        self._sent_input = bool(self._input_logprobs)
        meta["input_token_logprobs"] = self._input_logprobs if with_input else []
        count = len(self._logprobs) * (1 + tops)
        with_output = ended or count <= FREE_ENTRIES or count >= REPEAT_GROWTH * self._num_sent
        if with_output:
            self._num_sent = count
        meta["output_token_logprobs"] = self._logprobs if with_output else []
        if tops:
            meta["input_top_logprobs"] = self._input_top_logprobs if with_input else []
            meta["output_top_logprobs"] = self._top_logprobs if with_output else []

    async def _catch_up(self, state: RequestState) -> None:
        num_output = len(state.output_logprobs)
        if not self._input_logprobs and state.logprob_ids:
            await self._add_input(state)
        tops = self._request.top_logprobs_num
        for index in range(len(self._logprobs), num_output):
            entry = self._entry(state.output_logprobs[index], state.output_ids[index])
            self._logprobs.append(entry)
            if tops:
                self._top_logprobs.append(self._row(state.output_top_logprobs[index]))
            await self._slices.count(1 + tops)

    async def _add_input(self, state: RequestState) -> None:
        """Add the prompt's logprobs, which came with the first output. The first token has none: no
        token is before it, or the client asked for the tokens after it."""
        first = self._entry(0.0, state.logprob_ids[0])
        self._input_logprobs.append((None, *first[1:]))
        for value, token_id in zip(state.input_logprobs, state.logprob_ids[1:], strict=False):
            self._input_logprobs.append(self._entry(value, token_id))
            await self._slices.count(1)
        self._input_top_logprobs.append(None)
        for row in state.input_top_logprobs:
            self._input_top_logprobs.append(self._row(row))
            await self._slices.count(len(row))

    def _entry(self, logprob: float, token_id: int) -> Entry:
        return (logprob, token_id, self._text(token_id) if self._with_text else None)

    def _row(self, row: TopLogprobs) -> list[Entry]:
        if not self._with_text:
            return [(value, token_id, None) for value, token_id in row]
        text = self._text
        return [(value, token_id, text(token_id)) for value, token_id in row]

    def _text(self, token_id: int) -> str | None:
        try:
            return self._texts[token_id]
        except KeyError:
            text = self._tokenizer.decode([token_id])
            self._texts[token_id] = shown = text if isinstance(text, str) else None
            return shown


MAX_FLUSH_TIMEOUT = 3600.0


class AbortBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    rid: str | None = None
    abort_all: bool | None = None
    abort_message: str | None = None
    """Accepted for SGLang's clients, but not used: the answer says who may abort."""


async def generate(request: Request) -> Response:
    """Continue one prompt or a batch, streaming or not."""
    context = context_of(request)
    body = await read_json(request, GenerateBody)
    requests, is_batch = to_requests(body, context.sampling_defaults.values)
    with_text = bool(body.return_text_in_logprobs)
    if body.stream:
        events = stream_answers(context.manager, requests, is_batch, with_text, request)
        return EventStream(await unless_client_leaves(request.gone, anext(events), events), events)
    work = whole_answers(context.manager, requests, with_text)
    answers = await unless_client_leaves(request.gone, work)
    return json_response(answers if is_batch else answers[0])


async def whole_answers(
    manager: TokenizerManager, requests: Sequence[GenerateRequest], with_text: bool = False
) -> list[dict[str, Any]]:
    """Run all requests to their ends; a failed request ends the others."""

    async def one(request: GenerateRequest, state: RequestState) -> dict[str, Any]:
        await state.wait_for_end()
        writer = AnswerWriter(request, manager.tokenizer, text_in_logprobs=with_text)
        return await writer.answer(state)

    with manager.submit(requests) as states:
        return await gather_or_cancel(list(map(one, requests, states)))


async def stream_answers(
    manager: TokenizerManager,
    requests: Sequence[GenerateRequest],
    is_batch: bool,
    with_text: bool = False,
    http_request: Request | None = None,
) -> AsyncGenerator[dict[str, Any], None]:
    """Cumulative answers of growing outputs (see `AnswerWriter`), in a batch with their `index`."""
    with manager.submit(requests) as states:
        if http_request is not None:
            http_request.held = states
        await asyncio.sleep(0)  # `respond` tells why.
        streams = [
            _stream_one(AnswerWriter(request, manager.tokenizer, text_in_logprobs=with_text), state)
            for request, state in zip(requests, states, strict=True)
        ]
        async with aclosing(merge(streams)) as merged:
            async for index, answer in merged:
                yield {**answer, "index": index} if is_batch else answer


async def _stream_one(
    writer: AnswerWriter, state: RequestState
) -> AsyncGenerator[dict[str, Any], None]:
    has_ended = False
    while not has_ended:
        has_ended = await state.wait_for_output()
        yield await writer.answer(state)


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def abort_request(request: Request) -> Response:
    """Abort a request, or all of them. An unknown id is no error: its request may have just
    ended."""
    context = context_of(request)
    body = await read_json(request, AbortBody)
    if body.abort_all:
        await context.manager.abort_all()
    elif body.rid:
        await context.manager.abort(body.rid)
    else:
        raise bad_request("rid: give the id of a request, or abort_all", "rid")
    return json_response({"success": True})


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def flush_cache(request: Request) -> Response:
    """Empty L1 and L2, after waiting at most `timeout` seconds for the engine to be idle."""
    timeout = _flush_timeout(request)
    context: ServerContext = context_of(request)
    answer = await context.manager.flush_cache(timeout)
    if not answer.success:
        raise ApiError(400, f"not flushed: {answer.message}")
    return json_response({"success": True, "message": answer.message or "flushed"})


def _flush_timeout(request: Request) -> float:
    for name in request.query_params:
        if name != "timeout":
            raise bad_request(f"{name}: unknown parameter; timeout is known", name)
    text = request.query_params.get("timeout", "0")
    try:
        timeout = float(text)
    except ValueError:
        timeout = math.nan
    if not 0 <= timeout <= MAX_FLUSH_TIMEOUT:
        raise bad_request(
            f"timeout={text[:32]} must be seconds from 0 to {MAX_FLUSH_TIMEOUT:g}", "timeout"
        )
    return timeout


ROUTES: Final = (
    Route("/generate", generate, methods=["POST", "PUT"]),
    Route("/abort_request", abort_request, methods=["POST"]),
    Route("/flush_cache", flush_cache, methods=["POST"]),
)
