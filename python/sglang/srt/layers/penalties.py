"""Adjustments of logits: penalties of generated tokens, biases, minimum length, grammars.

Each class handles the rows that ask for it. A batch without such rows has no instance of it. All
take the logits and, as int64 `[bs]`, the number of tokens that each row generated before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from sglang.srt.constrained.grammar import GrammarMatcher, allocate_bitmask, apply_bitmask
from sglang.srt.hardware_backend.device_runtime import on_device
from sglang.srt.mem_cache.tree.radix_key import TokenArray, token_array
from sglang.srt.sampling.sampling_params import SamplingParams

_NO_COUNTS: Final = torch.empty(0)
_MASK_BITS: Final = 32


class TokenHistory:
    """The token counts of one request, for its penalties.

    The request's first penalised step creates them on the device, and later batches reuse them. The
    prompt is uploaded once; output tokens are uploaded only if no step has counted them. The latest
    `Penalties` with the request owns the memory; earlier ones must not be used again.
    """

    def __init__(self, prompt_ids: Sequence[int] | TokenArray, output_ids: Sequence[int]) -> None:
        """
        Args:
            prompt_ids: Tokens of the prompt.
            output_ids: Generated tokens; the list may grow.
        """
        self._prompt_ids = prompt_ids
        self._output_ids = output_ids
        self._num_counted = 0
        self._owner: Penalties | None = None
        self._counts = self._in_prompt = _NO_COUNTS

    def forget(self) -> None:
        """Free the memory; the next penalised step uploads everything again."""
        self._num_counted = 0
        self._owner = None
        self._counts = self._in_prompt = _NO_COUNTS

    def rows(
        self, vocab_size: int, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Counts of generated tokens so far, int32 `[vocab_size]`, and a mask of the prompt's
        tokens, bool `[vocab_size]`."""
        if self._owner is None:
            self._counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)
            self._in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            ids = on_device(token_array(self._prompt_ids).astype(np.int64), device)
            self._in_prompt.index_fill_(0, ids, 1)
        return self._counts, self._in_prompt

    def move(self, owner: Penalties, counts: torch.Tensor, in_prompt: torch.Tensor) -> None:
        """Record that the rows are now in `owner`'s memory."""
        self._owner, self._counts, self._in_prompt = owner, counts, in_prompt

    def take_uncounted(self) -> Sequence[int]:
        """Return the output tokens that are not counted yet, for the caller to count."""
        uncounted = self._output_ids[self._num_counted :]
        self._num_counted = len(self._output_ids)
        return uncounted

    def on_step(self, owner: Penalties) -> None:
        """Record that `owner` has counted one more token, which the CPU may not know yet."""
        assert self._owner is owner, "another batch has gone on with this request"
        self._num_counted += 1


