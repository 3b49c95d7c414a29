"""Routed experts that ranks share in other ways than they share the other layers: with tokens of
other DP groups, or some experts whole on each rank."""

from __future__ import annotations

from typing import Any, Final

import torch

from sglang.srt.layers.moe.experts import RoutedExperts
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.token_exchange import exchange_bytes

_MOST_TOKENS: Final = 8192
"""Tokens of all groups that are computed at a time."""


class DistributedExperts(RoutedExperts):
    """`RoutedExperts` of `TensorPlacement.experts`. The result is for the tokens of this rank's DP
    group, and a partial sum over the ranks of that group.

    Attributes:
        is_last: True in the model's last layer, which may compute fewer tokens than the others.
    """

    is_last = False

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        placement: TensorPlacement,
        **more: Any,
    ) -> None:
        """See `RoutedExperts`. Raises ValueError: the ranks do not divide the experts."""
        super().__init__(num_experts, hidden_size, intermediate_size, placement=placement, **more)
        assert placement.experts is not None, "else it is a RoutedExperts"
        self._exchange = placement.experts.exchange
        self._dtype, self._device = placement.dtype, placement.device
        self._places: torch.Tensor | None = None
        """int32 `[num_experts]`: an expert's place among this rank's, `own.size` for others; None:
        this rank has features of all."""
        if self.own.size < num_experts:
            everyone = torch.arange(num_experts, dtype=torch.int32, device=placement.device)
            is_own = (everyone >= self.own.begin) & (everyone < self.own.end)
            self._places = (everyone - self.own.begin).where(is_own, self.own.size)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """See `RoutedExperts.forward`; `ids` count from the first expert of all ranks."""
        exchange, run = self._exchange, super().forward
        if exchange is None:
            return run(x, weights, self._own_ids(ids))
        sent = exchange.dispatch(x, weights, ids, is_last=self.is_last)
        all_tokens = sent.x, sent.weights, self._own_ids(sent.ids)
        if len(sent.x) <= _MOST_TOKENS:
            out = run(*all_tokens)
        else:
            # The results of all uses of experts are in memory at once.
            out = torch.empty_like(sent.x)
            parts = (torch.split(one, _MOST_TOKENS) for one in (out, *all_tokens))
            for place, *part in zip(*parts, strict=True):
                place.copy_(run(*part))
            del place, part
        del sent, all_tokens  # Their memory serves the exchange, see `exchange_bytes`.
        return exchange.combine(out, len(x), is_last=self.is_last)

    def exchange_bytes(self, top_k: int) -> int:
        """Most bytes that this layer's exchange takes at once for each token of a group's step; 0:
        it exchanges nothing."""
        if self._exchange is None:
            return 0
        size = self._exchange.group.size
        return exchange_bytes(size, self._hidden.size, top_k, self._dtype)

    def run_idle(self, top_k: int) -> None:
        """Compute this rank's part for the tokens of other DP groups; this group has none."""
        x = torch.empty((0, self._hidden.size), dtype=self._dtype, device=self._device)
        weights = torch.empty((0, top_k), dtype=torch.float32, device=self._device)
        self.forward(x, weights, weights.int())

    def _own_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return ids if self._places is None else self._places[ids]
