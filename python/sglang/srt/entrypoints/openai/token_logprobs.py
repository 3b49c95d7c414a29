"""Logprobs in the two forms that OpenAI's endpoints have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.managers.request_state import RequestState
from sglang.srt.utils.hf_tokenizer import is_byte_level, token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenShower:
    """Shows single tokens as text and as bytes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._byte_level = is_byte_level(tokenizer)

    def text(self, token_id: int) -> str:
        """The token alone; U+FFFD where it is only part of a character."""
        return self.bytes(token_id).decode(errors="replace")

    def bytes(self, token_id: int) -> bytes:
        """The token's own bytes, so that clients can join them to characters."""
        if self._byte_level:
            token = self._tokenizer.convert_ids_to_tokens(token_id)
            return token_bytes(token) if isinstance(token, str) else b""
        text = self._tokenizer.decode([token_id])
        return text.encode() if isinstance(text, str) else b""


def chat_logprobs(state: RequestState, first: int, shower: TokenShower) -> dict[str, Any]:
    """`logprobs` of a chat choice, for the tokens from index `first` on."""
    content = []
    for index in range(first, len(state.output_logprobs)):
        top = state.output_top_logprobs[index : index + 1]
        entry = _chat_entry(state.output_ids[index], state.output_logprobs[index], shower)
        entry["top_logprobs"] = [
            _chat_entry(token_id, value, shower) for value, token_id in (top[0] if top else ())
        ]
        content.append(entry)
    return {"content": content, "refusal": None}


def completion_logprobs(
    state: RequestState, first: int, text_offset: int, shower: TokenShower
) -> dict[str, Any]:
    """`logprobs` of a completion's choice, for the tokens from index `first` on.

    Args:
        text_offset: Characters of the answer before token `first`.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    tops: list[dict[str, float] | None] = []
    for index in range(first, len(state.output_logprobs)):
        text = shower.text(state.output_ids[index])
        tokens.append(text)
        offsets.append(text_offset)
        text_offset += len(text)
        row = state.output_top_logprobs[index : index + 1]
        tops.append({shower.text(token): value for value, token in row[0]} if row else None)
    return {
        "tokens": tokens,
        "token_logprobs": state.output_logprobs[first:],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _chat_entry(token_id: int, logprob: float, shower: TokenShower) -> dict[str, Any]:
    raw = shower.bytes(token_id)
    return {"token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": logprob}