class Penalties:
    """Frequency, presence and repetition penalties, from counts that each step updates.

    Memory: 5 bytes per vocabulary entry and penalised row.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        rows: list[int],
        *,
        histories: Sequence[TokenHistory],
        vocab_size: int,
        device: torch.device | str,
    ) -> None:
        """
        Args:
            params: One for each row of the batch.
            rows: Rows that have a penalty.
            histories: One for each of `rows`.
        """

        def column(name: str) -> torch.Tensor:
            values = [float(getattr(params[row], name)) for row in rows]
            return on_device(values, device).unsqueeze(1)

        self.rows = on_device(rows, device)
        self._frequency = column("frequency_penalty")
        self._presence = column("presence_penalty")
        self._repetition = column("repetition_penalty")
        self._histories = histories
        parts = [history.rows(vocab_size, device) for history in histories]
        self._counts = torch.stack([counts for counts, _ in parts])
        self._in_prompt = torch.stack([in_prompt for _, in_prompt in parts])
        uncounted: list[int] = []
        for i, history in enumerate(histories):
            history.move(self, self._counts[i], self._in_prompt[i])
            uncounted += [i * vocab_size + token for token in history.take_uncounted()]
        if uncounted:
            places = on_device(uncounted, device)
            ones = torch.ones_like(places, dtype=torch.int32)
            self._counts.view(-1).scatter_add_(0, places, ones)

    def apply_(self, logits: torch.Tensor, steps: torch.Tensor) -> None:
        """Change `[bs, vocab_size]` in place: repetition penalty as in transformers, then OpenAI's
        two penalties."""
        part = logits.index_select(0, self.rows)
        generated = self._counts > 0
        factor = torch.where(generated | self._in_prompt, self._repetition, 1.0)
        part = torch.where(part > 0, part / factor, part * factor)
        part -= self._frequency * self._counts
        part -= self._presence * generated
        logits.index_copy_(0, self.rows, part)

    def accumulate(self, token_ids: torch.Tensor) -> None:
        """Count int64 `[bs]` new tokens."""
        tokens = token_ids.index_select(0, self.rows).unsqueeze(1)
        ones = torch.ones_like(tokens, dtype=torch.int32)
        self._counts.scatter_add_(1, tokens, ones)
        for history in self._histories:
            history.on_step(self)


class LogitBias:
    """Biases of requests, added to the logits of single tokens."""

    def __init__(
        self, params: Sequence[SamplingParams], rows: list[int], device: torch.device | str
    ) -> None:
        entries = [
            (row, int(token), float(value))
            for row in rows
            for token, value in (params[row].logit_bias or {}).items()
        ]
        self._rows = on_device([entry[0] for entry in entries], device)
        self._tokens = on_device([entry[1] for entry in entries], device)
        self._values = on_device([entry[2] for entry in entries], device)

    def apply_(self, logits: torch.Tensor, steps: torch.Tensor) -> None:
        """Change `[bs, vocab_size]` in place."""
        logits.index_put_((self._rows, self._tokens), self._values, accumulate=True)


class MinNewTokens:
    """Prevents requests from ending before their minimum length."""

    def __init__(
        self,
        params: Sequence[SamplingParams],
        rows: list[int],
        eos_token_ids: Sequence[int],
        device: torch.device | str,
    ) -> None:
        rows_of, tokens, minimums = [], [], []
        for row in rows:
            for token in {*eos_token_ids, *(params[row].stop_token_ids or ())}:
                rows_of.append(row)
                tokens.append(token)
                minimums.append(params[row].min_new_tokens)
        self._rows = on_device(rows_of, device, torch.int64)
        self._tokens = on_device(tokens, device, torch.int64)
        self._minimums = on_device(minimums, device, torch.int64)

    def apply_(self, logits: torch.Tensor, steps: torch.Tensor) -> None:
        """Change `[bs, vocab_size]` in place."""
        too_early = steps.index_select(0, self._rows) < self._minimums
        # Rows that are long enough get zeros: to skip them, the CPU would have to wait until the
        # device has counted them.
        penalty = torch.where(too_early, -torch.inf, 0.0).to(logits.dtype)
        logits.index_put_((self._rows, self._tokens), penalty, accumulate=True)


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

    def apply_(self, logits: torch.Tensor, steps: torch.Tensor) -> None:
        """Change `[bs, vocab_size]` in place: tokens that a grammar forbids get minus infinity."""
        for row in self._rows:
            row.matcher.fill_next_token_bitmask(self._bitmask, row.row)
            if len(row.output_ids) < row.min_new_tokens:
                self._hold_back_ends(row)
        apply_bitmask(logits, self._bitmask, [row.row for row in self._rows])

    def _hold_back_ends(self, row: GrammarRow) -> None:
        mask = self._bitmask[row.row].clone()
        for token in row.end_ids:
            mask[token // _MASK_BITS] &= ~_bit(token)
        # A complete grammar allows only the end; the minimum then yields.
        if mask.any():
            self._bitmask[row.row] = mask


def _bit(token: int) -> int:
    """The token's bit of its word, as a signed 32-bit number."""
    bit = 1 << token % _MASK_BITS
    return bit - (1 << _MASK_BITS) if bit == 1 << (_MASK_BITS - 1) else bit
