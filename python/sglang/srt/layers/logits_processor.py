"""Logits from hidden states, for each request's last token only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.input_logprobs import InputLogprobs, compute_input_logprobs
from sglang.srt.layers.vocab_logits import VocabLogits
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding


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

    @property
    def next_token_logits(self) -> torch.Tensor:
        """fp32 `[bs, vocab_size]`, gathered from all ranks. Sampling never writes to it."""
        return self.logits.whole()


class LogitsProcessor(torch.nn.Module):
    """Applies the output head."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        head: VocabParallelEmbedding,
        forward_batch: ForwardBatch,
    ) -> LogitsProcessorOutput:
        """Args:
        hidden_states: `[rows, hidden_size]`, after the final norm; the rows are those of
            `ForwardBatch.rows_for_logits`.
        head: The output head.
        """
        inputs: InputLogprobs | None = None
        if forward_batch.extend_logprob_start_lens_cpu is not None:
            inputs = compute_input_logprobs(hidden_states, head, forward_batch)
            hidden_states = hidden_states.index_select(0, forward_batch.last_rows())
        logits = head.logits(hidden_states, out=forward_batch.logits_out)
        return LogitsProcessorOutput(logits=logits, input_logprobs=inputs)
