"""Logprobs in the two forms of OpenAI's endpoints."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from sglang.srt.entrypoints.http.streams import Slices
from sglang.srt.managers.detokenizer.incremental_detokenizer import (
    DecoderFactory,
    make_decoder_factory,
)
from sglang.srt.managers.messages.io_struct import TopLogprobs
from sglang.srt.managers.tokenizer.request_state import RequestState
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
        """Describe the choice of `state`.

        Args:
            skip_special_tokens: The request's parameter.
            echo: The prompt's text, which the answer begins with; None: there is no echo, and the
                prompt's tokens are left out.
        """
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
