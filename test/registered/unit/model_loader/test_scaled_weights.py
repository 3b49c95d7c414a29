"""Quantized weights that stay so in memory stand for the values that are otherwise dequantized."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rigs.caches.memory_ranks import PlaceInGroup
from rigs.models.compressed_checkpoints import save_compressed
from rigs.models.model_oracle import logits_of_batches
from rigs.models.quantized_checkpoints import (
    Format,
    awq,
    fp8_blocks,
    fp8_per_tensor,
    gptq,
    mxfp4,
    write_quantized,
)
from rigs.models.scaled_products import dequantized, scaled_products, scaled_weights
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.moe.experts import RoutedExperts
from sglang.srt.layers.triton_ops.arguments import ScaledWeight
from sglang.srt.model_loader.loader import build_model, get_model
from sglang.srt.model_loader.weight_source import LoadConfig, WeightSlots
from sglang.srt.models.causal_lm import CausalLM
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

FAMILIES = (
    "llama",
    "qwen3_moe",
    "deepseek_v3",
    "deepseek_v32",
    "kimi_linear",
    "qwen3_next",
    "qwen3_5_moe",
)
FORMATS: dict[str, Callable[[], Format]] = {
    "fp8-blocks": fp8_blocks,
    "fp8-per-tensor": fp8_per_tensor,
    "awq": awq,
    "gptq": gptq,
    "gptq-whole": lambda: gptq(4, -1),
}
OF_LOGS = {**FORMATS, "mxfp4": mxfp4}


def model_of(
    path: Path, rank: int = 0, size: int = 1, load_format: str = "auto", **config: str
) -> CausalLM:
    """A rank's share of a model; `config` are arguments of `ModelConfig.from_path`."""
    load_config = LoadConfig(
        load_format=load_format, tp_group=PlaceInGroup(rank, size), show_progress=False
    )
    return get_model(ModelConfig.from_path(str(path), **config), load_config)  # type: ignore[arg-type]


def kept(model: CausalLM) -> dict[str, ScaledWeight]:
    found = scaled_weights(model)
    return {name: weight for name, weight in found if isinstance(weight, ScaledWeight)}


def merged_name(name: str) -> str:
    return re.sub(r"products\.\d", "products", name)


def values_of(model: CausalLM) -> dict[str, torch.Tensor]:
    """The values of each weight. Products that one model merges and another does not are joined."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, weight in scaled_weights(model):
        values = dequantized(weight) if isinstance(weight, ScaledWeight) else weight
        found.setdefault(merged_name(name), []).append(values)
    return {name: torch.cat(parts) for name, parts in found.items()}


@pytest.mark.half
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_rank_keeps_what_a_cpu_dequantizes(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, name: str
) -> None:
    """Tensors of one weight are in different files."""
    path = write_quantized(tiny_model(family), tmp_path, FORMATS[name](), files=2)
    assert_ranks_keep_what_a_cpu_dequantizes(path)


def test_every_rank_keeps_4_bit_floats(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Gates and ups alternate in the files. Biases and all else are plain."""
    path = write_quantized(tiny_model("gpt_oss"), tmp_path, mxfp4(), files=2)
    assert_ranks_keep_what_a_cpu_dequantizes(path)
    with scaled_products():
        model = model_of(path)
    weights = kept(model)
    assert len(weights) == 8 and all(one.is_fp4 for one in weights.values())
    with scaled_products():
        got = logits_of_batches(StepDriver(path, page_size=4))
    want = logits_of_batches(StepDriver(tmp_path / "plain", page_size=4))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_ranks_have_whole_groups_of_4_bit_elements(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """9 groups are 5 and 4, whereas a CPU has 4.5 on each rank."""
    path = write_quantized(tiny_model("gpt_oss", intermediate_size=288), tmp_path, mxfp4())
    whole = {name: slot.dest for name, slot in model_of(path).weight_slots()}
    joined: dict[str, list[torch.Tensor]] = {}
    for rank, size in ((0, 160), (1, 128)):
        with scaled_products():
            model = model_of(path, rank, 2)
        for name, weight in kept(model).items():
            assert weight.shape[-1 if name.endswith("down") else -2] in (size, 2 * size)
        for layer in model.modules():
            if isinstance(layer, RoutedExperts):
                values = dequantized(layer.down)  # type: ignore[arg-type]
                joined.setdefault(layer.prefix, []).append(values)
    for prefix, parts in joined.items():
        want = whole[f"{prefix}.3.down_proj.weight"]
        assert torch.equal(torch.cat(parts, -1)[3], want.float())


def assert_ranks_keep_what_a_cpu_dequantizes(path: Path) -> None:
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        with scaled_products():
            model = model_of(path, rank, size)
        assert kept(model), "none is kept"
        got, want = values_of(model), values_of(model_of(path, rank, size))
        assert list(got) == list(want)
        for key, values in got.items():
            assert torch.equal(values, want[key]), (key, rank, size)


@pytest.mark.parametrize(
    ("family", "name", "size", "words"),
    [
        ("gpt_oss", "mxfp4", 2, "96 stay so in memory, 0 are dequantized at load"),
        ("llama", "fp8-blocks", 2, "14 stay so in memory, 0 are dequantized at load"),
        (
            "llama",
            "awq",
            2,
            "12 stay so in memory, 2 are dequantized at load; "
            "2: groups of 32 inputs do not fit 48 on a rank",
        ),
        (
            "deepseek_v3",
            "fp8-blocks",
            1,
            "38 stay so in memory, 2 are dequantized at load; 2: no plain products",
        ),
    ],
)
def test_a_log_line_says_what_is_kept(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    family: str,
    name: str,
    size: int,
    words: str,
) -> None:
    path = write_quantized(tiny_model(family), tmp_path, OF_LOGS[name]())
    with scaled_products(), caplog.at_level("INFO"):
        model_of(path, 0, size)
    assert sum(words in line for line in caplog.messages) == 1, caplog.messages


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (gptq(8), "integers of 8 bits"),
        (gptq(act_order=True), "groups of reordered inputs"),
        (fp8_blocks(20, 24), "groups of 24 inputs do not fit 96 on a rank"),
    ],
)
def test_other_formats_are_dequantized_with_a_reason(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    form: Format,
    why: str,
) -> None:
    path = write_quantized(tiny_model("llama"), tmp_path, form)
    with scaled_products(), caplog.at_level("INFO"):
        model = model_of(path)
    assert not kept(model)
    assert any("0 stay so in memory" in line and why in line for line in caplog.messages)
    for got, want in zip(model.parameters(), model_of(path).parameters(), strict=True):
        assert torch.equal(got, want)


