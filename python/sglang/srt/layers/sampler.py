"""Sampling of the next tokens.

Results do not depend on the rest of the batch: a row's token depends only on its own logits,
parameters, seed and step. A uniform number, hashed from (seed, step), is looked up in the row's
cumulative distribution.
"""

from __future__ import annotations

import torch

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampling_batch_info import FilteredRows, SamplingBatchInfo

# The constants of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
# generators, 2014), as signed 64-bit numbers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_UNIFORM_BITS = 48
"""Random bits of a sample. More could round its product with the total mass up to that mass."""

_HEAD_TOKENS = 512


class Sampler(torch.nn.Module):
    """Samples each row's next token. Stateless."""

    @torch.inference_mode()
    def forward(
        self,
        logits_output: LogitsProcessorOutput,
        sampling_info: SamplingBatchInfo,
        seeds: torch.Tensor,
        steps: torch.Tensor,
        return_logprob: bool = False,
        top_logprobs_nums: list[int] | None = None,
    ) -> torch.Tensor:
        """Sample each row's next token, and fill in the logprobs of `logits_output` that rows want.

        Args:
            seeds: int64 `[bs]`.
            steps: int64 `[bs]`: tokens that each row generated before.
            top_logprobs_nums: Number of alternatives that each row wants; None: no row wants any.

        Returns:
            int64 `[bs]` on the logits' device.
        """
        is_greedy = sampling_info.temperatures is None
        if is_greedy and not (sampling_info.adjusts_logits or return_logprob):
            return logits_output.logits.argmax()
        logits = sampling_info.adjusted(logits_output.next_token_logits, steps)
        token_ids = logits.argmax(dim=-1)
        temperatures = sampling_info.temperatures
        if temperatures is not None:
            uniform = uniform_from_seed(seeds, steps)
            if sampling_info.plain_rows is not None:
                rows = sampling_info.plain_rows
                scaled = logits.index_select(0, rows) / temperatures[rows]
                token_ids[rows] = _sample(scaled.softmax(dim=-1), uniform[rows])
            if sampling_info.filtered is not None:
                rows = sampling_info.filtered.rows
                scaled = logits.index_select(0, rows) / temperatures[rows]
                token_ids[rows] = _sample_filtered(
                    scaled.softmax(dim=-1), uniform[rows], sampling_info.filtered
                )
        if return_logprob:
            _fill_logprobs(logits_output, token_ids, top_logprobs_nums)
        return token_ids


def uniform_from_seed(seeds: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """One number in [0, 1) for each (seed, step): int64 `[bs]` twice to fp64 `[bs]`."""
    bits = _mix(_mix(seeds + _GOLDEN) + (steps + 1) * _GOLDEN)
    return _shift(bits, 64 - _UNIFORM_BITS).to(torch.float64) * 2.0**-_UNIFORM_BITS


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right, filling with zeros: torch's int64 fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _sample(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw a token from each row of `[n, vocab_size]` probabilities: int64 `[n]`.

    Args:
        uniform: fp64 `[n]` in [0, 1).
    """
    mass = probs.cumsum(dim=-1, dtype=torch.float64)
    target = uniform.unsqueeze(1) * mass[:, -1:]
    # The first token whose cumulative mass exceeds the target, so never one without mass. The
    # bound is for rows of NaN: their token is meaningless, but must exist.
    found = torch.searchsorted(mass, target, right=True).squeeze(1)
    return found.clamp_(max=probs.shape[-1] - 1)


def _sample_filtered(
    probs: torch.Tensor, uniform: torch.Tensor, filtered: FilteredRows
) -> torch.Tensor:
    """Sample from the tokens of `probs` `[n, vocab_size]` that top-k, top-p and min-p all keep.

    Each filter keeps the first tokens in descending order (a head), and together they keep the
    shortest head. Sorting a large vocabulary is slow and heads are short, so the head is sought
    among the `_HEAD_TOKENS` largest. Only rows with a possibly longer head are sorted completely.
    """
    if probs.shape[-1] <= 2 * _HEAD_TOKENS:
        return _sample_head(*_descending(probs), uniform, filtered)[0]
    # Candidates in vocabulary order: sorting them then breaks ties like sorting all tokens.
    values, tokens = probs.topk(_HEAD_TOKENS, dim=-1)
    smallest = values[:, -1]
    tokens = tokens.sort(dim=-1).values
    values, places = _descending(probs.gather(1, tokens))
    token_ids, last_kept = _sample_head(values, tokens.gather(1, places), uniform, filtered)
    unsure = (last_kept <= smallest).nonzero().squeeze(1)
    if len(unsure):
        part = FilteredRows(*(getattr(filtered, name)[unsure] for name in FilteredRows.__slots__))
        whole = _descending(probs.index_select(0, unsure))
        token_ids[unsure] = _sample_head(*whole, uniform[unsure], part)[0]
    return token_ids


def _descending(probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Stable: equal probabilities, common with bf16 logits, must not depend on the batch.
    values, order = probs.sort(dim=-1, descending=True, stable=True)
    return values, order


def _sample_head(
    probs: torch.Tensor, tokens: torch.Tensor, uniform: torch.Tensor, filtered: FilteredRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample from the kept head of `probs`, which are descending; `tokens` are their ids.

    Returns:
        Token ids `[n]`, and the smallest probability that each row kept, `[n]`.
    """
    mass = probs.cumsum(dim=-1, dtype=torch.float64)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    keep = (rank < filtered.top_ks) & (mass - probs < filtered.top_ps)
    keep &= probs >= filtered.min_ps * probs[:, :1]
    last = (keep.sum(dim=-1, keepdim=True) - 1).clamp_(min=0)  # rows of NaN keep nothing
    target = uniform.unsqueeze(1) * mass.gather(1, last)
    place = torch.minimum(torch.searchsorted(mass, target, right=True), last)
    return tokens.gather(1, place).squeeze(1), probs.gather(1, last).squeeze(1)


def _fill_logprobs(
    output: LogitsProcessorOutput, token_ids: torch.Tensor, top_logprobs_nums: list[int] | None
) -> None:
    """Fill in logprobs of the model's own logits, before penalties, temperature and filters."""
    logprobs = output.next_token_logits.log_softmax(dim=-1)
    output.next_token_logprobs = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    nums = top_logprobs_nums or []
    if any(nums):
        count = min(max(nums), logprobs.shape[-1])
        values, indices = logprobs.topk(count, dim=-1)
        output.next_token_top_logprobs_val = values
        output.next_token_top_logprobs_idx = indices
