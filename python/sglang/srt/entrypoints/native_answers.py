"""What `/generate` and `Engine.generate` answer."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from sglang.srt.managers.generate_request import GenerateRequest
from sglang.srt.managers.io_struct import TopLogprobs
from sglang.srt.managers.request_state import RequestState


class TokenText(Protocol):
    """The part of a tokenizer that shows a token."""

    def decode(self, token_ids: list[int]) -> str | list[str]:
        """Text of the tokens."""


class AnswerWriter:
    """Makes answers of one request out of its growing state.

    Logprob entries are made once and kept, so that cumulative answers cost only their encoding.
    """

    def __init__(
        self, request: GenerateRequest, tokenizer: TokenText, *, text_in_logprobs: bool = False
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._with_text = text_in_logprobs
        self._texts: dict[int, str | None] = {}
        """Of the tokens shown so far. A prompt's alternatives can be millions of entries, decoding
        each of which would hold up the event loop for seconds."""
        self._logprobs: list[tuple[float, int, str | None]] = []
        self._input_logprobs: list[tuple[float | None, int, str | None]] = []
        self._input_top_logprobs: list[list[tuple[float, int, str | None]] | None] = []
        self._top_logprobs: list[list[tuple[float, int, str | None]]] = []

    def answer(self, state: RequestState) -> dict[str, Any]:
        """Everything so far."""
        return {
            "text": state.text,
            "output_ids": state.output_ids,
            "meta_info": self._meta_info(state),
        }

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
        if state.finished_time is not None:
            meta["e2e_latency"] = state.finished_time - state.created_time
        if self._request.return_logprob:
            self._catch_up(state)
            meta["input_token_logprobs"] = self._input_logprobs
            meta["output_token_logprobs"] = self._logprobs
            if self._request.top_logprobs_num:
                meta["input_top_logprobs"] = self._input_top_logprobs
                meta["output_top_logprobs"] = self._top_logprobs
        return meta

    def _catch_up(self, state: RequestState) -> None:
        if not self._input_logprobs and state.logprob_ids:
            self._add_input(state)
        for index in range(len(self._logprobs), len(state.output_logprobs)):
            self._logprobs.append(
                self._entry(state.output_logprobs[index], state.output_ids[index])
            )
        for row in state.output_top_logprobs[len(self._top_logprobs) :]:
            self._top_logprobs.append(self._row(row))

    def _add_input(self, state: RequestState) -> None:
        """The prompt's logprobs came with the first output. Its first token has none: nothing is
        before it, or the client asked for what follows it."""
        first = self._entry(0.0, state.logprob_ids[0])
        self._input_logprobs.append((None, *first[1:]))
        for value, token_id in zip(state.input_logprobs, state.logprob_ids[1:], strict=False):
            self._input_logprobs.append(self._entry(value, token_id))
        self._input_top_logprobs.append(None)
        for row in state.input_top_logprobs:
            self._input_top_logprobs.append(self._row(row))

    def _entry(self, logprob: float, token_id: int) -> tuple[float, int, str | None]:
        return (logprob, token_id, self._text(token_id) if self._with_text else None)

    def _row(self, row: TopLogprobs) -> list[tuple[float, int, str | None]]:
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