def test_merged_weights_of_two_formats_are_dequantized(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_quantized(tiny_model("llama"), tmp_path, fp8_blocks())
    name = "model.layers.0.self_attn.k_proj.weight"
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"{name}_scale_inv"]
    tensors[name] = load_file(tmp_path / "plain" / "model.safetensors")[name]
    save_file(tensors, file)
    with scaled_products():
        model = model_of(path)
    names = set(kept(model))
    assert "model.layers.0.self_attn.qkv_proj.weight" not in names
    assert "model.layers.1.self_attn.qkv_proj.weight" in names
    got, want = values_of(model), values_of(model_of(path))
    assert all(torch.equal(values, want[key]) for key, values in got.items())


def test_small_projections_may_be_plain(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Published checkpoints leave two of Qwen3.5's delta-net projections plain."""
    path = write_quantized(tiny_model("qwen3_5_moe"), tmp_path, awq())
    with scaled_products():
        names = kept(model_of(path))
        driver = StepDriver(path, page_size=4)
        got = logits_of_batches(driver)
    assert "model.layers.0.self_attn.in_proj.products.0.weight" in names
    assert "model.layers.0.self_attn.in_proj.products.1.weight" not in names
    want = logits_of_batches(StepDriver(tmp_path / "plain", page_size=4))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "intermediate_size": 384,
}


def test_blocks_stay_whole_where_ranks_have_whole_blocks(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path / "plain-16", "llama", **WIDE)
    path = write_quantized(tmp_path / "plain-16", tmp_path / "written", fp8_blocks())
    found = {}
    for size in (1, 2):
        with scaled_products():
            weights = kept(model_of(path, size - 1, size))
        for name, weight in weights.items():
            if "layers.0" in name:
                key = name.removeprefix("model.layers.0.").removesuffix(".weight")
                found[size, key] = (weight.height, weight.group)
    assert found == {
        (1, "self_attn.qkv_proj"): (128, 128),
        (1, "self_attn.o_proj"): (128, 128),
        (1, "mlp.gate_up_proj"): (128, 128),
        (1, "mlp.down_proj"): (128, 128),
        # Keys and values have 64 outputs on each of two ranks, gate and up 192.
        (2, "self_attn.qkv_proj"): (1, 128),
        (2, "self_attn.o_proj"): (128, 128),
        (2, "mlp.gate_up_proj"): (1, 128),
        # The 192 inputs of `down_proj` are no whole groups: it is dequantized.
    }


