"""Tokens that sparse attention reads: scores by their definition, and ties."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.layers.attention import dsa_backend
from sglang.srt.layers.attention.dsa_backend import choose_tokens, index_scores
from sglang.srt.layers.forward_batch_info import IndexQuery
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

INF = float("inf")


@pytest.mark.parametrize("score_bytes", [1, 200, 1 << 20])
def test_scores_are_sums_over_heads_of_positive_products(
    monkeypatch: pytest.MonkeyPatch, score_bytes: int
) -> None:
    monkeypatch.setattr(dsa_backend, "SCORE_BYTES", score_bytes)
    generator = torch.Generator().manual_seed(1)
    q, keys = torch.randn(3, 4, 8, generator=generator), torch.randn(9, 8, generator=generator)
    weights = torch.randn(3, 4, generator=generator)
    positions = torch.tensor([4, 5, 8])
    got = index_scores(IndexQuery(q, weights, 2), keys, positions=positions)
    for token, position in enumerate(positions.tolist()):
        for place in range(9):
            want = (weights[token] * (q[token] @ keys[place]).clamp(min=0)).sum()
            if place > position:
                want = torch.tensor(-INF)
            torch.testing.assert_close(got[token, place], want)


@pytest.mark.parametrize(
    ("scores", "chosen"),
    [
        ([3.0, 1.0, 2.0, 5.0], [0, 2, 3]),
        ([0.0, 0.0, 0.0, 0.0], [0, 1, 2]),
        ([0.0, -1.0, 0.0, 2.0], [0, 2, 3]),
        # The first of the equal ones; a zero has no sign.
        ([0.0, 1.0, -0.0, 0.0], [0, 1, 2]),
        ([-2.0, -0.0, 0.0, 1.0], [1, 2, 3]),
        ([1.0, 1.0, 1.0, -INF], [0, 1, 2]),
        ([5.0, 1.0, 1.0, 1.0], [0, 1, 2]),
    ],
)
def test_the_best_are_chosen_and_of_equal_ones_the_first(
    scores: list[float], chosen: list[int]
) -> None:
    assert choose_tokens(torch.tensor([scores]), 3).tolist() == [chosen]


def test_the_choice_is_that_of_a_stable_sort() -> None:
    generator = torch.Generator().manual_seed(2)
    scores = torch.randint(-3, 4, (50, 40), generator=generator).float()
    for topk in (1, 7, 39, 40):
        order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
        assert torch.equal(choose_tokens(scores, topk), order.sort(dim=-1).values)
