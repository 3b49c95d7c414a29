"""Token embeddings, the head that turns hidden states into logits, and the logits themselves, which
are split over the ranks by vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang.srt.distributed.tensor_group import SingleTensorGroup, TensorGroup
from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.linear import apply_linear
from sglang.srt.layers.placement import (
    NamedSlots,
    Share,
    TensorPlacement,
    WeightedLayer,
    WeightSlot,
)


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
            rows = kernels.look_up_share(
                input_ids, self.weight, self.tokens.begin, self.tokens.size
            )
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


class VocabLogits:
    """Logits that are gathered from the ranks only when they are all needed. Greedy rows need just
    the greatest.

    All ranks make the same calls in the same order, and get the same bits. Only the thread that
    runs the model uses it.

    Attributes:
        part: fp32 `[n, width]`, of the same width on all ranks: this rank's tokens, then garbage.
        tokens: This rank's tokens; `total` is the vocabulary's size.
    """

    def __init__(self, part: torch.Tensor, tokens: Share, group: TensorGroup) -> None:
        self.part = part
        self.tokens = tokens
        self._group = group
        self._whole: torch.Tensor | None = None

    @classmethod
    def of(cls, whole: torch.Tensor) -> VocabLogits:
        """Logits of a single rank: fp32 `[n, vocab_size]`."""
        size = whole.shape[-1]
        return cls(whole, Share(0, size, size), SingleTensorGroup())

    def first(self, count: int) -> VocabLogits:
        """Logits of the first `count` rows."""
        return VocabLogits(self.part[:count], self.tokens, self._group)

    def whole(self) -> torch.Tensor:
        """All logits, fp32 `[n, vocab_size]`, read-only. The first call gathers them."""
        if self._group.size == 1:
            return self.part
        if self._whole is None:
            parts = self._group.all_gather(self.part)
            width, total = self.part.shape[1], self.tokens.total
            self._whole = self.part.new_empty((len(self.part), total))
            # `parts` is ranks by rows, so each number is moved once.
            for begin, part in zip(range(0, total, width), parts, strict=False):
                target = self._whole[:, begin : begin + width]
                target.copy_(part[:, : target.shape[1]])
        return self._whole

    def argmax(self) -> torch.Tensor:
        """int64 `[n]`: the token with each row's greatest logit, like `whole().argmax(-1)`: the
        first of equal ones; NaN is greater than all numbers."""
        kernels = fused_kernels(self.part.device)
        if self._group.size == 1:
            return self.part.argmax(dim=-1) if kernels is None else kernels.argmax(self.part)
        found = None
        if kernels is not None:
            found = kernels.argmax_of_ranks(
                self.part, self.tokens.begin, self.tokens.size, self._group
            )
        return self._argmax_of_gathered() if found is None else found

    def _argmax_of_gathered(self) -> torch.Tensor:
        tokens = self.tokens
        # Both are exact in fp64. A rank without tokens, which is never the first, keeps -inf.
        best = self.part.new_full((2, len(self.part)), float("-inf"), dtype=torch.float64)
        if tokens.size:
            values, places = self.part[:, : tokens.size].max(dim=-1)
            best[0], best[1] = values, places + tokens.begin
        values, places = self._group.all_gather(best).unbind(1)
        rank = values.argmax(dim=0, keepdim=True)
        return places.gather(0, rank).squeeze(0).long()