@pytest.mark.half
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["fp8-blocks", "awq"])
def test_products_with_scales_compute_what_a_plain_twin_computes(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, name: str
) -> None:
    path = write_quantized(tiny_model(family), tmp_path, FORMATS[name]())
    with scaled_products() as kernels:
        got = logits_of_batches(StepDriver(path, page_size=4))
    assert kernels.num_scaled > 6, "no product had scales"
    want = logits_of_batches(StepDriver(tmp_path / "plain", page_size=4))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_rounded_activations_change_little(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = write_quantized(tiny_model("llama"), tmp_path, fp8_blocks())
    with scaled_products(rounds=True):
        got = logits_of_batches(StepDriver(path, page_size=4))
    want = logits_of_batches(StepDriver(tmp_path / "plain", page_size=4))
    # Random weights of this size amplify errors, of about 3% in each product.
    assert 0.01 < (got - want).norm() / want.norm() < 0.3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zero_points_and_scales_are_kept_as_they_are_written(tmp_path: Path, dtype: str) -> None:
    model = save_tiny_checkpoint(tmp_path / "plain", "llama", dtype=torch.bfloat16)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    save_compressed(model, tmp_path / "quantized", **weights, symmetric=False)
    with scaled_products():
        got = model_of(tmp_path / "quantized", dtype=dtype)
    found = kept(got).values()
    assert {one.scales.dtype for one in found} == {torch.bfloat16}
    assert all(one.zeros is not None and one.zeros.min() < one.zeros.max() for one in found)
    want = values_of(model_of(tmp_path / "quantized", dtype=dtype))
    for name, values in values_of(got).items():
        assert torch.equal(values.to(want[name].dtype), want[name]), name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, r"is F8_E4M3 and has no scales"),
        (torch.ones(2, 1), r"scales \[2, 1\] do not fit the weight \[96, 128\]"),
    ],
)
def test_scales_that_do_not_fit_are_named(
    tiny_model: Callable[..., Path], tmp_path: Path, change: torch.Tensor | None, words: str
) -> None:
    path = write_quantized(tiny_model("llama"), tmp_path, fp8_blocks())
    file, name = path / "model.safetensors", "model.layers.0.mlp.down_proj.weight_scale_inv"
    tensors = load_file(file)
    del tensors[name]
    if change is not None:
        tensors[name] = change
    save_file(tensors, file)
    with scaled_products(), pytest.raises(ValueError, match=words):
        model_of(path)


def test_groups_that_the_config_does_not_tell_are_named(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_quantized(tiny_model("llama"), tmp_path, gptq(act_order=True))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["desc_act"] = False
    (path / "config.json").write_text(json.dumps(config))
    with scaled_products(), pytest.raises(ValueError, match=r"its groups are reordered, which"):
        model_of(path)


def test_a_missing_weight_is_named_with_its_scales(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_quantized(tiny_model("llama"), tmp_path, fp8_blocks())
    with scaled_products():
        config, load_config = ModelConfig.from_path(str(path)), LoadConfig(show_progress=False)
        model = build_model(config, load_config)
        slots = WeightSlots(model, lambda: None)
    for name in list(slots.empty()):
        if not name.startswith("model.layers.1.mlp.down_proj"):
            slots.take(name, None, path)
    assert set(slots.empty()) == {
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.mlp.down_proj.weight_scale",
    }
    with pytest.raises(ValueError, match=r"down_proj.weight' is in no weight file \(2 of 35"):
        slots.check_filled("there")


def assert_keeps_what_a_cpu_dequantizes(path: Path, **how: str) -> CausalLM:
    for rank, size in ((1, 2), (0, 1)):
        with scaled_products():
            model = model_of(path, rank, size, **how)
        assert kept(model), "none is kept"
        want = values_of(model_of(path, rank, size, **how))
        for name, values in values_of(model).items():
            assert torch.equal(values.to(want[name].dtype), want[name]), (name, rank, size)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_asked_for_rounds_a_plain_checkpoint(
    tiny_model: Callable[..., Path], family: str
) -> None:
    model = assert_keeps_what_a_cpu_dequantizes(tiny_model(family), quantization="fp8")
    got, exact = values_of(model), values_of(model_of(tiny_model(family)))
    changed = {name for name, values in got.items() if not torch.equal(values, exact[name])}
    assert changed == {merged_name(name) for name in kept(model)}, "others stay exact"
    for name in changed:
        assert (got[name] - exact[name]).norm() < 0.04 * exact[name].norm(), name
