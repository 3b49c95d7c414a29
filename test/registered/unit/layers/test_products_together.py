"""Products of one token that share a launch give what they give one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rigs.models.kernel_layers import DEVICE, HALF, randn, relative_error
from rigs.models.scaled_weights import fp4_weight, fp8_weight, int4_weight
from sglang.srt.layers import linear
from sglang.srt.layers.cuda_kernels import KERNELS
from sglang.srt.layers.linear import MergedColumnParallelLinear, ProjectionsByFormat
from sglang.srt.layers.moe.sparse_moe import (
    RouterOptions,
    SharedExpertOptions,
    SparseMoeBlock,
    SparseMoeOptions,
)
from sglang.srt.layers.placement import Share, TensorPlacement
from sglang.srt.layers.triton_ops.arguments import (
    ClampedGate,
    ExpertActivation,
    ExpertBiases,
    ExpertChoice,
    ExpertWeights,
    ScaledWeight,
    Weight,
)
from sglang.srt.layers.triton_ops.scaled import few_experts
from sglang.srt.layers.triton_ops.scaled.gemv import (
    PlainProduct,
    scaled_gated_gemv,
    scaled_gemv,
)
from sglang.srt.layers.weight_format import WeightFormat, WeightFormats
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=20, suite="base-b-test-1-gpu-large")

INPUTS, INNER, EXPERTS, TOP_K = 256, 128, 16, 3
GATE = ClampedGate(limit=1.0)
KINDS: dict[str, Callable[..., ScaledWeight]] = {
    "fp8": lambda *shape: fp8_weight(*shape, height=32),
    "fp8 rows": lambda *shape: fp8_weight(*shape, group=shape[-1]),
    "int4": int4_weight,
    "fp4": fp4_weight,
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other."""
    if DEVICE == "cpu":
        for name in ("_FEATURES_OF_FP4", "_FEATURES_OF_DOWN"):
            monkeypatch.setattr(few_experts, name, 32)


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    """The interpreter adds in the same order; on a GPU a launch's warps decide the order."""
    assert got.dtype == want.dtype
    assert torch.equal(got, want) if DEVICE == "cpu" else relative_error(got, want) < 4e-3


@pytest.mark.parametrize("outputs", [8, 24])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("activation", [None, "silu", GATE])
@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_product_beside_one_with_scales_changes_neither(
    kind: str, activation: ExpertActivation | None, dtype: torch.dtype, outputs: int
) -> None:
    """The last program of both products writes, too."""
    weight, plain = KINDS[kind](64, INPUTS), randn(outputs, INPUTS, seed=2, dtype=dtype)
    x, rows = randn(1, INPUTS, seed=1, dtype=HALF), 64 if activation is None else 32
    plan = KERNELS.plan_gemv(outputs, INPUTS)
    assert plan is not None
    want, want_plain = x.new_empty(1, rows), torch.empty(1, outputs, dtype=dtype, device=DEVICE)
    KERNELS.gemv(x, plain, None, want_plain, plan)
    got, got_plain = torch.full_like(want, torch.nan), torch.full_like(want_plain, torch.nan)
    beside = PlainProduct(plain, got_plain)
    if activation is None:
        scaled_gemv(x, weight, None, want)
        scaled_gemv(x, weight, None, got, beside=beside)
    else:
        scaled_gated_gemv(x, weight, want, activation=activation)
        scaled_gated_gemv(x, weight, got, activation=activation, beside=beside)
    check(got, want)
    check(got_plain, want_plain)


