"""Masks of logits that leave each constrained request the tokens its grammar allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from sglang.srt.constrained.bitmask import allocate_bitmask, apply_bitmask

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import GrammarMatcher

_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class GrammarRow:
    """One constrained row of a batch."""

    row: int
    matcher: GrammarMatcher
    output_ids: Sequence[int]
    """Tokens that the request generated so far; the request's own list, which grows."""
    min_new_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    """Tokens forbidden before `min_new_tokens` other tokens, unless nothing else is allowed."""


class GrammarMask:
    """Masks of one batch, recomputed in each step: one bit per vocabulary entry and row."""

    def __init__(self, rows: Sequence[GrammarRow], batch_size: int, vocab_size: int) -> None:
        self._rows = rows
        self._bitmask = allocate_bitmask(batch_size, vocab_size)

    def apply_(self, logits: torch.Tensor) -> None:
        """Change `[bs, vocab_size]` in place: tokens that a grammar forbids get minus infinity."""
        for row in self._rows:
            row.matcher.fill_next_token_bitmask(self._bitmask, row.row)
            if len(row.output_ids) < row.min_new_tokens:
                self._hold_back_ends(row)
        apply_bitmask(logits, self._bitmask, [row.row for row in self._rows])

    def _hold_back_ends(self, row: GrammarRow) -> None:
        mask = self._bitmask[row.row].clone()
        for token in row.end_ids:
            mask[token // _BITS] &= ~_bit(token)
        # A complete grammar allows only the end; the minimum then yields.
        if mask.any():
            self._bitmask[row.row] = mask


def _bit(token: int) -> int:
    """The token's bit of its word, as a signed 32-bit number."""
    bit = 1 << token % _BITS
    return bit - (1 << _BITS) if bit == 1 << (_BITS - 1) else bit
