"""Choices that rounding may decide either way, and runs that make them the other way.

A router chooses experts, an indexer rows or tokens: the best of some scores. Sums in another order
move scores a little, so that a chosen and a rejected candidate whose scores are near may change
places. Both computations are right, although another expert or row gives other logits. A test
therefore repeats the computation that it compares with, and exchanges such candidates. A right
computation equals one of these runs. A choice that no rounding explains equals none.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from unittest import mock

import torch

from sglang.srt.layers.attention import compressed_backend, dsa_backend, pooled_dsa_backend
from sglang.srt.layers.moe import sparse_moe
from sglang.srt.layers.moe.sparse_moe import RouterOptions

NEAR_SHARE: Final = 2e-5
"""Scores move by less than this share of the largest score among the candidates, in models that
compute in fp32: by 1.1e-5 at most of an indexer's scores in a DeepSeek-V4, by 1e-6 of experts'."""
_INDEXERS: Final = (dsa_backend, compressed_backend, pooled_dsa_backend)


class Exchange(NamedTuple):
    """A choice to make otherwise."""

    call: int
    """Number of the choosing call in the run."""
    row: int
    """Token in the call."""
    chosen: int
    other: int
    """The candidate that is chosen instead of `chosen`."""


@dataclass(slots=True)
class _Run:
    exchanges: Collection[Exchange]
    near: dict[Exchange, float] = field(default_factory=dict)
    calls: int = 0

    def choose(self, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Note near choices, and exchange some.

        Args:
            scores: `[n, candidates]`.
            ids: int64 `[n, count]`: the chosen candidates.

        Returns:
            As `ids`.
        """
        call, ids = self.calls, ids.clone()
        self.calls += 1
        if ids.shape[1] < scores.shape[1]:
            self.near |= {Exchange(call, *one): gap for one, gap in _near(scores, ids)}
        for one in self.exchanges:
            if one.call == call:
                row = ids[one.row]
                row[row == one.chosen] = one.other
        return ids


def _near(scores: torch.Tensor, ids: torch.Tensor) -> Iterator[tuple[tuple[int, int, int], float]]:
    """Row, chosen and rejected candidate, wherever these are near, and the gap between their
    scores as a share of the row's largest."""
    largest = scores.masked_fill(scores == -torch.inf, 0.0).abs().amax(dim=1, keepdim=True)
    most = 2 * NEAR_SHARE * largest
    is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, ids, True)
    least = scores.gather(1, ids).amin(dim=1, keepdim=True)
    best = scores.masked_fill(is_chosen, -torch.inf).amax(dim=1, keepdim=True)
    for row in (least - best <= most).flatten().nonzero().flatten().tolist():
        chosen = (is_chosen[row] & (scores[row] - best[row] <= most[row])).nonzero()
        others = (~is_chosen[row] & (least[row] - scores[row] <= most[row])).nonzero()
        shares = (scores[row] / largest[row].clamp(min=1e-30)).tolist()
        for one, other in itertools.product(chosen.flatten().tolist(), others.flatten().tolist()):
            yield (row, one, other), shares[one] - shares[other]


@contextmanager
def exchanged(exchanges: Collection[Exchange] = ()) -> Iterator[dict[Exchange, float]]:
    """Make these choices otherwise in all steps within. CPU only.

    Yields:
        All near choices of the run, which is filled meanwhile, with the gaps between their scores,
        as shares of the largest one. Routers with groups of experts are left out.
    """
    run = _Run(exchanges)
    select = sparse_moe.select_experts
    choose = dsa_backend.choose_tokens

    def selecting(
        logits: torch.Tensor,
        options: RouterOptions,
        correction_bias: torch.Tensor | None = None,
        ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, found = select(logits, options, correction_bias, ids)
        if ids is not None or options.is_grouped:
            return weights, found
        ranking = ranking_of(logits, options, correction_bias)
        return select(logits, options, correction_bias, run.choose(ranking, found))

    def choosing(scores: torch.Tensor, topk: int) -> torch.Tensor:
        return run.choose(scores, choose(scores, topk)).sort(dim=1).values

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(sparse_moe, "select_experts", selecting))
        for module in _INDEXERS:
            stack.enter_context(mock.patch.object(module, "choose_tokens", choosing))
        yield run.near


def ranking_of(
    logits: torch.Tensor, options: RouterOptions, bias: torch.Tensor | None
) -> torch.Tensor:
    """What experts are ranked by, before groups; arguments as of `select_experts`."""
    match options.scoring:
        case "sigmoid":
            scores = logits.sigmoid()
        case "sqrt_softplus":
            scores = torch.nn.functional.softplus(logits).sqrt()
        case _:
            scores = logits.softmax(dim=-1)
    return scores if bias is None else scores + bias
