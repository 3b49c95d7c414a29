"""`POST /v1/messages` and `/v1/messages/count_tokens`: answers, and the events of streams."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from sglang.srt.entrypoints.anthropic.context_management import (
    FIELD,
    NOTHING_APPLIED,
    pending_edit,
)
from sglang.srt.entrypoints.anthropic.protocol import (
    NAMES,
    CountTokensBody,
    MessagesBody,
    chat_body,
)
from sglang.srt.entrypoints.http.application import Route
from sglang.srt.entrypoints.http.body import read_json
from sglang.srt.entrypoints.http.errors import ApiError, client_names
from sglang.srt.entrypoints.http.request import Request, Response
from sglang.srt.entrypoints.http.server_context import ServerContext, context_of
from sglang.srt.entrypoints.http.sse import json_response, unless_client_leaves
from sglang.srt.entrypoints.openai.output_blocks import (
    Block,
    BlockAnswers,
    BlockKind,
    Change,
    Step,
    respond_in_blocks,
)
from sglang.srt.entrypoints.openai.routes import check_texts
from sglang.srt.entrypoints.openai.serving_chat import OutputSplitting, rendered
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.managers.tokenizer.request_state import RequestState
from sglang.srt.messages.io_struct import CLIENT_ABORT_STATUS
from sglang.srt.utils.error_answers import anthropic_error


async def messages(request: Request) -> Response:
    """Answer a conversation, streaming or not."""
    context = context_of(request)
    body = await read_json(request, MessagesBody)
    chat = chat_body(body)
    edit = pending_edit(body.context_management, chat.messages)

    async def check(one: GenerateRequest) -> None:
        # A token has at least one byte, so most prompts need not be counted.
        if edit is not None and len((one.text or "").encode()) > edit.tokens:
            edit.check(await _num_tokens(request, one))

    return await respond_in_blocks(
        request,
        chat,
        NAMES,
        lambda _, splitting: MessageAnswers(body, context, splitting),
        check=check,
    )


async def count_tokens(request: Request) -> Response:
    """The number of tokens of a conversation's prompt."""
    context = context_of(request)
    body = await read_json(request, CountTokensBody)
    chat = chat_body(body)
    edit = pending_edit(body.context_management, chat.messages)
    with client_names(*NAMES):
        samples, _ = await rendered(chat, context)
        count = await _num_tokens(request, samples[0])
    answer: dict[str, Any] = {"input_tokens": count}
    if edit is not None:
        edit.check(count)
    if body.context_management is not None:
        answer[FIELD] = {"original_input_tokens": count}
    return json_response(answer)


async def _num_tokens(request: Request, one: GenerateRequest) -> int:
    """Tokens of the prompt of `one`. Raises ApiError if it is too long to count."""
    manager, text = context_of(request).manager, one.text or ""
    check_texts([text], manager.limits, "messages")
    work = manager.encoder.encode(text, add_special_tokens=False)
    return len(await unless_client_leaves(request.gone, work))


class MessageAnswers(BlockAnswers):
    """Answers to one body, with content blocks."""

    def __init__(
        self, body: MessagesBody, context: ServerContext, splitting: OutputSplitting
    ) -> None:
        super().__init__(splitting)
        self._edits: dict[str, Any] = {}
        if body.context_management is not None:
            self._edits[FIELD] = NOTHING_APPLIED
        self._head = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": body.model or context.model_name,
        }

    async def _answer(self, state: RequestState, blocks: Sequence[Block]) -> dict[str, Any]:
        content = [_content(block) for block in blocks]
        end = _end(state, blocks)
        fields = {"content": content, **end, "usage": _usage(state)}
        return {**self._head, **fields, **self._edits, **self._extra(state)}

    def _first_events(self, state: RequestState) -> Iterable[dict[str, Any]]:
        end = {"stop_reason": None, "stop_sequence": None}
        fields: dict[str, Any] = {"content": [], **end, "usage": _usage(state)}
        return [{"type": "message_start", "message": {**self._head, **fields}}]

    def _events_of(self, change: Change, state: RequestState) -> Iterator[dict[str, Any]]:
        block, index = change.block, change.block.index
        if change.step is Step.OPEN:
            yield {"type": "content_block_start", "index": index, "content_block": _begun(block)}
        elif change.step is Step.GROW:
            kind, field = _DELTAS[block.kind]
            delta = {"type": kind, field: change.added}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        else:
            yield {"type": "content_block_stop", "index": index}

    async def _last_events(
        self, state: RequestState, blocks: Sequence[Block]
    ) -> Iterable[dict[str, Any]]:
        end = _end(state, blocks)
        fields = {"delta": end, "usage": _usage(state), **self._edits, **self._extra(state)}
        return [{"type": "message_delta", **fields}, {"type": "message_stop"}]

    def _failure(self, error: ApiError) -> dict[str, Any]:
        return anthropic_error(error.status, error.message)


_DELTAS: Final = {
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


def _begun(block: Block) -> dict[str, Any]:
    """The content block of `block` before its text."""
    if block.kind is BlockKind.CALL:
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _content(block: Block) -> dict[str, Any]:
    if block.kind is BlockKind.CALL:
        try:
            return {**_begun(block), "input": msgspec.json.decode(block.text)}
        except (msgspec.DecodeError, RecursionError):
            return {"type": "text", "text": block.text}  # The length cut the call.
    return {**_begun(block), _DELTAS[block.kind][1]: block.text}


def _end(state: RequestState, blocks: Sequence[Block]) -> dict[str, Any]:
    """Why the answer ended. Raises ApiError if it was aborted, which the API has no word for."""
    reason = state.finish_reason
    assert reason is not None, "an output is described once it has ended"
    if reason.type == "abort":
        raise ApiError(CLIENT_ABORT_STATUS, reason.message or "aborted")
    word, matched = "end_turn", None
    if reason.type == "length":
        word = "max_tokens"
    elif isinstance(reason.matched, str):
        word, matched = "stop_sequence", reason.matched
    elif any(block.kind is BlockKind.CALL for block in blocks):
        word = "tool_use"
    return {"stop_reason": word, "stop_sequence": matched}


def _usage(state: RequestState) -> dict[str, Any]:
    """The tokens so far; those of the prompt are the first three numbers together."""
    cached = state.cached_tokens_details.total
    return {
        "input_tokens": state.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,  # A matter of prices; there are none.
        "cache_read_input_tokens": cached,
        "output_tokens": len(state.output_ids),
    }


ROUTES: Final = (
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
)
