"""Creates a grammar backend by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from transformers import PreTrainedTokenizerBase

from sglang.srt.constrained.base_grammar_backend import Grammar, GrammarBackend, GrammarMatcher
from sglang.srt.constrained.limits import GrammarLimits
from sglang.srt.constrained.xgrammar_backend import XGrammarBackend

__all__ = [
    "GRAMMAR_BACKENDS",
    "Grammar",
    "GrammarBackend",
    "GrammarMatcher",
    "create_grammar_backend",
]

GRAMMAR_BACKENDS: Final = ("xgrammar",)


def create_grammar_backend(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    limits: GrammarLimits | None = None,
    *,
    any_whitespace: bool = True,
) -> GrammarBackend:
    """The backend called `name`.

    Args:
        name: One of `GRAMMAR_BACKENDS`.
        tokenizer: The model's tokenizer.
        vocab_size: Columns of the model's logits; ids that the tokenizer lacks are never allowed.
        eos_token_ids: Tokens that end a completed grammar.
        limits: None means the defaults.
        any_whitespace: Whether JSON may have whitespace between its tokens (up to 40 in a row).

    Raises:
        ValueError: The name is unknown, or there is no end token.
    """
    if name not in GRAMMAR_BACKENDS:
        raise ValueError(
            f"--grammar-backend {name} is not known: use one of {', '.join(GRAMMAR_BACKENDS)}"
        )
    return XGrammarBackend(
        tokenizer,
        vocab_size,
        eos_token_ids,
        limits or GrammarLimits(),
        any_whitespace=any_whitespace,
    )
