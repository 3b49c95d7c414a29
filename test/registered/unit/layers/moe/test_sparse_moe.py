"""Sparse blocks equal transformers' on the same random weights, of each family that has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from sglang.srt.layers.moe.sparse_moe import (
    RouterOptions,
    SharedExpertOptions,
    SparseMoeBlock,
    SparseMoeOptions,
)
from sglang.srt.layers.placement import TensorPlacement, WeightedLayer, WeightSlot
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

HIDDEN, SIZE, EXPERTS, TOP_K = 32, 24, 8, 3
DEEPSEEK: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": SIZE,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
QWEN: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": SIZE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
}
Made = tuple[torch.nn.Module, SparseMoeOptions]


def options(router: RouterOptions, **more: Any) -> SparseMoeOptions:
    return SparseMoeOptions(hidden_size=HIDDEN, intermediate_size=SIZE, router=router, **more)


def qwen3_moe() -> Made:
    reference = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**QWEN, norm_topk_prob=True))
    return reference, options(RouterOptions(num_experts=EXPERTS, top_k=TOP_K))


def qwen3_next() -> Made:
    config = Qwen3NextConfig(**QWEN, shared_expert_intermediate_size=40, norm_topk_prob=True)
    shared = SharedExpertOptions(intermediate_size=40, name="shared_expert", has_gate=True)
    router = RouterOptions(num_experts=EXPERTS, top_k=TOP_K)
    reference: Callable[..., torch.nn.Module] = Qwen3NextSparseMoeBlock
    return reference(config), options(router, shared=shared)


def deepseek_v2() -> Made:
    config = DeepseekV2Config(**DEEPSEEK, topk_method="group_limited_greedy")
    router = RouterOptions(
        num_experts=EXPERTS,
        top_k=TOP_K,
        renormalize=False,
        num_groups=4,
        topk_groups=2,
        routed_scaling_factor=1.7,
    )
    shared = SharedExpertOptions(intermediate_size=2 * SIZE)
    return DeepseekV2Moe(config), options(router, router_dtype=torch.float32, shared=shared)


def deepseek_v3() -> Made:
    router = RouterOptions(
        num_experts=EXPERTS,
        top_k=TOP_K,
        scoring="sigmoid",
        num_groups=4,
        topk_groups=2,
        group_score="top2_sum",
        routed_scaling_factor=1.7,
    )
    return DeepseekV3MoE(DeepseekV3Config(**DEEPSEEK)), options(
        router,
        router_dtype=torch.float32,
        has_correction_bias=True,
        shared=SharedExpertOptions(intermediate_size=2 * SIZE),
    )


def nemotron_h(latent: int | None = None) -> Made:
    """Experts of squared ReLU."""
    sizes = DEEPSEEK | {"n_shared_experts": 1, "moe_shared_expert_intermediate_size": 40}
    _, made = deepseek_v3()
    return NemotronHMoE(NemotronHConfig(**sizes, moe_latent_size=latent)), replace(
        made,
        shared=SharedExpertOptions(intermediate_size=40),
        activation="squared_relu",
        latent_size=latent,
    )


def nemotron_h_latent() -> Made:
    """Routed experts read and write 20 features."""
    return nemotron_h(20)


def load(block: SparseMoeBlock, reference: torch.nn.Module) -> None:
    """Fill the block from transformers' module, whose experts are stacked."""
    state = {f"mlp.{name}": tensor for name, tensor in reference.state_dict().items()}
    places: dict[str, WeightSlot] = {}
    for module in block.modules():
        if isinstance(module, WeightedLayer):
            places.update(module.weight_slots())
    for module in block.modules():
        if isinstance(module, WeightedLayer):
            for name, slot in module.stacked_slots():
                places[name] = slot
                for part in slot.parts:
                    del places[part]
    assert set(places) == set(state)
    for name, slot in places.items():
        assert slot.shape == tuple(state[name].shape), name
        slot.fill(state[name])


def pair(make: Callable[[], Made], dtype: torch.dtype) -> tuple[SparseMoeBlock, torch.nn.Module]:
    reference, made = make()
    numbers = torch.Generator().manual_seed(5)
    block = SparseMoeBlock(made, TensorPlacement(dtype=dtype, device="cpu", prefix="mlp"))
    with torch.no_grad():
        for tensor in reference.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=numbers) * 0.3)
    reference.to(dtype)
    load(block, reference)
    return block, reference


FAMILIES = pytest.mark.parametrize(
    "make", [qwen3_moe, qwen3_next, deepseek_v2, deepseek_v3, nemotron_h, nemotron_h_latent]
)


@FAMILIES
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
@torch.inference_mode()
def test_the_output_equals_transformers(make: Callable[[], Made], num_tokens: int) -> None:
    block, reference = pair(make, torch.float32)
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(7))
    residual = torch.ones(num_tokens, HIDDEN)
    out, rest = block.forward(x.clone(), residual)
    assert isinstance(out, torch.Tensor)
    torch.testing.assert_close(out + rest, reference(x[None])[0] + 1.0, rtol=1e-5, atol=1e-5)


@FAMILIES
@torch.inference_mode()
def test_bf16_follows_transformers_rounding(make: Callable[[], Made]) -> None:
    block, reference = pair(make, torch.bfloat16)
    x = torch.randn(33, HIDDEN, generator=torch.Generator().manual_seed(7)).bfloat16()
    out, rest = block.forward(x.clone(), torch.zeros_like(x))
    want = reference(x[None])[0].float()
    assert isinstance(out, torch.Tensor)
    assert ((out + rest).float() - want).abs().max() < 0.02 * want.abs().max()


def test_the_input_is_left_as_it_is() -> None:
    block, _ = pair(qwen3_next, torch.float32)
    x = torch.ones(3, HIDDEN)
    block.forward(x, torch.zeros(3, HIDDEN))
    assert torch.equal(x, torch.ones(3, HIDDEN))
