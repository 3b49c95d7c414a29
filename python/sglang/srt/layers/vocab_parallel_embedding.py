"""Token embeddings and the head that turns hidden states into logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.weight_slot import NamedSlots, WeightedLayer, WeightSlot


class VocabParallelEmbedding(WeightedLayer):
    """A row of `weight` for each token that this rank has, on all ranks equally many.

    Rows behind the vocabulary's end are zeros. The same class is the (untied) output head.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, placement: TensorPlacement) -> None:
        super().__init__(placement)
        self.tokens = placement.row_share(vocab_size)
        self.weight = placement.empty(-(-vocab_size // placement.tp_size), hidden_size)
        self.weight[self.tokens.size :].zero_()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 `[num_tokens]` to `[num_tokens, hidden_size]`."""
        return F.embedding(input_ids, self.weight)

    def weight_slots(self) -> NamedSlots:
        yield f"{self.prefix}.weight", WeightSlot.of(self.weight[: self.tokens.size], self.tokens)
