"""Expert parallelism: a rank loads its own experts whole, and nothing of the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from rigs.caches.memory_ranks import PlaceInGroup
from rigs.models.quantized_checkpoints import (
    Format,
    awq,
    fp8_blocks,
    fp8_per_tensor,
    gptq,
    mxfp4,
    write_quantized,
)
from rigs.models.scaled_products import dequantized, scaled_products
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.moe.experts import RoutedExperts
from sglang.srt.layers.placement import ExpertRanks
from sglang.srt.layers.triton_ops.arguments import ScaledWeight, Weight
from sglang.srt.model_loader.loader import get_model
from sglang.srt.model_loader.weight_source import LoadConfig
from sglang.srt.models.causal_lm import CausalLM
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

SIZE: Final = 2
FORMATS: Final[dict[str, tuple[str, Callable[[], Format]]]] = {
    "fp8-blocks": ("qwen3_moe", fp8_blocks),
    "fp8-per-tensor": ("deepseek_v3", fp8_per_tensor),
    "awq": ("qwen3_moe", awq),
    "gptq": ("qwen3_next", gptq),
    "mxfp4": ("gpt_oss", mxfp4),
}


def model_of(path: Path, rank: int | None = None, **options: Any) -> CausalLM:
    """The whole model, or a rank's share."""
    if rank is not None:
        group = PlaceInGroup(rank, SIZE)
        experts = ExpertRanks(group=group, is_whole=True, exchange=None)
        options |= {"tp_group": group, "experts": experts}
    load_config = LoadConfig(show_progress=False, **options)
    return get_model(ModelConfig.from_path(str(path)), load_config)


def experts_of(model: CausalLM) -> list[RoutedExperts]:
    return [module for module in model.modules() if isinstance(module, RoutedExperts)]


def values_of(weight: Weight) -> torch.Tensor:
    return dequantized(weight) if isinstance(weight, ScaledWeight) else weight.float()


def assert_has_own_experts(got: CausalLM, whole: CausalLM, rank: int) -> None:
    for layer, all_experts in zip(experts_of(got), experts_of(whole), strict=True):
        count = all_experts.num_experts
        own = slice(rank * count // SIZE, (rank + 1) * count // SIZE)
        assert (layer.own.begin, layer.own.end) == (own.start, own.stop)
        for name in ("gate_up", "down"):
            mine, given = getattr(layer, name), getattr(all_experts, name)
            assert isinstance(mine, ScaledWeight) == isinstance(given, ScaledWeight)
            assert torch.equal(values_of(mine), values_of(given)[own])
        for name in ("gate_up_bias", "down_bias"):
            mine, given = getattr(layer, name), getattr(all_experts, name)
            assert given is None or torch.equal(mine, given[own])


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
@pytest.mark.parametrize(
    "family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_5_moe", "nemotron_h"]
)
def test_a_rank_has_its_experts_whole(
    tiny_model: Callable[..., Path], family: str, load_format: str, rank: int
) -> None:
    """One tensor for each expert, or stacks, also with alternating outputs and biases."""
    path = tiny_model(family)
    whole = model_of(path, load_format=load_format)
    assert_has_own_experts(model_of(path, rank, load_format=load_format), whole, rank)


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_kept", [True, False])
def test_a_rank_has_its_quantized_experts(
    tiny_model: Callable[..., Path], tmp_path: Path, name: str, is_kept: bool, rank: int
) -> None:
    family, form = FORMATS[name]
    path = write_quantized(tiny_model(family), tmp_path, form(), files=2)
    if not is_kept:
        assert_has_own_experts(model_of(path, rank), model_of(path), rank)
        return
    with scaled_products():
        got, whole = model_of(path, rank), model_of(path)
    assert isinstance(experts_of(got)[0].gate_up, ScaledWeight)
    assert_has_own_experts(got, whole, rank)


@pytest.mark.parametrize("load_format", ["dummy"])
def test_a_rank_has_its_random_quantized_experts(
    tiny_model: Callable[..., Path], tmp_path: Path, load_format: str
) -> None:
    path = write_quantized(tiny_model("qwen3_moe"), tmp_path, fp8_blocks())
    with scaled_products():
        got, whole = model_of(path, 1, load_format=load_format), model_of(path, load_format="dummy")
    assert isinstance(experts_of(got)[0].gate_up, ScaledWeight)
    assert_has_own_experts(got, whole, 1)


def test_the_tensors_of_other_experts_are_checked_and_not_read(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = tiny_model("qwen3_moe")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.experts.7.up_proj.weight"
    slots = dict(model_of(source, 0).weight_slots())
    assert slots[name].dest.numel() == 0 and slots[name].shape == tuple(tensors[name].shape)
    tensors[name] = tensors[name][1:].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"experts\.7\.up_proj\.weight' has shape"):
        model_of(tmp_path, 0)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"experts\.7\.up_proj\.weight' is in no weight file"):
        model_of(tmp_path, 0)


def test_ranks_that_do_not_divide_the_experts_are_refused(
    tiny_model: Callable[..., Path],
) -> None:
    path = tiny_model("qwen3_moe", num_experts=7)
    with pytest.raises(ValueError, match=r"^7 experts cannot be split over 2 ranks"):
        model_of(path, 0)
