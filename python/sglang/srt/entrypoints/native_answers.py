"""Answers of `/generate` and `Engine.generate`."""

from __future__ import annotations

from typing import Any, Final, Protocol, TypeAlias

import msgspec

from sglang.srt.entrypoints.http.streams import Slices
from sglang.srt.managers.messages.io_struct import TopLogprobs
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.managers.tokenizer.request_state import RequestState

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
            meta["stages"] = msgspec.to_builtins(state.stages)
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