def test_products_of_two_formats_share_a_launch_of_one_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In either order; outputs keep theirs."""
    quantized = WeightFormat(why_dequantized="the test sets the weight")
    formats = WeightFormats(of=lambda name: quantized if "scaled" in name else None)
    sizes = {"plain": 16, "scaled": 32, "plain_too": 8}
    layer = ProjectionsByFormat(
        INPUTS,
        [[(name, Share(0, size, size))] for name, size in sizes.items()],
        placement=TensorPlacement(dtype=HALF, device=DEVICE, formats=formats),
    )
    of_plain, of_scaled = layer._products
    plain, weight = of_plain.weight, KINDS["fp8"](32, INPUTS)
    assert isinstance(plain, torch.Tensor)
    plain.copy_(randn(24, INPUTS, seed=2, dtype=HALF))
    del of_scaled.weight
    of_scaled.weight = weight
    x, together = randn(2, INPUTS, seed=1, dtype=HALF), KERNELS.multiply_together
    unread: Any = None
    assert together(x, unread) is None, "several tokens: it looks at no weight"
    others_of: list[list[Weight]] = [[plain], [weight], [plain, weight] * 2, [plain[:12], weight]]
    for others in others_of:
        assert together(x[:1], others) is None
    found = together(x[:1], [weight, plain])
    assert found is not None
    monkeypatch.setattr(linear, "fused_kernels", lambda device: KERNELS)
    want = [of_plain.forward(x[:1]), of_scaled.forward(x[:1])]
    check(found[1], want[0])
    check(found[0], want[1])
    monkeypatch.setattr(MergedColumnParallelLinear, "forward", None)
    first, second, third = layer.forward(x[:1])
    check(torch.cat([first, third], dim=1), want[0])
    check(second, want[1])


def choice_of(**changes: Any) -> ExpertChoice:
    options: dict[str, Any] = {
        "top_k": TOP_K, "scoring": "sqrt_softplus", "renormalize": True, "factor": 1.5, "groups": 1,
        "top_groups": 1, "two_of_group": False, "correction_bias": randn(EXPERTS, seed=3) / 4,
        "has_shared": True, "shared_gate": None,
    }  # fmt: skip
    return ExpertChoice(**options | changes)


def experts_of(shared: tuple[Any, Any] | None, **changes: Any) -> ExpertWeights:
    return ExpertWeights(
        gate_up=fp4_weight(EXPERTS, 2 * INNER, INPUTS, seed=5),
        down=fp4_weight(EXPERTS, INPUTS, INNER, seed=6),
        shared=shared,
        activation=GATE,
        **changes,
    )


def scaled(kind: str) -> tuple[ScaledWeight, ScaledWeight]:
    return KINDS[kind](2 * INNER, INPUTS), KINDS[kind](INPUTS, INNER)


TABLE = torch.rand(9, EXPERTS, generator=torch.Generator().manual_seed(1)).argsort(1)
CHOICES: dict[str, dict[str, Any]] = {
    "by scores": {},
    "by token": {"correction_bias": None, "table": TABLE[:, :TOP_K].contiguous().to(DEVICE)},
    "by logits": {"scoring": "softmax", "correction_bias": None},
    "in groups": {"scoring": "sigmoid", "groups": 4, "top_groups": 2, "two_of_group": True},
}


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("kind", ["fp8", "fp8 rows", "int4"])
@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_beside_a_shared_expert_changes_neither(
    name: str, kind: str, dtype: torch.dtype
) -> None:
    choice, experts = choice_of(**CHOICES[name]), experts_of(scaled(kind))
    x, router = randn(1, INPUTS, seed=1, dtype=HALF), randn(EXPERTS, INPUTS, seed=2, dtype=dtype)
    tokens = torch.tensor([7], device=DEVICE)
    found = KERNELS.choose_beside_shared(x, router, choice, experts, tokens)
    assert found is not None
    weights, ids, part = found
    logits, plan = torch.empty(1, EXPERTS, dtype=dtype, device=DEVICE), KERNELS.plan_gemv(16, 256)
    assert plan is not None
    KERNELS.gemv(x, router, None, logits, plan)
    want_weights, want_ids = KERNELS.choose_experts(logits, choice, x, tokens)
    assert torch.equal(ids, want_ids)
    assert choice.table is None or torch.equal(ids, choice.table[tokens].int())
    check(weights, want_weights)
    out = KERNELS.run_experts(x, weights, ids, experts, part)
    check(out, KERNELS.run_experts(x, want_weights, want_ids, experts))
    none = KERNELS.run_experts(x, weights, ids, experts, torch.zeros_like(part))
    assert relative_error(out, none) > 0.05, "the shared expert matters"


def test_only_one_token_and_shared_weights_of_another_kind_are_taken() -> None:
    choice, experts = choice_of(), experts_of(scaled("fp8"))
    x, router = randn(2, INPUTS, seed=1, dtype=HALF), randn(EXPERTS, INPUTS, seed=2, dtype=HALF)
    plain = randn(2 * INNER, INPUTS, seed=4, dtype=HALF), randn(INPUTS, INNER, seed=4, dtype=HALF)
    choose, one = KERNELS.choose_beside_shared, x[:1]
    assert choose(one, router, choice, experts) is not None
    assert choose(x, router, choice, experts) is None
    assert choose(one, router[:12], choice, experts) is None, "no plan"
    assert choose(one, router, replace(choice, shared_gate=x[:1]), experts) is None
    assert choose(one, router, choice, experts_of(None)) is None
    assert choose(one, router, choice, experts_of(plain)) is None
    assert choose(one, router, choice, experts_of(scaled("fp4"))) is None, "in the others' products"
    biases = ExpertBiases(randn(EXPERTS, 2 * INNER, seed=7, dtype=HALF), None)
    assert choose(one, router, choice, experts_of(scaled("fp4"), biases=biases)) is not None


def test_a_block_of_one_token_takes_the_launches_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output is that of a block that a bias, of zeros, keeps from it."""
    options = SparseMoeOptions(
        hidden_size=INPUTS,
        intermediate_size=INNER,
        router=RouterOptions(num_experts=EXPERTS, top_k=TOP_K, scoring="sqrt_softplus"),
        shared=SharedExpertOptions(intermediate_size=INNER),
        activation=GATE,
    )
    block = SparseMoeBlock(options, TensorPlacement(dtype=HALF, device=DEVICE))
    block._kernels, block._few = KERNELS, experts_of(scaled("fp8"))
    block.gate.weight.copy_(randn(EXPERTS, INPUTS, seed=2, dtype=HALF))
    products: list[int] = []
    multiply = type(block.gate).logits

    def logits(self: Any, x: torch.Tensor) -> torch.Tensor:
        products.append(len(x))
        return multiply(self, x)

    monkeypatch.setattr(type(block.gate), "logits", logits)
    outs = []
    for bias in (None, torch.zeros(EXPERTS, dtype=HALF, device=DEVICE)):
        block.gate.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
        x = randn(1, INPUTS, seed=1, dtype=HALF)
        out, _ = block.forward(x, torch.zeros_like(x))
        assert isinstance(out, torch.Tensor)
        outs.append(out)
    assert products == [1], "only the second one's router has a launch of its own"
    check(*outs)
