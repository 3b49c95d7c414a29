"""Logprobs in the two forms of OpenAI's endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.entrypoints.http.streams import Slices
from sglang.srt.managers.messages.io_struct import TopLogprobs
from sglang.srt.managers.tokenizer.request_state import RequestState
from sglang.srt.utils.hf_tokenizer import is_byte_level, token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenShower:
    """Shows single tokens as text and as bytes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._byte_level = is_byte_level(tokenizer)
        self._bytes: dict[int, bytes] = {}
        """Cache of bytes by token id, since the same tokens recur in prompts and among
        alternatives."""

    def text(self, token_id: int) -> str:
        """Text of the token alone; U+FFFD if it is only part of a character."""
        return self.raw(token_id).decode(errors="replace")

    def raw(self, token_id: int) -> bytes:
        """Bytes of the token alone, so that clients can join them to characters."""
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


async def chat_logprobs(state: RequestState, first: int, shower: TokenShower) -> dict[str, Any]:
    """`logprobs` of a chat choice, for the tokens from index `first` on."""
    content = []
    slices = Slices()
    for index in range(first, len(state.output_logprobs)):
        top = state.output_top_logprobs[index : index + 1]
        entry = _chat_entry(state.output_ids[index], state.output_logprobs[index], shower)
        entry["top_logprobs"] = [
            _chat_entry(token_id, value, shower) for value, token_id in (top[0] if top else ())
        ]
        content.append(entry)
        await slices.did(1 + len(entry["top_logprobs"]))
    return {"content": content, "refusal": None}


async def completion_logprobs(
    state: RequestState,
    first: int,
    text_offset: int,
    shower: TokenShower,
    *,
    with_prompt: bool = False,
) -> dict[str, Any]:
    """`logprobs` of a completion's choice, for the tokens from index `first` on.

    Args:
        text_offset: Characters of the answer before these tokens.
        with_prompt: Whether to put the prompt's tokens in front.
    """
    ids = state.output_ids[first : len(state.output_logprobs)]
    values: list[float | None] = [*state.output_logprobs[first:]]
    rows: list[TopLogprobs | None] = [*state.output_top_logprobs[first:]]
    rows += [None] * (len(ids) - len(rows))
    if with_prompt:
        tops = [*state.input_top_logprobs]
        num_prompt = 1 + len(state.input_logprobs)
        ids = state.logprob_ids[:num_prompt] + ids
        values = [None, *state.input_logprobs, *values]
        rows = [None, *tops, *[None] * (num_prompt - 1 - len(tops)), *rows]
    tokens: list[str] = []
    offsets: list[int] = []
    shown_rows: list[dict[str, float] | None] = []
    slices = Slices()
    for token_id, row in zip(ids, rows, strict=True):
        tokens.append(shower.text(token_id))
        offsets.append(text_offset)
        text_offset += len(tokens[-1])
        shown = None if row is None else {shower.text(token): value for value, token in row}
        shown_rows.append(shown)
        await slices.did(1 + len(row or ()))
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": shown_rows,
        "text_offset": offsets,
    }


def _chat_entry(token_id: int, logprob: float, shower: TokenShower) -> dict[str, Any]:
    raw = shower.raw(token_id)
    return {"token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": logprob}
