"""Experts with quantized weights give what each expert gives in fp64, for few and many tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from rigs.models.kernel_layers import DEVICE, HALF, randn, relative_error
from rigs.models.scaled_weights import dequantized, fp4_weight, fp8_weight, int4_weight, operand
from sglang.srt.layers.activation import clamped_gate
from sglang.srt.layers.cuda_kernels import KERNELS
from sglang.srt.layers.triton_ops.arguments import (
    ClampedGate,
    ExpertBiases,
    ExpertWeights,
    ScaledWeight,
    Weight,
)
from sglang.srt.layers.triton_ops.scaled import few_experts, routed_experts
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=60, suite="base-b-test-1-gpu-large")

EXPERTS, TOP_K = 5, 3
GATE = ClampedGate(limit=1.0, alpha=1.702, shift=1.0)
Pair = tuple[ScaledWeight, ScaledWeight]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other."""
    if DEVICE == "cpu":
        for name in ("_FEATURES", "_FEATURES_OF_INT4", "_FEATURES_OF_FP4", "_FEATURES_OF_DOWN"):
            monkeypatch.setattr(few_experts, name, 32)


def pair(kind: str, *lead: int, seed: int = 0, is_wide: bool = False) -> Pair:
    """`gate_up` and `down` of experts, or of one; `is_wide`: of more features than 256."""
    if kind == "fp8 blocks":
        features = 384 if is_wide else 128
        return (
            fp8_weight(*lead, 2 * features, 128, height=128, seed=seed),
            fp8_weight(*lead, 128, features, height=128, seed=seed + 1),
        )
    if kind == "fp8 blocks of one output":
        return fp8_weight(*lead, 512, 24, group=24, seed=seed), fp8_weight(
            *lead, 24, 256, seed=seed + 1
        )
    if kind == "fp8 rows":
        features = 300 if is_wide else 20
        return (
            fp8_weight(*lead, 2 * features, 140, group=140, seed=seed),
            fp8_weight(*lead, 140, features, group=features, seed=seed + 1),
        )
    if kind == "fp4":
        features = 608 if is_wide else 32
        return (
            fp4_weight(*lead, 2 * features, 96, seed=seed),
            fp4_weight(*lead, 96, features, seed=seed + 1),
        )
    features, has_zeros = 704 if is_wide else 32, kind.endswith("zeros")
    return (
        int4_weight(*lead, 2 * features, 64, has_zeros=has_zeros, seed=seed),
        int4_weight(*lead, 64, features, has_zeros=has_zeros, seed=seed + 1),
    )


KINDS = ["fp8 blocks", "fp8 blocks of one output", "fp8 rows", "int4", "int4 with zeros", "fp4"]


def choice(tokens: int, places: int = TOP_K) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of `places`, ids of `TOP_K` of the experts."""
    numbers = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, EXPERTS, generator=numbers).topk(TOP_K, dim=-1).indices
    return torch.rand(tokens, places, generator=numbers).to(DEVICE), ids.to(DEVICE)


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    if isinstance(weight, ScaledWeight):
        return operand(x, weight) @ dequantized(weight).t()
    return x.double() @ weight.double().t()


def clamped_expert(
    x: torch.Tensor, gate_up: Weight, down: Weight, first: torch.Tensor, last: torch.Tensor
) -> torch.Tensor:
    """`expert_of` with a clamped gate and biases."""
    both = (linear(x, gate_up) + first.double()).to(x.dtype).double()
    return linear(clamped_gate(both, GATE).to(x.dtype), down) + last.double()


def expert_of(x: torch.Tensor, gate_up: Weight, down: Weight) -> torch.Tensor:
    """One expert in fp64, which rounds to 16 bits where the kernels do."""
    gate, up = linear(x, gate_up).to(x.dtype).chunk(2, dim=1)
    inner = F.silu(gate.double()).to(x.dtype).double() * up.double()
    return linear(inner.to(x.dtype), down)


def clamped_reference(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: Pair,
    biases: ExpertBiases,
) -> torch.Tensor:
    """`reference` with clamped gates and biases."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for number in range(EXPERTS):
        scales = weights.double().where(ids == number, 0.0).sum(1, keepdim=True)
        gate_up, down = (nth(weight, number) for weight in experts)
        assert biases.down is not None
        out += scales * clamped_expert(
            x, gate_up, down, biases.gate_up[number], biases.down[number]
        )
    return out


def nth(weight: ScaledWeight, place: int) -> ScaledWeight:
    zeros = None if weight.zeros is None else weight.zeros[place]
    return replace(
        weight, elements=weight.elements[place], scales=weight.scales[place], zeros=zeros
    )


