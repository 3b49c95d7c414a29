"""The choice of experts for each token. A pure function of scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """The rule by which a model family scores and chooses experts.

    Qwen3-MoE, Qwen3-Next: softmax, no groups. DeepSeek-V2's `greedy` and `group_limited_greedy`:
    softmax, `group_score="max"`. DeepSeek-V3's `noaux_tc`: sigmoid, `group_score="top2_sum"`, and a
    correction bias.

    Raises:
        ValueError: The numbers contradict one another.
    """

    num_experts: int
    top_k: int
    """Experts for each token."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    """If true, the weights of a token are divided by their sum."""
    num_groups: int = 1
    """Groups of neighbouring experts, of equal size."""
    topk_groups: int = 1
    """Number of groups that a token may use: the best by `group_score`."""
    group_score: Literal["max", "top2_sum"] = "max"
    routed_scaling_factor: float = 1.0
    """Factor of all weights, applied last."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"a token cannot use {self.top_k} of {self.num_experts} experts")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(
                f"{self.num_experts} experts cannot be divided into {self.num_groups} equal groups"
            )
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(f"a token cannot use {self.topk_groups} of {self.num_groups} groups")
        if self.top_k > self.topk_groups * self.group_size:
            raise ValueError(
                f"{self.topk_groups} groups of {self.group_size} experts are fewer than the "
                f"{self.top_k} experts of a token"
            )
        if self.is_grouped and self.group_score == "top2_sum" and self.group_size < 2:
            raise ValueError("groups of one expert have no two best experts: group_score 'max'")

    @property
    def group_size(self) -> int:
        """Experts in a group."""
        return self.num_experts // self.num_groups

    @property
    def is_grouped(self) -> bool:
        """True if a token may use only some groups of experts."""
        return self.topk_groups < self.num_groups


def select_experts(
    logits: torch.Tensor, options: RouterOptions, correction_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token, best first; among equals the lower id comes first.

    It reads nothing back from the device, and shapes do not depend on the values.

    Args:
        logits: fp32 `[num_tokens, num_experts]`.
        correction_bias: fp32 `[num_experts]`, added to the scores for the choice, but not for the
            weights.

    Returns:
        Weights, fp32 `[num_tokens, top_k]`, and ids, int64 `[num_tokens, top_k]`.
    """
    scores = logits.sigmoid() if options.scoring == "sigmoid" else logits.softmax(dim=-1)
    ranking = scores if correction_bias is None else scores + correction_bias
    if options.is_grouped:
        ranking = _within_best_groups(ranking, options)
    ids = _best(ranking, options.top_k)
    weights = scores.gather(-1, ids)
    if options.renormalize:
        # Sigmoids can all be 0. The addition changes no other sum.
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * options.routed_scaling_factor, ids


def _within_best_groups(ranking: torch.Tensor, options: RouterOptions) -> torch.Tensor:
    """The ranking `[num_tokens, num_experts]`, -inf outside each token's best groups."""
    groups = ranking.view(-1, options.num_groups, options.group_size)
    if options.group_score == "max":
        group_scores = groups.amax(dim=-1)
    else:
        group_scores = groups.topk(2, dim=-1).values.sum(dim=-1)
    best = _best(group_scores, options.topk_groups)
    is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best, False)
    return groups.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(-2)


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the largest values, int64 `[..., count]`.

    The sort is stable; `torch.topk` does not define the order of equal values.
    """
    order = values.sort(dim=-1, descending=True, stable=True).indices
    return order.narrow(-1, 0, count)
