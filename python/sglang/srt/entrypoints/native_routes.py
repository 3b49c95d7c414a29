"""`/generate`, `/abort_request` and `/flush_cache`."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sglang.srt.entrypoints.http.body import read_json
from sglang.srt.entrypoints.http.errors import ApiError, bad_request
from sglang.srt.entrypoints.http.server_context import ServerContext, context_of
from sglang.srt.entrypoints.http.sse import EventStream, json_response, unless_client_leaves
from sglang.srt.entrypoints.http.streams import gather_or_cancel, merge
from sglang.srt.entrypoints.native_answers import AnswerWriter
from sglang.srt.entrypoints.native_protocol import GenerateBody, to_requests
from sglang.srt.managers.messages.io_struct import FlushCacheReqInput
from sglang.srt.managers.tokenizer.control_client import QUICK_TIMEOUT
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.managers.tokenizer.request_state import RequestState
from sglang.srt.managers.tokenizer.tokenizer_manager import TokenizerManager
from sglang.srt.utils.auth import AuthLevel, auth_level

MAX_FLUSH_TIMEOUT = 3600.0


class AbortBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The request to end, or all."""

    rid: str | None = None
    abort_all: bool | None = None
    abort_message: str | None = None
    """Accepted for SGLang's clients, but not used: the answer says `aborted by the client`."""


async def generate(request: Request) -> Response:
    """Complete one prompt or a batch, streaming or not."""
    context = context_of(request)
    body = await read_json(request, GenerateBody)
    requests, is_batch = to_requests(body)
    with_text = bool(body.return_text_in_logprobs)
    if body.stream:
        events = stream_answers(context.manager, requests, is_batch, with_text)
        return EventStream(
            await unless_client_leaves(request.receive, anext(events), events), events
        )
    work = whole_answers(context.manager, requests, with_text)
    answers = await unless_client_leaves(request.receive, work)
    return json_response(answers if is_batch else answers[0])


async def whole_answers(
    manager: TokenizerManager, requests: Sequence[GenerateRequest], with_text: bool = False
) -> list[dict[str, Any]]:
    """Run all requests to their ends; a failed request ends the others."""

    async def one(request: GenerateRequest, state: RequestState) -> dict[str, Any]:
        writer = AnswerWriter(request, manager.tokenizer, text_in_logprobs=with_text)
        return await writer.answer(await state.wait_for_end())

    with manager.submit(requests) as states:
        return await gather_or_cancel(list(map(one, requests, states)))


async def stream_answers(
    manager: TokenizerManager,
    requests: Sequence[GenerateRequest],
    is_batch: bool,
    with_text: bool = False,
) -> AsyncGenerator[dict[str, Any], None]:
    """Cumulative answers of growing outputs (see `AnswerWriter`), in a batch with their `index`."""
    with manager.submit(requests) as states:
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
    message = FlushCacheReqInput(timeout=timeout)
    answer = await context.manager.control.ask(message, timeout + QUICK_TIMEOUT)
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
