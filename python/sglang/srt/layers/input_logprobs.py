"""Logprobs of prompt tokens: the output head runs over many positions, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

_MAX_LOGITS: Final = 1 << 24
"""Logits computed at a time, in fp32: 64 MiB, and as much again for their logprobs."""


@dataclass(frozen=True, slots=True)
class InputLogprobs:
    """Logprobs of the prompt tokens that each request of an extend step asked about."""

    values: list[list[float]]
    tops: list[list[list[tuple[float, int]]]]
    """For each value, (logprob, token) of the most likely tokens at that position, descending."""


def compute_input_logprobs(
    hidden_states: torch.Tensor, head: VocabParallelEmbedding, batch: ForwardBatch
) -> InputLogprobs:
    """Logprobs of the model's own logits at the positions that `batch` names.

    Args:
        hidden_states: `[num_tokens, hidden_size]`, after the final norm.
        head: The output head.
        batch: An extend step with `extend_logprob_start_lens_cpu`.
    """
    token_lists = batch.extend_input_logprob_token_ids_cpu
    assert token_lists is not None
    nums = batch.top_logprobs_nums or [0] * len(token_lists)
    rows = torch.tensor([*_rows(batch)], device=hidden_states.device)
    tokens = torch.tensor([t for ids in token_lists for t in ids], device=hidden_states.device)
    most = max((num for num, ids in zip(nums, token_lists, strict=True) if ids), default=0)
    most = min(most, head.vocab_size)
    values: list[float] = []
    tops: list[list[tuple[float, int]]] = []
    step = max(_MAX_LOGITS // head.vocab_size, 1)
    for begin in range(0, len(rows), step):
        part = hidden_states.index_select(0, rows[begin : begin + step])
        logprobs = head.logits(part).whole().log_softmax(dim=-1)
        chosen = logprobs.gather(1, tokens[begin : begin + step].unsqueeze(1)).squeeze(1)
        values += chosen.tolist()
        if most:
            best, ids = logprobs.topk(most, dim=-1)
            pairs = zip(best.tolist(), ids.tolist(), strict=True)
            tops += [list(zip(*pair, strict=True)) for pair in pairs]
    return _by_request(token_lists, nums, values, tops)


def _rows(batch: ForwardBatch) -> Iterator[int]:
    """Indices in the step's tokens of the positions that `batch` names."""
    starts, token_lists = (
        batch.extend_logprob_start_lens_cpu,
        batch.extend_input_logprob_token_ids_cpu,
    )
    lens = batch.extend_seq_lens_cpu
    assert starts is not None and token_lists is not None and lens is not None
    offset = 0
    for start, ids, length in zip(starts, token_lists, lens, strict=True):
        yield from range(offset + start, offset + start + len(ids))
        offset += length


def _by_request(
    token_lists: list[list[int]],
    nums: list[int],
    values: list[float],
    tops: list[list[tuple[float, int]]],
) -> InputLogprobs:
    split = InputLogprobs([], [])
    begin = 0
    for ids, num in zip(token_lists, nums, strict=True):
        end = begin + len(ids)
        split.values.append(values[begin:end])
        split.tops.append([top[:num] for top in tops[begin:end]] if num else [])
        begin = end
    return split
