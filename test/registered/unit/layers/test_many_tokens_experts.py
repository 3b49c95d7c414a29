"""Kernels of routed experts for many tokens give what the CPU gives expert by expert."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rigs.models.triton_device import triton_device
from sglang.srt.layers.activation import clamped_gate
from sglang.srt.layers.moe.experts import RoutedExperts
from sglang.srt.layers.placement import TensorPlacement
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=60, suite="base-b-test-1-gpu-large")

DEVICE = triton_device()
# The interpreter's bf16 is no real one.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16

from sglang.srt.layers.cuda_kernels import KERNELS  # noqa: E402
from sglang.srt.layers.triton_ops import expert_order, routed_experts  # noqa: E402
from sglang.srt.layers.triton_ops.arguments import (  # noqa: E402
    ClampedGate,
    ExpertActivation,
    ExpertWeights,
)
from sglang.srt.layers.triton_ops.expert_order import ExpertTiles, order_by_expert  # noqa: E402

Choice = tuple[torch.Tensor, torch.Tensor]


def experts(
    dtype: torch.dtype,
    count: int,
    hidden: int,
    size: int,
    *,
    activation: ExpertActivation = "silu",
    has_bias: bool = False,
) -> RoutedExperts:
    numbers = torch.Generator().manual_seed(3)
    layer = RoutedExperts(
        count,
        hidden,
        size,
        placement=TensorPlacement(dtype=dtype, device=DEVICE),
        activation=activation,
        has_bias=has_bias,
    )
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=numbers) * 0.2)
    return layer


def choice(num_tokens: int, count: int, top_k: int, used: int | None = None) -> Choice:
    """Weights and ids of tokens that use the last `used` experts; None: any."""
    numbers = torch.Generator().manual_seed(num_tokens)
    used = used or count
    weights, ids = torch.rand(num_tokens, used, generator=numbers).topk(top_k, dim=-1)
    return weights.to(DEVICE), (ids + count - used).to(DEVICE)


def rows(num_tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, hidden, generator=numbers).to(DEVICE, dtype)


def run(layer: RoutedExperts, x: torch.Tensor, chosen: Choice) -> torch.Tensor:
    return KERNELS.run_routed_experts(
        x, *chosen, layer.gate_up, layer.down, activation=layer.activation, biases=layer.biases
    )


def assert_near(got: torch.Tensor, layer: RoutedExperts, x: torch.Tensor, chosen: Choice) -> None:
    """Near what the CPU computes in fp32."""
    exact = RoutedExperts(
        layer.num_experts, x.shape[1], layer.features.size,
        placement=TensorPlacement(dtype=torch.float32, device="cpu"), activation=layer.activation,
        has_bias=layer.has_bias,
    )  # fmt: skip
    for own, given in zip(exact.parameters(), layer.parameters(), strict=True):
        own.copy_(given)
    want = exact.forward(x.cpu().float(), chosen[0].cpu(), chosen[1].cpu())
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[x.dtype]
    assert got.dtype == x.dtype
    assert (got.cpu().float() - want).norm() <= bound * want.norm()


def tile_rows_of(tiles: ExpertTiles) -> list[tuple[int, list[int]]]:
    """Expert and uses of each tile."""
    table: list[list[int]] = tiles.table[: int(tiles.count)].tolist()
    order: list[int] = tiles.order.tolist()
    return [(expert, order[begin : begin + count]) for expert, begin, count in table]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "count", "top_k", "used"),
    [(1, 5, 1, None), (3, 24, 5, None), (64, 24, 3, None), (500, 7, 3, 4), (40, 3, 1, 1)],
)
def test_each_use_is_in_one_tile_of_its_expert(
    num_tokens: int, count: int, top_k: int, used: int | None, few: bool, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(expert_order, "_FEW_USES", 10_000 if few else 0)
    _, ids = choice(num_tokens, count, top_k, used)
    tiles = order_by_expert(ids.to(dtype), count, 16)
    found = tile_rows_of(tiles)
    expert_of: list[int] = ids.flatten().tolist()
    assert sorted(use for _, uses in found for use in uses) == list(range(num_tokens * top_k))
    assert all(expert_of[use] == expert for expert, uses in found for use in uses)
    assert all(1 <= len(uses) <= 16 for _, uses in found)
    assert found == sorted(found, key=lambda tile: tile[0])
    full = sum(-(-expert_of.count(expert) // 16) for expert in set(expert_of))
    assert len(found) == full <= tiles.bound


@pytest.mark.parametrize(
    ("dtype", "hidden", "size", "num_tokens"),
    [
        *((HALF, 64, 48, num_tokens) for num_tokens in (0, 1, 3, 64, 700)),
        *((HALF, 100, 60, num_tokens) for num_tokens in (1, 64)),
        *((torch.float32, 50, 36, num_tokens) for num_tokens in (1, 64)),
    ],
)
def test_the_sum_is_that_of_the_cpu(
    dtype: torch.dtype, hidden: int, size: int, num_tokens: int
) -> None:
    layer, x = experts(dtype, 12, hidden, size), rows(num_tokens, hidden, dtype)
    chosen = choice(num_tokens, 12, 3)
    assert_near(run(layer, x, chosen), layer, x, chosen)


GATE = ClampedGate(limit=1.0, alpha=1.702, shift=1.0)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "hidden", "size", "num_tokens"),
    [(HALF, 96, 160, 10), (HALF, 100, 60, 20), (torch.float32, 50, 36, 20)],
)
def test_experts_with_clamped_gates(
    dtype: torch.dtype, hidden: int, size: int, num_tokens: int, has_bias: bool
) -> None:
    """Most gates and ups exceed the limit."""
    layer = experts(dtype, 12, hidden, size, activation=GATE, has_bias=has_bias)
    x, chosen = rows(num_tokens, hidden, dtype), choice(num_tokens, 12, 3)
    assert_near(run(layer, x, chosen), layer, x, chosen)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_few_tokens_of_clamped_gates(num_tokens: int, has_bias: bool) -> None:
    layer = experts(HALF, 12, 96, 160, activation=GATE, has_bias=has_bias)
    x, chosen = rows(num_tokens, 96, HALF), choice(num_tokens, 12, 3)
    given = ExpertWeights(
        gate_up=layer.gate_up, down=layer.down, shared=None,
        activation=GATE, biases=layer.biases,
    )  # fmt: skip
    got = KERNELS.run_experts(x, chosen[0].contiguous(), chosen[1].contiguous(), given)
    assert_near(got, layer, x, chosen)


def test_a_rank_without_the_last_bias_adds_none() -> None:
    layer = experts(HALF, 12, 64, 32, activation=GATE, has_bias=True)
    x, chosen = rows(3, 64, HALF), choice(3, 12, 3)
    biases = layer.biases
    assert biases is not None and biases.down is not None
    sums = [
        (
            KERNELS.run_routed_experts(
                x, *chosen, layer.gate_up, layer.down, activation=GATE, biases=own
            ),
            KERNELS.run_experts(
                x, *chosen,
                ExpertWeights(gate_up=layer.gate_up, down=layer.down, shared=None,
                              activation=GATE, biases=own),
            ),
        )
        for own in (biases, biases._replace(down=None))
    ]  # fmt: skip
    added = (biases.down[chosen[1]].float() * chosen[0].unsqueeze(-1)).sum(1)
    for whole, without in zip(*sums, strict=True):
        torch.testing.assert_close(whole.float() - without.float(), added, rtol=0, atol=3e-2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_clamped_gate_keeps_nan(value: float) -> None:
    gate_up = torch.tensor([[value, 1.0, 2.0, value]], device=DEVICE, dtype=HALF)
    got = KERNELS.silu_and_mul(gate_up, GATE)
    torch.testing.assert_close(got.cpu(), clamped_gate(gate_up.cpu(), GATE), equal_nan=True)
    assert got.isnan().all() == (value != value)


@pytest.mark.parametrize(
    ("dtype", "hidden", "size", "num_tokens"),
    [(HALF, 64, 48, 1), (HALF, 100, 60, 64), (HALF, 296, 152, 30), (torch.float32, 50, 36, 64)],
)
def test_experts_of_squared_relu(
    dtype: torch.dtype, hidden: int, size: int, num_tokens: int
) -> None:
    layer, x = (
        experts(dtype, 12, hidden, size, activation="squared_relu"),
        rows(num_tokens, hidden, dtype),
    )
    chosen = choice(num_tokens, 12, 3)
    assert_near(run(layer, x, chosen), layer, x, chosen)


@pytest.mark.parametrize(("hidden", "size"), [(290, 150), (296, 152)])
@pytest.mark.parametrize("nth", range(len(routed_experts._PLANS)))
def test_every_plan_takes_sizes_that_are_no_multiples_of_its_blocks(
    nth: int, hidden: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks of features, and several groups of tiles, none of them whole. Rows of whole
    16 bytes, which the tensor memory accelerator reads, and others."""
    plan = replace(routed_experts._PLANS[nth], most_uses=float("inf"))
    monkeypatch.setattr(routed_experts, "_PLANS", (plan,))
    layer, x = experts(HALF, 3, hidden, size), rows(30, hidden, HALF)
    chosen = choice(30, 3, 2)
    assert_near(run(layer, x, chosen), layer, x, chosen)


