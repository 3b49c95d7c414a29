"""The sampling parameters of a batch, as tensors.

They are made anew when requests join or leave; in between, `accumulate` updates them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.hardware_backend.device_runtime import on_device
from sglang.srt.layers.penalties import (
    GrammarMask,
    GrammarRow,
    LogitBias,
    MinNewTokens,
    Penalties,
    TokenHistory,
)
from sglang.srt.sampling.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class FilteredRows:
    """Rows that sample only from the most probable tokens."""

    rows: torch.Tensor
    """int64 `[n]`."""
    top_ks: torch.Tensor
    """int64 `[n, 1]`: the vocabulary's size if unlimited."""
    top_ps: torch.Tensor
    """fp64 `[n, 1]`: infinite if unlimited, so that rounding drops no token."""
    min_ps: torch.Tensor
    """fp32 `[n, 1]`."""


@dataclass(slots=True)
class SamplingBatchInfo:
    """Sampling parameters of each row of a batch.

    Rows are sampled in three groups, so that a row's tokens never depend on the parameters of
    others: greedy, filtered (top-k, top-p, min-p), and plain.
    """

    temperatures: torch.Tensor | None
    """fp32 `[bs, 1]`; 1 for greedy rows. None: all rows are greedy."""
    plain_rows: torch.Tensor | None
    """int64 `[n]`: rows that sample from the whole vocabulary; None: no rows."""
    filtered: FilteredRows | None
    penalties: Penalties | None
    logit_bias: LogitBias | None
    min_new_tokens: MinNewTokens | None
    grammar: GrammarMask | None = None

    @classmethod
    def from_reqs(
        cls,
        params: Sequence[SamplingParams],
        vocab_size: int,
        device: torch.device | str,
        *,
        eos_token_ids: Sequence[int] = (),
        histories: Sequence[TokenHistory | None] | None = None,
        grammars: Sequence[GrammarRow] = (),
    ) -> SamplingBatchInfo:
        """Collect the parameters of a batch's requests, verified before.

        Args:
            eos_token_ids: Tokens that `min_new_tokens` masks, in addition to stop tokens.
            histories: One for each request with a penalty, None for others; None: empty ones.
            grammars: The constrained rows, which apply `min_new_tokens` themselves.
        """
        plain: list[int] = []
        filtered: list[int] = []
        penalised, biased, minimal = [], [], []
        constrained = {grammar.row for grammar in grammars}
        for row, p in enumerate(params):
            if not p.is_greedy:
                whole = p.top_k in (-1, vocab_size) or p.top_k > vocab_size
                is_plain = whole and p.top_p >= 1.0 and p.min_p <= 0.0
                (plain if is_plain else filtered).append(row)
            if p.has_penalties:
                penalised.append(row)
            if p.logit_bias:
                biased.append(row)
            if p.min_new_tokens > 0 and row not in constrained:
                minimal.append(row)
        temperatures = [1.0 if p.is_greedy else p.temperature for p in params]
        return cls(
            temperatures=(
                on_device(temperatures, device).unsqueeze(1) if plain or filtered else None
            ),
            plain_rows=on_device(plain, device) if plain else None,
            filtered=_filtered_rows(params, filtered, vocab_size, device) if filtered else None,
            penalties=Penalties(
                params,
                penalised,
                histories=[
                    (histories[row] if histories is not None else None) or TokenHistory((), ())
                    for row in penalised
                ],
                vocab_size=vocab_size,
                device=device,
            )
            if penalised
            else None,
            logit_bias=LogitBias(params, biased, device) if biased else None,
            min_new_tokens=MinNewTokens(params, minimal, eos_token_ids, device)
            if minimal
            else None,
            grammar=GrammarMask(grammars, len(params), vocab_size) if grammars else None,
        )

    @property
    def adjusts_logits(self) -> bool:
        """True if any row has a penalty, a bias, a minimum length or a grammar."""
        return bool(self._adjustments)

    @property
    def _adjustments(self) -> list[Penalties | LogitBias | MinNewTokens | GrammarMask]:
        found = (self.penalties, self.logit_bias, self.min_new_tokens, self.grammar)
        return [one for one in found if one is not None]

    def adjusted(self, logits: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Apply penalties, biases, minimum lengths and grammars to fp32 `[bs, vocab_size]`.

        Returns a copy if anything changes.
        """
        if self.adjusts_logits:
            logits = logits.clone()
        for adjustment in self._adjustments:
            adjustment.apply_(logits, steps)
        return logits

    @torch.inference_mode()
    def accumulate(self, next_token_ids: torch.Tensor) -> None:
        """Count int64 `[bs]` sampled tokens. Call it after each step if the batch goes on."""
        if self.penalties is not None:
            self.penalties.accumulate(next_token_ids)


def _filtered_rows(
    params: Sequence[SamplingParams], rows: list[int], vocab_size: int, device: torch.device | str
) -> FilteredRows:
    chosen = [params[row] for row in rows]
    top_ks = [vocab_size if p.top_k == -1 else min(p.top_k, vocab_size) for p in chosen]
    top_ps = [float("inf") if p.top_p >= 1.0 else p.top_p for p in chosen]
    return FilteredRows(
        rows=on_device(rows, device),
        top_ks=on_device(top_ks, device).unsqueeze(1),
        top_ps=on_device(top_ps, device, torch.float64).unsqueeze(1),
        min_ps=on_device([p.min_p for p in chosen], device).unsqueeze(1),
    )
