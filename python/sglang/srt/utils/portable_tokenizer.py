"""The core of a tokenizer without transformers around it.

For a process that only decodes and shall not import transformers (and torch): the process that has
loaded the tokenizer takes out what decoding needs, and the other one makes the core again, in a
tenth of the time and a fifth of the memory. And for encoding without the wrapper's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tokenizers import Tokenizer

from sglang.srt.utils.hf_tokenizer import special_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DecodingTokenizer(Protocol):
    """What of a tokenizer decoding uses. transformers' own tokenizers fit."""

    @property
    def all_special_ids(self) -> list[int]: ...

    def convert_ids_to_tokens(self, ids: int) -> str | list[str] | None:
        """The token with an id, None where none has it."""

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str | list[str]:
        """Text of tokens."""


@dataclass(frozen=True, slots=True)
class TokenizerData:
    """Plain values, so that they can cross to another process."""

    backend_json: str
    """The core tokenizer, with every token that transformers added."""
    special_ids: frozenset[int]


def tokenizer_data(tokenizer: PreTrainedTokenizerBase) -> TokenizerData | None:
    """What `PortableTokenizer` needs, or None where the tokenizer does more than its core."""
    text = _core_json(tokenizer, ("decode", "_decode", "convert_ids_to_tokens"))
    return None if text is None else TokenizerData(text, special_token_ids(tokenizer))


def core_tokenizer(tokenizer: PreTrainedTokenizerBase, methods: Sequence[str]) -> Tokenizer | None:
    """A copy of the core, or None where `tokenizer` has its own versions of `methods`."""
    text = _core_json(tokenizer, methods)
    return None if text is None else Tokenizer.from_str(text)


def _core_json(tokenizer: PreTrainedTokenizerBase, methods: Sequence[str]) -> str | None:
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    own_ways = any(
        getattr(kind, name, None) is not getattr(PreTrainedTokenizerFast, name) for name in methods
    )
    if own_ways or not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    return str(tokenizer.backend_tokenizer.to_str())


class PortableTokenizer:
    """A `DecodingTokenizer` made of `TokenizerData`."""

    def __init__(self, data: TokenizerData) -> None:
        self.backend_tokenizer = Tokenizer.from_str(data.backend_json)
        self.all_special_ids = sorted(data.special_ids)

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """The token with an id, None where none has it."""
        token: str | None = self.backend_tokenizer.id_to_token(ids)
        return token

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        """Text of tokens."""
        assert not clean_up_tokenization_spaces, "only transformers does that"
        return str(self.backend_tokenizer.decode(token_ids, skip_special_tokens))