@pytest.mark.parametrize("used", [1, 2, 5])
@pytest.mark.parametrize("num_tokens", [3, 150])
def test_experts_without_tokens_are_not_read(used: int, num_tokens: int) -> None:
    layer, x = experts(HALF, 12, 64, 48), rows(num_tokens, 64, HALF)
    for weight in layer.plain():
        weight[:-used].fill_(float("nan"))
    chosen = choice(num_tokens, 12, 1, used)
    assert_near(run(layer, x, chosen), layer, x, chosen)


def test_every_run_and_every_order_of_tokens_gives_the_same_bits() -> None:
    """Other orders of the tokens, which put them into other rows of tiles, as well."""
    layer, x, (weights, ids) = experts(HALF, 6, 96, 40), rows(80, 96, HALF), choice(80, 6, 3)
    first = run(layer, x, (weights, ids))
    wider = torch.cat([weights, weights], dim=1)[:, :3]
    for _ in range(20 if DEVICE == "cuda" else 2):
        assert torch.equal(run(layer, x, (wider, ids.int())), first)
    turned = torch.arange(79, -1, -1, device=DEVICE)
    other = run(layer, x[turned].contiguous(), (weights[turned], ids[turned].contiguous()))
    assert torch.equal(other[turned], first)


@pytest.mark.parametrize("few", [True, False])
def test_uses_of_other_ranks_are_in_no_tile(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_order, "_FEW_USES", 10_000 if few else 0)
    _, ids = choice(200, 12, 3)
    tiles = order_by_expert(ids, 5, 16, has_others=True)
    found = tile_rows_of(tiles)
    expert_of: list[int] = ids.flatten().tolist()
    own = [use for use, expert in enumerate(expert_of) if expert < 5]
    assert sorted(use for _, uses in found for use in uses) == own
    assert all(expert_of[use] == expert for expert, uses in found for use in uses)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 64, 700])
@pytest.mark.parametrize("has_bias", [False, True])
def test_ranks_with_whole_experts_add_up(num_tokens: int, has_bias: bool) -> None:
    """The first rank has 5 of 12 experts."""
    layer = experts(HALF, 12, 64, 48, activation=GATE if has_bias else "silu", has_bias=has_bias)
    x, (weights, ids) = rows(num_tokens, 64, HALF), choice(num_tokens, 12, 3)
    parts = []
    for begin, end in ((0, 5), (5, 12)):
        own = slice(begin, end)
        biases = layer.biases
        if biases is not None:
            assert biases.down is not None
            biases = type(biases)(biases.gate_up[own], biases.down[own])
        gate_up, down = (one[own] for one in layer.plain())
        is_own = (ids >= begin) & (ids < end)
        got = KERNELS.run_routed_experts(
            x, weights, (ids - begin).where(is_own, end - begin), gate_up, down,
            activation=layer.activation, biases=biases, num_experts=12,
        )  # fmt: skip
        assert got.isfinite().all()
        parts.append(got)
    if num_tokens:
        assert_near(parts[0] + parts[1], layer, x, (weights, ids))
