"""The choice of experts: small hard numbers, and each family's router in transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, Qwen3MoeConfig, Qwen3NextConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextTopKRouter

from sglang.srt.layers.moe.sparse_moe import RouterOptions, select_experts
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([[math.log(p) for p in probabilities]])


def choose(
    logits: torch.Tensor, bias: torch.Tensor | None = None, **options: Any
) -> tuple[list[list[float]], list[list[int]]]:
    made = RouterOptions(num_experts=logits.shape[-1], **options)
    weights, ids = select_experts(logits, made, bias)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int64
    rounded = [[round(w, 5) for w in row] for row in weights.tolist()]
    return rounded, ids.tolist()


def test_softmax_weights_come_best_first() -> None:
    logits = logits_of(0.1, 0.4, 0.2, 0.3)
    assert choose(logits, top_k=2, renormalize=False) == ([[0.4, 0.3]], [[1, 3]])
    assert choose(logits, top_k=2) == ([[0.57143, 0.42857]], [[1, 3]])
    got = choose(logits, top_k=2, renormalize=False, routed_scaling_factor=2.5)
    assert got == ([[1.0, 0.75]], [[1, 3]])


def test_of_equal_experts_the_lower_ids_come_first() -> None:
    for num_experts in (3, 64, 512):
        logits = torch.zeros(5, num_experts)
        assert (
            select_experts(logits, RouterOptions(num_experts=num_experts, top_k=3))[1].tolist()
            == [[0, 1, 2]] * 5
        )


def test_a_token_stays_within_its_best_groups() -> None:
    # Groups (0, 1), (2, 3), (4, 5): the best expert is in the last, the best pair in the middle.
    logits = logits_of(0.05, 0.1, 0.25, 0.25, 0.3, 0.05)
    grouped: dict[str, Any] = {"top_k": 2, "num_groups": 3, "topk_groups": 1, "renormalize": False}
    assert choose(logits, **grouped) == ([[0.3, 0.05]], [[4, 5]])
    assert choose(logits, **grouped, group_score="top2_sum") == ([[0.25, 0.25]], [[2, 3]])


def test_the_correction_bias_chooses_but_does_not_weigh() -> None:
    logits = torch.tensor([[0.0, math.log(3.0), -math.log(3.0)]])  # sigmoids 0.5, 0.75, 0.25
    bias = torch.tensor([0.0, -2.0, 0.5])
    got = choose(logits, bias, top_k=2, scoring="sigmoid", renormalize=False)
    assert got == ([[0.25, 0.5]], [[2, 0]])
    got = choose(logits, bias, top_k=2, scoring="sigmoid", routed_scaling_factor=3.0)
    assert got == ([[1.0, 2.0]], [[2, 0]])


def test_negative_rankings_do_not_lose_to_experts_of_other_groups() -> None:
    logits, bias = torch.zeros(1, 4), torch.tensor([-5.0, -6.0, -9.0, -9.0])
    got = choose(logits, bias, top_k=2, scoring="sigmoid", num_groups=2, group_score="top2_sum")
    assert got == ([[0.5, 0.5]], [[0, 1]])


def test_scores_that_are_all_zero_give_weights_of_zero() -> None:
    logits = torch.full((1, 4), -200.0)
    assert choose(logits, top_k=2, scoring="sigmoid") == ([[0.0, 0.0]], [[0, 1]])


def test_no_tokens_choose_no_expert() -> None:
    weights, ids = select_experts(torch.empty(0, 8), RouterOptions(num_experts=8, top_k=2))
    assert weights.shape == ids.shape == (0, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 4, "top_k": 5}, "5 of 4 experts"),
        ({"num_experts": 4, "top_k": 0}, "0 of 4 experts"),
        ({"num_experts": 6, "top_k": 1, "num_groups": 4}, "into 4 equal groups"),
        ({"num_experts": 6, "top_k": 1, "num_groups": 2, "topk_groups": 3}, "3 of 2 groups"),
        ({"num_experts": 6, "top_k": 3, "num_groups": 3}, "fewer than the 3 experts"),
        (
            {"num_experts": 4, "top_k": 1, "num_groups": 4, "group_score": "top2_sum"},
            "no two best",
        ),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouterOptions(**options)


DEEPSEEK_V2: dict[str, dict[str, Any]] = {
    "greedy": {"topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "grouped": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
}


def deepseek_v2(kind: str) -> tuple[Any, RouterOptions]:
    fields = DEEPSEEK_V2[kind]
    config = DeepseekV2Config(
        hidden_size=32,
        n_routed_experts=16,
        num_experts_per_tok=4,
        routed_scaling_factor=1.5,
        **fields,
    )
    return DeepseekV2TopkRouter(config), RouterOptions(
        num_experts=16,
        top_k=4,
        renormalize=False,
        num_groups=fields["n_group"],
        topk_groups=fields["topk_group"],
        routed_scaling_factor=1.5,
    )


def deepseek_v3(renormalize: bool) -> tuple[Any, RouterOptions]:
    config = DeepseekV3Config(
        hidden_size=32,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        norm_topk_prob=renormalize,
        routed_scaling_factor=2.5,
    )
    return DeepseekV3TopkRouter(config), RouterOptions(
        num_experts=16,
        top_k=4,
        scoring="sigmoid",
        renormalize=renormalize,
        num_groups=4,
        topk_groups=2,
        group_score="top2_sum",
        routed_scaling_factor=2.5,
    )


def qwen3(router: Any, config_class: Any, renormalize: bool) -> tuple[Any, RouterOptions]:
    config = config_class(
        hidden_size=32, num_experts=16, num_experts_per_tok=4, norm_topk_prob=renormalize
    )
    return router(config), RouterOptions(num_experts=16, top_k=4, renormalize=renormalize)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: deepseek_v2("greedy"), id="deepseek-v2-greedy"),
        pytest.param(lambda: deepseek_v2("grouped"), id="deepseek-v2-grouped"),
        pytest.param(lambda: deepseek_v3(True), id="deepseek-v3"),
        pytest.param(lambda: deepseek_v3(False), id="deepseek-v3-plain"),
        pytest.param(lambda: qwen3(Qwen3MoeTopKRouter, Qwen3MoeConfig, True), id="qwen3-moe"),
        pytest.param(lambda: qwen3(Qwen3MoeTopKRouter, Qwen3MoeConfig, False), id="qwen3-plain"),
        pytest.param(lambda: qwen3(Qwen3NextTopKRouter, Qwen3NextConfig, True), id="qwen3-next"),
    ],
)
def test_experts_and_weights_equal_transformers(
    make: Callable[[], tuple[Any, RouterOptions]],
) -> None:
    router, options = make()
    numbers = torch.Generator().manual_seed(3)
    with torch.inference_mode():
        router.weight.copy_(torch.randn(router.weight.shape, generator=numbers))
        bias = getattr(router, "e_score_correction_bias", None)
        if bias is not None:
            bias.copy_(torch.randn(bias.shape, generator=numbers))
        x = torch.randn(50, 32, generator=numbers) * 0.3
        _, want_weights, want_ids = router(x)
        weights, ids = select_experts(x @ router.weight.T, options, bias)
    order, want_order = ids.argsort(dim=-1), want_ids.argsort(dim=-1)
    assert torch.equal(ids.gather(-1, order), want_ids.gather(-1, want_order))
    torch.testing.assert_close(
        weights.gather(-1, order), want_weights.gather(-1, want_order), rtol=1e-5, atol=1e-6
    )
