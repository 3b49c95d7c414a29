"""Logits from hidden states, for each request's last token, and logprobs of prompt tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.vocab_parallel_embedding import VocabLogits, VocabParallelEmbedding

if TYPE_CHECKING:
    from sglang.srt.layers.context_parallel import SplitHidden

_MAX_LOGITS: Final = 1 << 24
"""Logits computed at a time, in fp32: 64 MiB, and as much again for their logprobs."""


@dataclass(kw_only=True)
class LogitsProcessorOutput:
    """Output of a step. The sampler fills in the logprobs."""

    logits: VocabLogits
    """Before penalties and temperature."""
    next_token_logprobs: torch.Tensor | None = None
    """fp32 `[bs]`: logprobs of the sampled tokens."""
    next_token_top_logprobs_val: torch.Tensor | None = None
    """fp32 `[bs, max(top_logprobs_nums)]`: the largest logprobs of each row, descending."""
    next_token_top_logprobs_idx: torch.Tensor | None = None
    """int64, of the same shape: the tokens of these logprobs."""
    input_logprobs: InputLogprobs | None = None
    """Logprobs of prompt tokens; None: no request wants any."""
    accepted: torch.Tensor | None = None
    """int64 `[bs]`: accepted drafts of each request, of a verification; else None."""
    hidden_states: torch.Tensor | None = None
    """`[num_tokens, hidden_size]`, after the final norm: the input of the draft layer. None: the
    step did not capture them, or ranks have split it."""
    split_hidden: SplitHidden | None = None
    """In place of `hidden_states`, of a step that ranks have split."""

    def first(self, rows: int, num_tokens: int | None = None) -> LogitsProcessorOutput:
        """The output of the first `rows` rows of `logits`, and hidden states of `num_tokens`, by
        default as many. For captured steps, which are padded and have nothing else."""
        hidden = self.hidden_states
        if hidden is not None:
            hidden = hidden[: rows if num_tokens is None else num_tokens]
        return LogitsProcessorOutput(logits=self.logits.first(rows), hidden_states=hidden)

    @property
    def next_token_logits(self) -> torch.Tensor:
        """fp32 `[bs, vocab_size]`, gathered from all ranks. Sampling never writes to it."""
        return self.logits.whole()


def compute_logits(
    hidden_states: torch.Tensor, head: VocabParallelEmbedding, forward_batch: ForwardBatch
) -> LogitsProcessorOutput:
    """Apply the output head.

    Args:
        hidden_states: `[rows, hidden_size]`, after the final norm; the rows are those of
            `ForwardBatch.rows_for_logits`, or all tokens if the step captures them.
    """
    inputs: InputLogprobs | None = None
    captured = hidden_states if forward_batch.capture_hidden else None
    if forward_batch.extend_logprob_start_lens_cpu is not None:
        inputs = compute_input_logprobs(hidden_states, head, forward_batch)
    if inputs is not None or (captured is not None and forward_batch.rows_for_logits() is not None):
        hidden_states = hidden_states.index_select(0, forward_batch.last_rows())
    logits = head.logits(hidden_states, out=forward_batch.logits_out)
    return LogitsProcessorOutput(logits=logits, input_logprobs=inputs, hidden_states=captured)


@dataclass(frozen=True, slots=True)
class InputLogprobs:
    """Logprobs of the prompt tokens that each request of an extend step asked about."""

    values: list[list[float]]
    tops: list[list[list[tuple[float, int]]]]
    """For each value, (logprob, token) of the most likely tokens at that position, descending."""


def compute_input_logprobs(
    hidden_states: torch.Tensor, head: VocabParallelEmbedding, batch: ForwardBatch
) -> InputLogprobs:
    """Logprobs of the model's own logits at the positions that `batch` names, a few positions
    at a time.

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
            best, best_ids = logprobs.topk(most, dim=-1)
            pairs = zip(best.tolist(), best_ids.tolist(), strict=True)
            tops += [list(zip(*pair, strict=True)) for pair in pairs]
    split = InputLogprobs([], [])
    begin = 0
    for ids, num in zip(token_lists, nums, strict=True):
        end = begin + len(ids)
        split.values.append(values[begin:end])
        split.tops.append([top[:num] for top in tops[begin:end]] if num else [])
        begin = end
    return split


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
