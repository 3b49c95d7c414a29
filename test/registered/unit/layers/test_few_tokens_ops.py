"""Kernels of sparse layers and gated attention: layers with them give what torch gives."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rigs.layers.delta_layers import batch_of, fill, pool_of
from rigs.models.kernel_layers import DEVICE, HALF, delta_net, randn, relative_error
from sglang.srt.environ import envs
from sglang.srt.layers.cuda_kernels import KERNELS
from sglang.srt.layers.forward_batch_info import StateBatch
from sglang.srt.layers.layernorm import ZeroCenteredRMSNorm
from sglang.srt.layers.linear_attention.delta_net import GatedDeltaNet
from sglang.srt.layers.moe.sparse_moe import (
    RouterOptions,
    SharedExpertOptions,
    SparseMoeBlock,
    SparseMoeOptions,
    select_experts,
)
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.radix_attention import LayerStep
from sglang.srt.layers.rotary_embedding import Rotation, apply_rotary
from sglang.srt.layers.triton_ops import early_start, fused_experts
from sglang.srt.layers.triton_ops.arguments import ClampedGate, ExpertChoice
from sglang.srt.mem_cache.device.state_pool import MambaPool
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=30, suite="base-b-test-1-gpu-large")


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(
    "groups", [(1, 1, "max"), (4, 2, "max"), (3, 1, "max"), (4, 2, "top2_sum")]
)
def test_the_choice_is_that_of_torch(
    scoring: Any, renormalize: bool, with_bias: bool, groups: tuple[int, int, Any]
) -> None:
    """Equal scores as well: the lower id comes first."""
    num_groups, topk_groups, group_score = groups
    options = RouterOptions(
        num_experts=24, top_k=5, scoring=scoring, renormalize=renormalize,
        routed_scaling_factor=2.5, num_groups=num_groups, topk_groups=topk_groups,
        group_score=group_score,
    )  # fmt: skip
    logits = (randn(9, 24, seed=4) * 2).round()
    bias = randn(24, seed=5).round() if with_bias else None
    if group_score == "top2_sum":
        # Two sums of equal scores may be rounded differently, which decides between their groups.
        logits = randn(9, 24, seed=4)
        bias = randn(24, seed=5) / 20 if with_bias else None
    want, want_ids = select_experts(logits, options, bias)
    if group_score == "top2_sum":
        by_best = dataclasses.replace(options, group_score="max")
        assert not torch.equal(select_experts(logits, by_best, bias)[1], want_ids)
    x, gate = randn(9, 48, seed=6), randn(1, 48, seed=7)
    choice = ExpertChoice(
        top_k=5, scoring=scoring, renormalize=renormalize, factor=2.5,
        correction_bias=bias, has_shared=True, shared_gate=gate, groups=num_groups,
        top_groups=topk_groups, two_of_group=group_score == "top2_sum",
    )  # fmt: skip
    weights, ids = KERNELS.choose_experts(logits, choice, x)
    if not with_bias or group_score == "top2_sum":
        # Sums of scores and biases are rounded differently, which decides between equal ones.
        assert torch.equal(ids.long(), want_ids)
        torch.testing.assert_close(weights[:, :5], want, rtol=1e-5, atol=1e-6)
    else:
        near = (weights[:, :5].sort().values - want.sort().values).abs().max()
        assert near < 1e-5
    torch.testing.assert_close(weights[:, 5:], F.linear(x, gate).sigmoid(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [None, 0.05])
def test_roots_of_softplus_are_as_exact_as_torch(bias: float | None) -> None:
    """The square root shows bits that a sum with 1 would lose, of logits far below 0."""
    options = RouterOptions(num_experts=64, top_k=64, scoring="sqrt_softplus", renormalize=False)
    logits = torch.linspace(-60.0, 40.0, 3 * 64).view(64, 3).t().contiguous().to(DEVICE)
    own = None if bias is None else torch.full((64,), bias, device=DEVICE)
    want, want_ids = select_experts(logits, options, own)
    choice = SparseMoeBlock._plan_choice(block_of(torch.float32, None, options))
    weights, ids = KERNELS.choose_experts(
        logits, dataclasses.replace(choice, correction_bias=own), randn(3, HIDDEN, seed=1)
    )
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=0)
    # With the bias, logits far below 0 are equal.
    assert bias is not None or torch.equal(ids.long(), want_ids)


@pytest.mark.parametrize("num_tokens", [1, 5, 12])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_table_chooses_the_experts_of_a_token(dtype: torch.dtype, num_tokens: int) -> None:
    """With a shared expert; the gates of all experts are clamped."""
    options = SparseMoeOptions(
        hidden_size=HIDDEN,
        intermediate_size=10,
        router=RouterOptions(num_experts=16, top_k=3, scoring="sqrt_softplus"),
        shared=SharedExpertOptions(intermediate_size=10),
        activation=ClampedGate(limit=0.05),
        table_size=20,
    )
    block = SparseMoeBlock(options, TensorPlacement(dtype=dtype, device=DEVICE))
    numbers = torch.Generator().manual_seed(4)
    for parameter in block.parameters():
        if parameter.dtype is not torch.int64:
            parameter.copy_(torch.randn(parameter.shape, generator=numbers) * 0.2)
    assert block.gate.table is not None
    experts = torch.rand(20, 16, generator=numbers).argsort(dim=1)[:, :3]
    block.gate.table.copy_(experts)
    tokens = torch.randint(0, 20, (num_tokens,), generator=numbers).to(DEVICE)
    x = randn(num_tokens, HIDDEN, seed=num_tokens, dtype=dtype)
    found = []
    for kernels in (None, KERNELS):
        block._kernels = kernels
        out, _ = block.forward(x.clone(), torch.zeros_like(x), tokens)
        assert isinstance(out, torch.Tensor)
        found.append(out)
    assert relative_error(found[1], found[0]) < (1e-5 if dtype is torch.float32 else 1e-2)
    _, ids = KERNELS.choose_experts(block.gate.logits(x), block._choice, x, tokens)
    assert torch.equal(ids.cpu().long(), experts[tokens.cpu()])


HIDDEN = 32
PLAIN = RouterOptions(num_experts=16, top_k=3)
GROUPED = RouterOptions(
    num_experts=16, top_k=3, scoring="sigmoid", num_groups=4, topk_groups=2, group_score="top2_sum"
)


def block_of(
    dtype: torch.dtype,
    shared: SharedExpertOptions | None,
    router: RouterOptions = PLAIN,
    width: int = 10,
    seed: int = 8,
) -> SparseMoeBlock:
    options = SparseMoeOptions(
        hidden_size=HIDDEN, intermediate_size=width, router=router, shared=shared
    )
    block = SparseMoeBlock(options, TensorPlacement(dtype=dtype, device=DEVICE))
    fill(block, seed)
    return block


def both_ways(block: SparseMoeBlock, x: torch.Tensor) -> list[torch.Tensor]:
    """Outputs of a block in torch and by the kernels, which only choose experts for more tokens."""
    found = []
    for few in (False, True):
        block._kernels = KERNELS if few else None
        out, _ = block.forward(x.clone(), torch.zeros_like(x))
        assert isinstance(out, torch.Tensor)
        found.append(out)
    return found


@pytest.mark.parametrize("num_tokens", [1, 5, 12])
@pytest.mark.parametrize(
    "shared",
    [None, SharedExpertOptions(intermediate_size=10),
     SharedExpertOptions(intermediate_size=10, has_gate=True)],
)  # fmt: skip
@pytest.mark.parametrize("router", [PLAIN, GROUPED])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_block_gives_what_it_gives_in_torch(
    dtype: torch.dtype,
    router: RouterOptions,
    shared: SharedExpertOptions | None,
    num_tokens: int,
) -> None:
    block = block_of(dtype, shared, router)
    x = randn(num_tokens, HIDDEN, seed=num_tokens, dtype=dtype)
    found = both_ways(block, x)
    # torch and the kernels round intermediate values to bf16 at different places. A bf16 unit is
    # 8e-3.
    assert relative_error(found[1], found[0]) < (1e-5 if dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize("width", [12, 512, 513, 1100])
def test_experts_may_have_any_width(width: int, num_tokens: int) -> None:
    shared = SharedExpertOptions(intermediate_size=width, has_gate=True)
    block = block_of(torch.float32, shared, width=width)
    found = both_ways(block, randn(num_tokens, HIDDEN, seed=1))
    assert relative_error(found[1], found[0]) < 1e-5


@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize(("hidden", "most", "block"), [(32, 16, 16), (72, 32, 16), (40, 32, 8)])
def test_experts_may_have_more_inputs_than_a_block(
    hidden: int, most: int, block: int, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "HIDDEN", hidden)
    monkeypatch.setattr(fused_experts, "_INPUTS", most)
    assert fused_experts.plan_gate_up(hidden, 12, num_tokens)["BLOCK_H"] == block
    found = both_ways(block_of(torch.float32, None), randn(num_tokens, hidden, seed=1))
    assert relative_error(found[1], found[0]) < 1e-5


def test_one_expert_of_many_tokens_is_read_by_all() -> None:
    block = block_of(HALF, None)
    x = randn(1, HIDDEN, seed=1, dtype=HALF).expand(6, -1).contiguous()
    assert block._few is not None
    chosen = KERNELS.choose_experts(block.gate.logits(x), block._choice, x)
    out = KERNELS.run_experts(x, *chosen, block._few)
    assert torch.equal(out, out[:1].expand(6, -1))
    assert out.abs().min() > 0


def test_shared_experts_of_another_size_and_many_tokens_are_left_to_others() -> None:
    shared = SharedExpertOptions(intermediate_size=48)
    assert block_of(HALF, shared)._few is None
    assert block_of(HALF, None).experts.takes_few(8, 3)
    assert not block_of(HALF, None).experts.takes_few(9, 3)
    assert not block_of(HALF, None).experts.takes_few(8, 5)


# Norms and gated attention.


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_the_zero_centred_norm_equals_the_definition(dtype: torch.dtype) -> None:
    norm = ZeroCenteredRMSNorm(96, 1e-5, placement=TensorPlacement(dtype=dtype, device=DEVICE))
    fill(norm, 9)
    x, residual = randn(5, 96, seed=1, dtype=dtype), randn(5, 96, seed=2, dtype=dtype)
    found = []
    for kernels in (None, KERNELS):
        norm._kernels = kernels
        found.append((norm.forward(x), *norm.add_(x.clone(), residual.clone())))
    bound = 1e-6 if dtype is torch.float32 else 2e-3
    assert all(relative_error(a, b) < bound for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (24, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_gated_attention_equals_the_definition_before_and_behind(
    dtype: torch.dtype, head_dim: int, rotary_dim: int
) -> None:
    heads, kv_heads, tokens = 4, 2, 5
    qkv = randn(tokens, 2 * heads + 2 * kv_heads, head_dim, seed=1, dtype=dtype)
    placement = TensorPlacement(dtype=dtype, device=DEVICE)
    norms = [ZeroCenteredRMSNorm(head_dim, 1e-6, placement=placement) for _ in range(2)]
    for nth, norm in enumerate(norms):
        fill(norm, nth)
        norm._kernels = None
    angles = [randn(tokens, 1, rotary_dim, seed=3 + i, dtype=dtype) for i in range(2)]
    queries, k, v = torch.split(qkv.clone(), [2 * heads, kv_heads, kv_heads], dim=1)
    rotation = Rotation(angles[0], angles[1])
    want_q = apply_rotary(norms[0].forward(queries[:, ::2]), rotation)
    want_k = apply_rotary(norms[1].forward(k), rotation)
    loc = torch.tensor([3, 9, 4, 0, 11], device=DEVICE)
    pools = [randn(12, kv_heads, head_dim, seed=5 + i, dtype=dtype) for i in range(2)]
    before = qkv.clone()
    weights = norms[0].weight, norms[1].weight
    q = KERNELS.prepare_gated_qkv_(qkv, weights, 1e-6, (angles[0], angles[1]), loc, *pools)
    bound = 1e-6 if dtype is torch.float32 else 2e-3
    assert relative_error(q, want_q) < bound
    assert relative_error(qkv[:, 2 * heads : -kv_heads], want_k) < bound
    changed = slice(2 * heads, 2 * heads + kv_heads)
    assert torch.equal(pools[0][loc], qkv[:, changed]) and torch.equal(pools[1][loc], v)
    qkv[:, changed] = before[:, changed]
    assert torch.equal(qkv, before)

    rows = torch.tensor([4, 1], device=DEVICE)
    x = randn(tokens, heads * head_dim, seed=7, dtype=dtype)
    gate = queries[:, 1::2].flatten(1).float().sigmoid()
    for chosen in (None, rows):
        got = x.clone() if chosen is None else x[rows].clone()
        want = got * (gate if chosen is None else gate[rows])
        KERNELS.scale_by_gates_(got, qkv[:, 1 : 2 * heads : 2], chosen)
        assert relative_error(got, want) < bound


# Chains of them.


Layer = tuple[ZeroCenteredRMSNorm, GatedDeltaNet, SparseMoeBlock, MambaPool]


def hybrid_layers(count: int, width: int) -> list[Layer]:
    """Norm, delta net and experts, each with weights and states of its own."""
    placement = TensorPlacement(dtype=HALF, device=DEVICE)
    layers = []
    for seed in range(count):
        norm = ZeroCenteredRMSNorm(HIDDEN, 1e-6, placement=placement)
        net = delta_net(HALF)
        shared = SharedExpertOptions(intermediate_size=width, has_gate=True)
        block = block_of(HALF, shared, PLAIN, width=width, seed=100 + seed)
        fill(norm, seed)
        fill(net, 200 + seed)
        norm._kernels = net._kernels = block._kernels = KERNELS
        layers.append((norm, net, block, pool_of(net, torch.float32, HALF)))
    return layers


def run_hybrid(layers: list[Layer], tokens: int) -> list[torch.Tensor]:
    """Results of two decode steps: the residual, and the states of all layers."""
    nothing: Any = None
    slots = torch.tensor([3, 7, 1][:tokens], device=DEVICE)
    for *_, pool in layers:
        pool.temporal.copy_(randn(*pool.temporal.shape, seed=2))
        pool.conv.copy_(randn(*pool.conv.shape, seed=3))
    batches = [batch_of(pool, tokens, None, StateBatch(slots=slots)) for *_, pool in layers]
    left = []
    for step in range(2):
        residual, x = randn(tokens, HIDDEN, seed=step, dtype=HALF), None
        for (norm, net, block, _), batch in zip(layers, batches, strict=True):
            normed, residual = norm.add_(x, residual)
            x, residual = net.forward(normed, residual, LayerStep(nothing, batch))
            normed, residual = norm.add_(x, residual)
            x, residual = block.forward(normed, residual)
        left.append(norm.add_(x, residual)[0])
    return left + [pool.temporal.clone() for *_, pool in layers]


@pytest.mark.parametrize("tokens", [1, 3])
def test_layers_that_start_early_leave_the_same_bits(tokens: int) -> None:
    """Kernels read the layer's chosen experts and states before they wait. Choices of all layers
    have the same places in memory, so that what is read too early is another layer's."""
    turns, count, width = (20, 40, 600) if DEVICE == "cuda" else (1, 2, 20)
    layers = hybrid_layers(count, width)
    early_start._starts_early.cache_clear()
    with envs.SGLANG_KERNELS_START_EARLY.override(False):
        wanted = run_hybrid(layers, tokens)
    early_start._starts_early.cache_clear()
    assert all(torch.isfinite(one).all() for one in wanted)
    for _ in range(turns):
        found = run_hybrid(layers, tokens)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
