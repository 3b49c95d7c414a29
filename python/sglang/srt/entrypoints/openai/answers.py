"""Answers of OpenAI's two completion endpoints, whole or as a stream of chunks, with logprobs."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from sglang.srt.entrypoints.http.request import Request, Response
from sglang.srt.entrypoints.http.server_context import ServerContext
from sglang.srt.entrypoints.http.sse import (
    EventStream,
    Slices,
    gather_or_cancel,
    json_response,
    merge,
    unless_client_leaves,
)
from sglang.srt.entrypoints.openai.protocol import CommonBody
from sglang.srt.managers.detokenizer.detokenizer_manager import (
    DecoderFactory,
    make_decoder_factory,
)
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.managers.tokenizer.request_state import RequestState
from sglang.srt.managers.tokenizer.tokenizer_manager import TokenizerManager
from sglang.srt.messages.io_struct import TopLogprobs
from sglang.srt.utils.hf_tokenizer import is_byte_level, token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenFormatter:
    """Shows single tokens as text and as bytes, and makes the decoders of whole texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._byte_level = is_byte_level(tokenizer)
        self._bytes: dict[int, bytes] = {}
        """Cache of bytes by token id, since the same tokens recur in prompts and among
        alternatives."""

    @cached_property
    def new_decoder(self) -> DecoderFactory:
        """Makes decoders like the one that makes a request's text."""
        return make_decoder_factory(self._tokenizer)

    def text(self, token_id: int) -> str:
        """Text of this token without its neighbours; U+FFFD if it is only part of a character."""
        return self.raw(token_id).decode(errors="replace")

    def raw(self, token_id: int) -> bytes:
        """Bytes of this token without its neighbours, so that clients can join them to
        characters."""
        shown = self._bytes.get(token_id)
        if shown is None:
            if self._byte_level:
                token = self._tokenizer.convert_ids_to_tokens(token_id)
                shown = token_bytes(token) if isinstance(token, str) else b""
            else:
                text = self._tokenizer.decode([token_id])
                shown = text.encode() if isinstance(text, str) else b""
            self._bytes[token_id] = shown
        return shown


async def chat_logprobs(
    state: RequestState, first: int, formatter: TokenFormatter
) -> dict[str, Any]:
    """`logprobs` of a chat choice, for the tokens from index `first` on."""
    content = []
    slices = Slices()
    for index in range(first, len(state.output_logprobs)):
        top = state.output_top_logprobs[index : index + 1]
        entry = _chat_entry(state.output_ids[index], state.output_logprobs[index], formatter)
        entry["top_logprobs"] = [
            _chat_entry(token_id, value, formatter) for value, token_id in (top[0] if top else ())
        ]
        content.append(entry)
        await slices.count(1 + len(entry["top_logprobs"]))
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`logprobs` of one completion's choice, sent in parts as the output grows.

    `text_offset` counts characters of the answer's text. If a character is split over tokens, all
    of them have the offset at which it begins. Bytes that never become a character count with the
    token after them. A token without text, such as a special token that is left out, has the offset
    of the text after it.
    """

    def __init__(
        self,
        state: RequestState,
        formatter: TokenFormatter,
        *,
        skip_special_tokens: bool,
        echo: str | None,
    ) -> None:
        """Describe the choice of `state`. `echo` is the prompt's text, which the answer begins
        with; None: there is no echo, and the prompt's tokens are left out."""
        self._state = state
        self._formatter = formatter
        self._decoder = formatter.new_decoder(skip_special_tokens)
        self._echo = echo
        self._chars = len(echo or "")
        """Characters of the answer before the next token."""
        self._num_sent = 0
        """Tokens of the output that were sent."""
        self._slices = Slices()

    async def fresh(self) -> dict[str, Any]:
        """The logprobs of the tokens since the last call, the prompt's in front in the first."""
        state = self._state
        first, self._num_sent = self._num_sent, len(state.output_logprobs)
        ids = state.output_ids[first : self._num_sent]
        values: list[float | None] = [*state.output_logprobs[first : self._num_sent]]
        rows: list[TopLogprobs | None] = [*state.output_top_logprobs[first : self._num_sent]]
        rows += [None] * (len(ids) - len(rows))
        offsets: list[int] = []
        if self._echo is not None:
            tops = state.input_top_logprobs
            num_prompt = 1 + len(state.input_logprobs)
            prompt_ids = state.logprob_ids[:num_prompt]
            offsets = await self._offsets_in_echo(prompt_ids, self._echo)
            ids = prompt_ids + ids
            values = [None, *state.input_logprobs, *values]
            rows = [None, *tops, *[None] * (num_prompt - 1 - len(tops)), *rows]
            self._echo = None
        for token_id in ids[len(offsets) :]:
            offsets.append(self._chars)
            self._chars += len(self._decoder.feed([token_id]))
            await self._slices.count(1)
        formatter = self._formatter
        tokens: list[str] = []
        shown_rows: list[dict[str, float] | None] = []
        for token_id, row in zip(ids, rows, strict=True):
            tokens.append(formatter.text(token_id))
            shown = None if row is None else {formatter.text(token): value for value, token in row}
            shown_rows.append(shown)
            await self._slices.count(1 + len(row or ()))
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": shown_rows,
            "text_offset": offsets,
        }

    async def _offsets_in_echo(self, prompt_ids: list[int], echo: str) -> list[int]:
        """Offsets of the prompt's tokens. Tokens that the tokenizer added before the client's text
        are not in `echo`; their offset is 0."""
        decoder = self._formatter.new_decoder(False)
        starts, chars = [], 0
        for token_id in prompt_ids:
            starts.append(chars)
            chars += len(decoder.feed([token_id]))
            await self._slices.count(1)
        added = max(chars + len(decoder.finish()) - len(echo), 0)
        return [min(max(start - added, 0), len(echo)) for start in starts]


