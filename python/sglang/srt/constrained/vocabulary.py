"""The vocabulary of a tokenizer, as grammars need it: the bytes of each token id."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import xgrammar
from transformers import PreTrainedTokenizerBase


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """Plain data, so that the engine can send it to a compile process.

    `tokens[i]` are the bytes of token id i. They are empty for ids that no grammar allows: special
    tokens, whose text would vanish from the answer, and ids that only pad the logits.
    """

    tokens: list[bytes]
    eos_token_ids: list[int]
    add_prefix_space: bool

    @classmethod
    def from_tokenizer(
        cls, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> Vocabulary:
        """Args as in `create_grammar_backend`.

        Raises:
            ValueError: There is no end token, or one is outside the vocabulary.
        """
        ends = sorted(set(eos_token_ids))
        if not ends:
            raise ValueError(
                "the model names no end-of-sequence token, so a grammar could never end: set "
                "eos_token_id in generation_config.json"
            )
        if not 0 <= ends[0] <= ends[-1] < vocab_size:
            raise ValueError(f"eos_token_id {ends} is outside the vocabulary of {vocab_size}")
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=ends
        )
        tokens = [bytes(token) for token in info.decoded_vocab]
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {token_id for token_id, token in added.items() if token.special}
        for token_id in special | set(tokenizer.all_special_ids) | set(ends):
            if token_id < vocab_size:
                tokens[token_id] = b""
        return cls(tokens=tokens, eos_token_ids=ends, add_prefix_space=bool(info.add_prefix_space))

    def tokenizer_info(self) -> xgrammar.TokenizerInfo:
        """The vocabulary as the library's type."""
        return xgrammar.TokenizerInfo(
            self.tokens,
            xgrammar.VocabType.RAW,
            vocab_size=len(self.tokens),
            stop_token_ids=self.eos_token_ids,
            add_prefix_space=self.add_prefix_space,
        )
