"""Adjusting logits by what a request generated: penalties, biases, minimum length.

Each class covers only the rows that asked for it, and does not exist where no row did.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.mem_cache.radix_key import TokenArray
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.device import on_device


class Penalties:
    """Frequency, presence and repetition penalties, from counts kept up to date step by step.

    Memory: 5 bytes a vocabulary entry for each penalised row.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        rows: list[int],
        *,
        prompts: Sequence[Sequence[int] | TokenArray],
        outputs: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device | str,
    ) -> None:
        """Args:
        params: Of every row of the batch, likewise `prompts` and `outputs`.
        rows: Those that have a penalty.
        """

        def column(name: str) -> torch.Tensor:
            values = [float(getattr(params[row], name)) for row in rows]
            return on_device(values, device).unsqueeze(1)

        self.rows = on_device(rows, device)
        self._frequency = column("frequency_penalty")
        self._presence = column("presence_penalty")
        self._repetition = column("repetition_penalty")
        self._counts = torch.zeros((len(rows), vocab_size), dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros((len(rows), vocab_size), dtype=torch.bool, device=device)
        for i, row in enumerate(rows):
            self._in_prompt[i].index_fill_(0, on_device(prompts[row], device, torch.int64), 1)
            output = on_device(outputs[row], device, torch.int64)
            self._counts[i].scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def apply_(self, logits: torch.Tensor) -> None:
        """Change `[bs, vocab_size]` in place: repetition as in transformers, then OpenAI's two."""
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


class LogitBias:
    """What requests add to the logits of single tokens."""

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

    def apply_(self, logits: torch.Tensor) -> None:
        """Change `[bs, vocab_size]` in place."""
        logits.index_put_((self._rows, self._tokens), self._values, accumulate=True)


class MinNewTokens:
    """Keeps requests from ending before their minimum length."""

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
        """Change `[bs, vocab_size]` in place.

        Args:
            steps: int64 `[bs]`: tokens that each row generated before.
        """
        too_early = steps.index_select(0, self._rows) < self._minimums
        # Added, not assigned where it applies: how many places those are, the device would have to
        # say first.
        penalty = torch.where(too_early, -torch.inf, 0.0).to(logits.dtype)
        logits.index_put_((self._rows, self._tokens), penalty, accumulate=True)