def _chat_entry(token_id: int, logprob: float, formatter: TokenFormatter) -> dict[str, Any]:
    raw = formatter.raw(token_id)
    return {"token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": logprob}


class Answers(ABC):
    """Writes the answers to one body, which has one choice for each sample."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    """The field `object` of a whole answer."""
    chunk_kind: ClassVar[str]
    """The same of a chunk."""

    def __init__(self, body: CommonBody, context: ServerContext) -> None:
        self._options = body.stream_options
        self._with_tiers = bool(body.return_cached_tokens_details)
        self._with_report = bool(body.return_cache_report)
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
        if extra := self._extra_of(states):
            answer["sglext"] = extra
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
        if ended and (extra := self._extra_of([state])):
            chunk["sglext"] = extra
        if self._options is not None and self._options.continuous_usage_stats:
            chunk["usage"] = self._usage([state])
        return chunk

    def _extra_of(self, states: Sequence[RequestState]) -> dict[str, Any]:
        """The content of `sglext`: with `return_cached_tokens_details` the tiers of the first
        choice; with `return_cache_report` the reports of all choices."""
        extra: dict[str, Any] = {}
        if self._with_tiers:
            tiers = msgspec.to_builtins(states[0].cached_tokens_details)
            extra["cached_tokens_details"] = tiers
        if self._with_report:
            extra |= shown_reports(states)
        return extra

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


def shown_reports(states: Sequence[RequestState]) -> dict[str, Any]:
    """What `return_cache_report` adds to an answer: cache report and times of its output, or lists
    with those of each output."""
    shown = {
        "cache_report": [state.shown_cache_report() for state in states],
        "stages": [state.shown_stages() for state in states],
    }
    return {name: each if len(each) > 1 else each[0] for name, each in shown.items()}


def finish_reason(state: RequestState) -> str | None:
    return None if state.finish_reason is None else state.finish_reason.type


def is_cut(state: RequestState) -> bool:
    """True if a limit or an abort ended the output, and not the model or a stop string."""
    return finish_reason(state) not in (None, "stop")


def matched_stop(state: RequestState) -> int | str | None:
    return None if state.finish_reason is None else state.finish_reason.matched


class Answerer(Protocol):
    """Writes the answers to one body, whose requests' states grow."""

    async def whole(self, states: Sequence[RequestState]) -> dict[str, Any]:
        """The only answer of a request that does not stream; all `states` have ended."""

    def stream(self, states: Sequence[RequestState]) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a stream."""


async def respond(
    request: Request,
    manager: TokenizerManager,
    samples: Sequence[GenerateRequest],
    make_answers: Callable[[], Answerer],
    *,
    named_events: bool = False,
) -> Response:
    """Run all samples and answer, streaming or not; a failed sample ends the others. `make_answers`
    is called once the engine has the samples, so that they do not wait for it. `named_events`: see
    `EventStream`."""

    async def whole() -> dict[str, Any]:
        with manager.submit(samples) as states:
            await gather_or_cancel([state.wait_for_end() for state in states])
            return await make_answers().whole(states)

    async def stream() -> AsyncGenerator[dict[str, Any], None]:
        with manager.submit(samples) as states:
            request.held = states
            await asyncio.sleep(0)  # The samples are on their way before the answer is prepared.
            async with aclosing(make_answers().stream(states)) as chunks:
                async for chunk in chunks:
                    yield chunk

    if samples[0].stream:
        chunks = stream()
        first = await unless_client_leaves(request.gone, anext(chunks), chunks)
        return EventStream(first, chunks, named=named_events)
    return json_response(await unless_client_leaves(request.gone, whole()))
