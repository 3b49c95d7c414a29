"""Margins of choices, and decoding against a prefill where choices are decided."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rigs.layers.choice_margins import (
    NEAR_SCORE,
    TextChoices,
    decided_prompts,
    decoded,
    expert_margins,
    prefilled,
)
from rigs.models.tiny_models import StepDriver
from sglang.srt.layers.moe.sparse_moe import RouterOptions, select_experts
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

FP8 = "fp8_e4m3"
TOP2 = RouterOptions(
    num_experts=8, top_k=3, scoring="sigmoid", num_groups=4, topk_groups=2, group_score="top2_sum"
)
RULES = {
    "softmax": RouterOptions(num_experts=8, top_k=3),
    "best of groups": RouterOptions(num_experts=8, top_k=3, num_groups=4, topk_groups=2),
    "two best of groups": TOP2,
    "all": RouterOptions(num_experts=8, top_k=8),
}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("deepseek_v3", eos_token_id=None)


def chosen(logits: torch.Tensor, options: RouterOptions, bias: torch.Tensor) -> torch.Tensor:
    return select_experts(logits, options, bias)[1].sort(dim=-1).values


@pytest.mark.parametrize("name", RULES)
def test_a_choice_stays_if_scores_move_by_less_than_its_margin(name: str) -> None:
    generator, options = torch.Generator().manual_seed(1), RULES[name]
    logits, bias = (torch.randn(n, 8, generator=generator) for n in (200, 1))
    margins = expert_margins(logits, options, bias[0])[:, None]
    if name == "all":
        assert margins.isinf().all()
        return
    want = chosen(logits, options, bias)
    moved = torch.zeros(200, dtype=torch.bool)
    for signs in itertools.product((-1.0, 1.0), repeat=8):
        moves = torch.tensor(signs) * margins
        assert torch.equal(chosen(logits, options, bias + 0.99 * moves), want)
        moved |= (chosen(logits, options, bias + 1.01 * moves) != want).any(dim=-1)
    assert moved.float().mean() > 0.9, "a margin is no smaller than it must be"


def test_the_margin_counts_groups_and_experts() -> None:
    """Sums of the two best: 1.5, 1.3, 1.0 and 0.2. The experts of the first two: 0.8, 0.7, 0.7."""
    scores = torch.tensor([[0.8, 0.7, 0.7, 0.6, 0.5, 0.5, 0.1, 0.1]])
    assert expert_margins(scores.logit(), TOP2) == pytest.approx(0.05)
    scores[0, 3:6] = torch.tensor([0.4, 0.5, 0.5])
    assert expert_margins(scores.logit(), TOP2) == pytest.approx(0.025)


def test_decoding_is_a_prefill_of_the_same_tokens(model: Path) -> None:
    """Rows are in fp8, and choices are decided. A near choice might pick another expert."""
    tokens = next(decided_prompts(model, 64, 4, kv_cache_dtype=FP8))
    driver = StepDriver(model, kv_cache_dtype=FP8)
    whole, single = prefilled(driver, 0, tokens), decoded(driver, 1, tokens)
    assert torch.equal(single.experts, whole.experts)
    torch.testing.assert_close(single.logits, whole.logits, rtol=0, atol=0.05)


def test_a_text_with_a_near_choice_is_not_decided() -> None:
    logits, experts = torch.tensor([[0.0, 1.0], [1.0, 1.006]]), torch.zeros(2, 1, 1)
    far = torch.full((2,), 2 * NEAR_SCORE)
    assert not TextChoices(logits, experts, far).is_decided(1)
    assert not TextChoices(logits, experts, far).is_decided(2)
    logits[1, 1] = 1.01
    assert TextChoices(logits, experts, far).is_decided(2)
    assert not TextChoices(logits, experts, torch.tensor([0.1, NEAR_SCORE])).is_decided(2)