def reference(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: Pair,
    shared: tuple[Weight, Weight] | None = None,
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for number in range(EXPERTS):
        scales = weights[:, :TOP_K].double().where(ids == number, 0.0).sum(1, keepdim=True)
        out += scales * expert_of(x, *(nth(weight, number) for weight in experts))
    if shared is not None:
        out += weights[:, TOP_K:].double() * expert_of(x, *shared)
    return out


def bound_of(experts: Pair) -> float:
    """An order of sums that changes the last bit of an inner feature may change its fp8 bits."""
    if DEVICE == "cuda":
        return 2e-2
    return 1e-2 if experts[0].is_fp8 else 4e-3


def check_few_tokens(tokens: int, experts: Pair, shared: Pair | None) -> None:
    x = randn(tokens, experts[0].shape[-1], seed=tokens, dtype=HALF)
    weights, ids = choice(tokens, TOP_K + (shared is not None))
    given = ExpertWeights(gate_up=experts[0], down=experts[1], shared=shared)
    got = KERNELS.run_experts(x, weights, ids.int(), given)
    assert got.dtype == HALF
    assert relative_error(got, reference(x, weights, ids, experts, shared)) < bound_of(experts)


@pytest.mark.parametrize("with_shared", [True, False])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_few_tokens_equal_the_definition(kind: str, tokens: int, with_shared: bool) -> None:
    check_few_tokens(tokens, pair(kind, EXPERTS), pair(kind, seed=7) if with_shared else None)


@pytest.mark.parametrize("kind", ["fp8 blocks", "fp8 rows", "int4", "fp4"])
def test_the_second_product_may_have_many_tiles(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product reads a row in several steps, and some tiles before others are used. The shared
    expert's tiles come last."""
    monkeypatch.setattr(few_experts, "_INPUTS", 256)
    monkeypatch.setattr(few_experts, "_PLACES_OF_FP4", 2)
    experts = pair(kind, EXPERTS, is_wide=True)
    plan = few_experts.plan_down(experts[1], TOP_K + 1)
    assert plan["BLOCK_F"] < experts[1].shape[-1] and plan["BLOCK_P"] < TOP_K
    check_few_tokens(2, experts, pair(kind, seed=7, is_wide=True))


def test_blocks_of_places_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six experts of 4-bit floats are three blocks of two; four of them are one block."""
    monkeypatch.setitem(globals(), "EXPERTS", 8)
    monkeypatch.setitem(globals(), "TOP_K", 6)
    experts = pair("fp4", EXPERTS)
    assert [few_experts.plan_down(experts[1], places)["BLOCK_P"] for places in (4, 6)] == [4, 2]
    check_few_tokens(1, experts, None)


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_shared_expert_of_another_kind_is_added(tokens: int) -> None:
    """Plain beside 4 bits, as in Kimi-K2-Thinking, and fp8 beside 4 bits."""
    experts = pair("int4", EXPERTS)
    x, (weights, ids) = randn(tokens, 64, seed=1, dtype=HALF), choice(tokens, TOP_K + 1)
    plain = randn(64, 64, seed=2, dtype=HALF) / 8, randn(64, 32, seed=3, dtype=HALF) / 8
    scaled = fp8_weight(64, 64, group=64), fp8_weight(64, 32, group=32)
    for shared in (plain, scaled):
        given = ExpertWeights(gate_up=experts[0], down=experts[1], shared=shared)
        got = KERNELS.run_experts(x, weights, ids, given)
        assert relative_error(got, reference(x, weights, ids, experts, shared)) < 2e-2


@pytest.mark.parametrize("tokens", [0, 1, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_many_tokens_equal_the_definition(kind: str, tokens: int) -> None:
    experts = pair(kind, EXPERTS)
    x = randn(tokens, experts[0].shape[-1], seed=tokens, dtype=HALF)
    weights, ids = choice(tokens, TOP_K + 1)
    got = KERNELS.run_routed_experts(x, weights, ids, *experts)
    assert got.shape == x.shape and got.dtype == HALF
    if tokens:
        assert relative_error(got, reference(x, weights, ids, experts)) < bound_of(experts)


@pytest.mark.parametrize(
    ("kind", "nth_plan"),
    [(kind, n) for kind in ("fp8 rows", "fp8 blocks") for n in range(5)]
    + [("int4", n) for n in range(4)]
    + [("fp4", n) for n in range(5)],
)
def test_every_plan_equals_the_definition(kind: str, nth_plan: int) -> None:
    """Sizes that are no multiples of the blocks, and several groups of tiles; of inputs one group,
    and three."""
    experts = pair(kind, EXPERTS, is_wide=kind == "fp8 blocks")
    plans = {
        "int4": routed_experts._INT4_PLANS,
        "fp4": routed_experts._FP4_PLANS,
    }.get(kind, routed_experts._FP8_PLANS)
    x, (weights, ids) = randn(30, experts[0].shape[-1], seed=2, dtype=HALF), choice(30)
    got = routed_experts.run_scaled_routed_experts(x, weights, ids, *experts, plans[nth_plan])
    assert relative_error(got, reference(x, weights, ids, experts)) < bound_of(experts)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kind", ["fp4", "int4", "fp8 blocks"])
def test_clamped_gates_and_biases_equal_the_definition(kind: str, tokens: int) -> None:
    """For few and many tokens."""
    experts = pair(kind, EXPERTS)
    hidden, outputs = experts[0].shape[-1], experts[0].shape[1]
    x = randn(tokens, hidden, seed=tokens, dtype=HALF)
    biases = ExpertBiases(
        randn(EXPERTS, outputs, seed=5, dtype=HALF), randn(EXPERTS, hidden, seed=6, dtype=HALF)
    )
    weights, ids = choice(tokens)
    want = clamped_reference(x, weights, ids, experts, biases)
    given = ExpertWeights(
        gate_up=experts[0], down=experts[1], shared=None, activation=GATE, biases=biases
    )
    few = KERNELS.run_experts(x, weights, ids, given)
    many = KERNELS.run_routed_experts(x, weights, ids, *experts, activation=GATE, biases=biases)
    for got in (few, many):
        assert relative_error(got, want) < bound_of(experts)


@pytest.mark.parametrize("tokens", [6, 40])
@pytest.mark.parametrize("has_gates", [False, True])
def test_a_half_tile_equals_a_whole_one(has_gates: bool, tokens: int) -> None:
    """A use may be in either, from run to run. Gates within the product change no bits either."""
    experts, (weights, ids) = pair("fp4", EXPERTS), choice(tokens)
    x = randn(tokens, 96, seed=tokens, dtype=HALF)
    rows, outputs, block = (128, 128, 64) if DEVICE == "cuda" else (16, 64, 32)
    whole = routed_experts.Plan(float("inf"), rows, outputs, block, 1, 4, 3)
    got, want = (
        routed_experts.run_scaled_routed_experts(x, weights, ids, *experts, plan, activation=GATE)
        for plan in (replace(whole, has_halves=True, has_gates=has_gates), whole)
    )
    # The interpreter's sums depend on the width of a product.
    assert torch.equal(got, want) if DEVICE == "cuda" else relative_error(got, want) < 1e-3


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kind", ["fp4", "int4", "plain"])
def test_a_shared_expert_has_the_gate_of_the_others(kind: str, tokens: int) -> None:
    """Weights of their kind are in the same products; others are multiplied by themselves."""
    experts = pair("fp4", EXPERTS)
    shared: tuple[Weight, Weight] = pair("fp4", seed=7)
    if kind == "int4":
        shared = int4_weight(64, 96), int4_weight(96, 32)
    elif kind == "plain":
        shared = randn(64, 96, seed=2, dtype=HALF) / 8, randn(96, 32, seed=3, dtype=HALF) / 8
    x, (weights, ids) = randn(tokens, 96, seed=1, dtype=HALF), choice(tokens, TOP_K + 1)
    given = ExpertWeights(gate_up=experts[0], down=experts[1], shared=shared, activation=GATE)
    routed = KERNELS.run_experts(
        x, weights[:, :TOP_K].contiguous(), ids, replace(given, shared=None)
    )
    none = (torch.zeros(size, device=DEVICE) for size in (shared[0].shape[0], 96))
    want = routed.double() + weights[:, TOP_K:].double() * clamped_expert(x, *shared, *none)
    assert relative_error(KERNELS.run_experts(x, weights, ids, given), want) < 2e-2


def test_4_bit_floats_and_integers_are_not_alike() -> None:
    """Their weights have the same sizes."""
    experts, shared = pair("fp4", EXPERTS), (int4_weight(64, 96), int4_weight(96, 32))
    x, (weights, ids) = randn(2, 96, seed=1, dtype=HALF), choice(2, TOP_K + 1)
    given = ExpertWeights(gate_up=experts[0], down=experts[1], shared=shared)
    got = KERNELS.run_experts(x, weights, ids, given)
    assert relative_error(got, reference(x, weights, ids, experts, shared)) < 2e-2


@pytest.mark.parametrize("kind", ["fp8 blocks", "int4 with zeros"])
def test_experts_without_tokens_are_not_read(kind: str) -> None:
    experts = pair(kind, EXPERTS)
    for weight in experts:
        weight.scales[:2] = torch.nan
    weights, ids = choice(2)
    ids = ids % 3 + 2
    x = randn(2, experts[0].shape[-1], seed=3, dtype=HALF)
    given = ExpertWeights(gate_up=experts[0], down=experts[1], shared=None)
    assert KERNELS.run_experts(x, weights, ids, given).isfinite().all()
    assert KERNELS.run_routed_experts(x, weights, ids, *experts).isfinite().all()


@pytest.mark.skipif(DEVICE != "cuda", reason="too large for the interpreter")
@pytest.mark.parametrize("tokens", [1, 8, 300])
@pytest.mark.parametrize("kind", ["fp8", "int4", "fp4"])
def test_shapes_of_models_give_the_same_bits_in_each_run(kind: str, tokens: int) -> None:
    """Features of DeepSeek-V3.2's and Kimi-K2-Thinking's experts."""
    if kind == "fp8":
        experts = (
            fp8_weight(EXPERTS, 4096, 1024, height=128),
            fp8_weight(EXPERTS, 1024, 2048, height=128),
        )
    else:
        make = int4_weight if kind == "int4" else fp4_weight
        experts = make(EXPERTS, 4096, 1024), make(EXPERTS, 1024, 2048)
    x, (weights, ids) = randn(tokens, 1024, seed=4, dtype=HALF), choice(tokens)
    given = ExpertWeights(gate_up=experts[0], down=experts[1], shared=None)
    want = reference(x, weights, ids, experts)
    many = KERNELS.run_routed_experts(x, weights, ids, *experts)
    assert relative_error(many, want) < 2e-2
    for _ in range(5):
        assert torch.equal(KERNELS.run_routed_experts(x, weights, ids, *experts), many)
    if tokens <= 8:
        few = KERNELS.run_experts(x, weights, ids, given)
        assert relative_error(few, want) < 2e-2
        assert torch.equal(KERNELS.run_experts(x, weights, ids, given), few)


@pytest.mark.skipif(DEVICE != "cuda", reason="too large for the interpreter")
@pytest.mark.parametrize("tokens", [1, 8, 300])
@pytest.mark.parametrize("features", [2880, 736])
def test_the_shape_of_gpt_oss_gives_the_same_bits_in_each_run(features: int, tokens: int) -> None:
    """A rank of four has 736 features. Neither is a multiple of a program's inputs or outputs."""
    experts = (
        fp4_weight(EXPERTS, 2 * features, 2880),
        fp4_weight(EXPERTS, 2880, features, seed=1),
    )
    x, (weights, ids) = randn(tokens, 2880, seed=4, dtype=HALF), choice(tokens)
    biases = ExpertBiases(
        randn(EXPERTS, 2 * features, seed=5, dtype=HALF), randn(EXPERTS, 2880, seed=6, dtype=HALF)
    )
    want = clamped_reference(x, weights, ids, experts, biases)
    many = KERNELS.run_routed_experts(x, weights, ids, *experts, activation=GATE, biases=biases)
    assert relative_error(many, want) < 2e-2
    for _ in range(5):
        again = KERNELS.run_routed_experts(
            x, weights, ids, *experts, activation=GATE, biases=biases
        )
        assert torch.equal(again, many)
    if tokens <= 8:
        given = ExpertWeights(
            gate_up=experts[0], down=experts[1], shared=None, activation=GATE, biases=biases
        )
        few = KERNELS.run_experts(x, weights, ids, given)
        assert relative_error(few, want) < 2e-2
        assert torch.equal(KERNELS.run_experts(x, weights, ids, given), few)


@pytest.mark.parametrize("tokens", [0, 1, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_with_whole_experts_add_up(kind: str, tokens: int) -> None:
    experts = pair(kind, EXPERTS)
    x = randn(tokens, experts[0].shape[-1], seed=tokens, dtype=HALF)
    weights, ids = choice(tokens)
    total = torch.zeros_like(x)
    for begin, end in ((0, 2), (2, EXPERTS)):
        gate_up, down = (matrices(one, begin, end) for one in experts)
        local = (ids - begin).where((ids >= begin) & (ids < end), end - begin)
        got = KERNELS.run_routed_experts(x, weights, local, gate_up, down, num_experts=EXPERTS)
        assert got.isfinite().all()
        total += got
    if tokens:
        assert relative_error(total, reference(x, weights, ids, experts)) < bound_of(experts)


def matrices(weight: ScaledWeight, begin: int, end: int) -> ScaledWeight:
    zeros = None if weight.zeros is None else weight.zeros[begin:end]
    return ScaledWeight(
        elements=weight.elements[begin:end], scales=weight.scales[begin:end], zeros=zeros
    )
