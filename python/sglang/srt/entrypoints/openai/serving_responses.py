"""`POST /v1/responses`, OpenAI's API for agents: answers and the events of streams."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from sglang.srt.entrypoints.http.body import read_json
from sglang.srt.entrypoints.http.errors import ApiError
from sglang.srt.entrypoints.http.request import Request, Response
from sglang.srt.entrypoints.http.server_context import ServerContext, context_of
from sglang.srt.entrypoints.http.sse import Slices
from sglang.srt.entrypoints.openai.answers import TokenFormatter
from sglang.srt.entrypoints.openai.output_blocks import (
    Block,
    BlockAnswers,
    BlockKind,
    Change,
    Step,
    respond_in_blocks,
)
from sglang.srt.entrypoints.openai.responses_protocol import NAMES, ResponsesBody, chat_body
from sglang.srt.entrypoints.openai.serving_chat import OutputSplitting
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.managers.tokenizer.request_state import RequestState

_ID_PREFIX: Final = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}


async def responses(request: Request) -> Response:
    """Answer a conversation of items, streaming or not."""
    context = context_of(request)
    body = await read_json(request, ResponsesBody)
    return await respond_in_blocks(
        request,
        chat_body(body),
        NAMES,
        lambda one, splitting: ResponsesAnswers(body, context, one, splitting),
    )


class ResponsesAnswers(BlockAnswers):
    """Answers to one body, with items for blocks."""

    def __init__(
        self,
        body: ResponsesBody,
        context: ServerContext,
        request: GenerateRequest,
        splitting: OutputSplitting,
    ) -> None:
        super().__init__(splitting)
        self._formatter = TokenFormatter(context.manager.tokenizer)
        self._skips_special_tokens = request.sampling_params.skip_special_tokens
        self._item_ids: list[str] = []
        """Ids of the output's items, in order."""
        self._num_events = 0
        self._head = _head(body, context, request)

    async def _answer(self, state: RequestState, blocks: Sequence[Block]) -> dict[str, Any]:
        status = _status(state)
        items = [
            self._item(block, _item_status(state, is_last=block is blocks[-1])) for block in blocks
        ]
        is_cut = status == "incomplete"
        return {
            **self._head,
            "status": status,
            "completed_at": _now() if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": items,
            "usage": await self._usage(state, blocks),
            **self._extra(state),
        }

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """The block's item, with the text that it has."""
        if block.index == len(self._item_ids):
            self._item_ids.append(f"{_ID_PREFIX[block.kind]}_{uuid.uuid4().hex}")
        item: dict[str, Any] = {"id": self._item_ids[block.index], "status": status}
        if block.kind is BlockKind.CALL:
            item |= {"type": "function_call", "call_id": block.call_id, "name": block.name}
            return item | {"arguments": block.text}
        content = [] if status == "in_progress" else [_part(block, block.text)]
        if block.kind is BlockKind.REASONING:
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "message", "role": "assistant", "content": content}

    async def _usage(self, state: RequestState, blocks: Sequence[Block]) -> dict[str, Any]:
        has_thought = any(block.kind is BlockKind.REASONING for block in blocks)
        thought = await self._reasoning_tokens(state) if has_thought else 0
        return {
            "input_tokens": state.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": state.cached_tokens_details.total,
                "cache_write_tokens": 0,  # A matter of prices; there are none.
            },
            "output_tokens": len(state.output_ids),
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": state.prompt_tokens + len(state.output_ids),
        }

    async def _reasoning_tokens(self, state: RequestState) -> int:
        """Tokens up to the one with which the reasoning's text ends."""
        end = self._splitting.reasoning_end(state.text)
        decoder = self._formatter.new_decoder(self._skips_special_tokens)
        slices, chars = Slices(), 0
        for count, token_id in enumerate(state.output_ids):
            if chars >= end:
                return count
            chars += len(decoder.feed([token_id]))
            await slices.count(1)
        return len(state.output_ids)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _first_events(self, state: RequestState) -> Iterable[dict[str, Any]]:
        answer = {**self._head, "status": "in_progress", "output": [], "usage": None}
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=answer)

    def _events_of(self, change: Change, state: RequestState) -> Iterator[dict[str, Any]]:
        block = change.block
        if change.step is Step.OPEN:
            item = self._item(block, "in_progress")
            yield self._event("response.output_item.added", output_index=block.index, item=item)
        place = {"item_id": self._item_ids[block.index], "output_index": block.index}
        if block.kind is BlockKind.CALL:
            yield from self._events_of_call(change, place)
        else:
            yield from self._events_of_part(change, {**place, "content_index": 0})
        if change.step is Step.CLOSE:
            item = self._item(block, _item_status(state, is_last=change.is_last))
            yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _events_of_call(self, change: Change, place: dict[str, Any]) -> Iterator[dict[str, Any]]:
        kind = "response.function_call_arguments"
        if change.step is Step.GROW:
            yield self._event(f"{kind}.delta", **place, delta=change.added)
        elif change.step is Step.CLOSE:
            block = change.block
            yield self._event(f"{kind}.done", **place, name=block.name, arguments=block.text)

    def _events_of_part(self, change: Change, place: dict[str, Any]) -> Iterator[dict[str, Any]]:
        block = change.block
        is_text = block.kind is BlockKind.TEXT
        kind = "response.output_text" if is_text else "response.reasoning_text"
        logprobs: dict[str, Any] = {"logprobs": []} if is_text else {}
        if change.step is Step.OPEN:
            yield self._event("response.content_part.added", **place, part=_part(block, ""))
        elif change.step is Step.GROW:
            yield self._event(f"{kind}.delta", **place, delta=change.added, **logprobs)
        else:
            yield self._event(f"{kind}.done", **place, text=block.text, **logprobs)
            yield self._event("response.content_part.done", **place, part=_part(block, block.text))

    async def _last_events(
        self, state: RequestState, blocks: Sequence[Block]
    ) -> Iterable[dict[str, Any]]:
        answer = await self._answer(state, blocks)
        kind = "completed" if answer["status"] == "completed" else "incomplete"
        return [self._event(f"response.{kind}", response=answer)]

    def _failure(self, error: ApiError) -> dict[str, Any]:
        code = str(error.code or "server_error")
        return self._event("error", code=code, message=error.message, param=error.param)


def _head(body: ResponsesBody, context: ServerContext, request: GenerateRequest) -> dict[str, Any]:
    """The fields of an answer that are known before its output."""
    params = request.sampling_params
    text = msgspec.to_builtins(body.text) if body.text is not None else {}
    return {
        "id": body.request_id or f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": _now(),
        "completed_at": None,
        "model": body.model or context.model_name,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": None if body.reasoning is None else msgspec.to_builtins(body.reasoning),
        "background": False,
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _part(block: Block, text: str) -> dict[str, Any]:
    """A block's only part of content."""
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(state: RequestState) -> str:
    reason = state.finish_reason
    assert reason is not None, "an output is described once it has ended"
    return {"stop": "completed", "length": "incomplete"}.get(reason.type, "cancelled")


def _item_status(state: RequestState, *, is_last: bool) -> str:
    return "incomplete" if is_last and _status(state) != "completed" else "completed"


def _now() -> int:
    return int(time.time())  # noqa: TID251 (a date, for clients)
