"""Logits of a step, split over the ranks by vocabulary."""

from __future__ import annotations

import torch

from sglang.srt.distributed.tensor_group import SingleTensorGroup, TensorGroup
from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.placement import Share


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
        if self._group.size == 1:
            return self.part.argmax(dim=-1)
        kernels = fused_kernels(self.part.device)
        found = None
        if kernels is not None:
            found = kernels.argmax_of_ranks(self.part, self.tokens, self._group)
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
