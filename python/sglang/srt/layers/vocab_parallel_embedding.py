"""Token embeddings and the head that turns hidden states into logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.linear import apply_linear
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.vocab_logits import VocabLogits
from sglang.srt.layers.weight_slot import NamedSlots, WeightedLayer, WeightSlot


class VocabParallelEmbedding(WeightedLayer):
    """Embedding table, split over the ranks by token, and the untied output head.

    `weight` has the same number of rows on all ranks; rows past the vocabulary's end are zeros.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, placement: TensorPlacement) -> None:
        super().__init__(placement)
        self.tokens = placement.row_share(vocab_size)
        self._group = placement.tp_group
        self.weight = placement.empty(-(-vocab_size // placement.tp_size), hidden_size)
        self.weight[self.tokens.size :].zero_()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 `[num_tokens]` to `[num_tokens, hidden_size]`."""
        if self._group.size == 1:
            return F.embedding(input_ids, self.weight)
        kernels = fused_kernels(input_ids.device)
        if kernels is not None:
            rows = kernels.look_up_share(input_ids, self.weight, self.tokens)
            return self._group.all_reduce(rows)
        places = input_ids - self.tokens.begin
        is_elsewhere = (places < 0) | (places >= self.tokens.size)
        rows = F.embedding(places.masked_fill_(is_elsewhere, 0), self.weight)
        return self._group.all_reduce(rows.masked_fill_(is_elsewhere.unsqueeze(1), 0))

    @property
    def vocab_size(self) -> int:
        """Tokens of all ranks."""
        return self.tokens.total

    def logits(
        self, hidden_states: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> VocabLogits:
        """The logits of `[n, hidden_size]`.

        Args:
            out: Tensor for this rank's logits, fp32 `[n, len(weight)]`; None: a new one.
        """
        part = apply_linear(hidden_states, self.weight, out=out, out_dtype=torch.float32)
        return VocabLogits(part, self.tokens, self._group)

    def weight_slots(self) -> NamedSlots:
        yield f"{self.prefix}.weight", WeightSlot.of(self.weight[: self.tokens.size], self.tokens)
