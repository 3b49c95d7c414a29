"""Checkpoints in published weight formats load as the values that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

from rigs.caches.memory_ranks import PlaceInGroup
from rigs.models.compressed_checkpoints import save_compressed
from rigs.models.model_oracle import assert_logits_of_batches
from rigs.models.quantized_checkpoints import (
    Format,
    awq,
    fp8_blocks,
    fp8_per_tensor,
    gptq,
    write_quantized,
)
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import get_model
from sglang.srt.model_loader.weight_files import weights_identity
from sglang.srt.model_loader.weight_source import LoadConfig
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

FAMILIES = ("llama", "qwen3_moe", "deepseek_v3", "deepseek_v32", "qwen3_next", "qwen3_5_moe")
FORMATS: dict[str, Callable[[], Format]] = {
    "fp8-blocks-of-128": fp8_blocks,
    "fp8-blocks-of-20-by-24": lambda: fp8_blocks(20, 24),
    "fp8-per-tensor": fp8_per_tensor,
    "awq": awq,
    "gptq-4": gptq,
    "gptq-8-whole": lambda: gptq(8, -1),
    "gptq-4-reordered": lambda: gptq(act_order=True),
    "gptq-v2": lambda: gptq(version=2),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Path of a tiny checkpoint of a family, without a weight format."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("plain")

    def path(family: str) -> Path:
        found = root / family
        if not found.exists():
            save_tiny_checkpoint(found, family)
        return found

    return path


def weights(path: Path, rank: int = 0, size: int = 1) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of one rank."""
    load_config = LoadConfig(tp_group=PlaceInGroup(rank, size), show_progress=False)
    model = get_model(ModelConfig.from_path(str(path)), load_config)
    return ((name, weight.data) for name, weight in model.named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_rank_has_the_values_that_the_format_stands_for(
    plain: Callable[[str], Path], tmp_path: Path, family: str, name: str
) -> None:
    """Ranks cut blocks and words anywhere; tensors of one weight are in different files."""
    path = write_quantized(plain(family), tmp_path, FORMATS[name](), files=2)
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        for (key, got), (_, want) in zip(
            weights(path, rank, size), weights(tmp_path / "plain", rank, size), strict=True
        ):
            assert torch.equal(got, want), (key, rank, size)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_fp8_blocks_compute_what_transformers_computes(
    plain: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    # Blocks that divide the weights: transformers cuts others at wrong places.
    path = write_quantized(plain(family), tmp_path, fp8_blocks(8, 8))
    oracle = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32
    )
    assert_logits_of_batches(oracle, StepDriver(path, page_size=4))


PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FP8 = {"num_bits": 8, "type": "float"}
COMPRESSED: dict[str, dict[str, Any]] = {
    "int4": PACKED,
    "int4-asymmetric": {**PACKED, "symmetric": False},
    "int8-channel": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "fp8-channel": {**FP8, "strategy": "channel"},
    "fp8-tensor": {**FP8, "strategy": "tensor"},
    "fp8-block": {**FP8, "strategy": "block", "block_structure": [8, 32]},
}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("llama", name) for name in COMPRESSED),
        # transformers reads no packed experts.
        *(("deepseek_v2", name) for name in COMPRESSED if name.startswith("fp8")),
    ],
)
def test_compressed_tensors_compute_what_transformers_computes(
    tmp_path: Path, family: str, name: str
) -> None:
    ranks: dict[str, Any]
    ranks = {"q_lora_rank": 32, "v_head_dim": 16} if family == "deepseek_v2" else {}
    model = save_tiny_checkpoint(tmp_path / "plain", family, **ranks)
    save_compressed(model, tmp_path / "quantized", **COMPRESSED[name])
    oracle = AutoModelForCausalLM.from_pretrained(
        tmp_path / "quantized",
        quantization_config=CompressedTensorsConfig(run_compressed=False),
        dtype=torch.float32,
    )
    assert_logits_of_batches(oracle, StepDriver(tmp_path / "quantized", page_size=4))


def test_the_store_tells_formats_apart(plain: Callable[[str], Path], tmp_path: Path) -> None:
    path = write_quantized(plain("llama"), tmp_path, fp8_blocks())
    identities = {
        weights_identity(str(one), load_format="auto", cache_dir=tmp_path)
        for one in (path, tmp_path / "plain", plain("llama"))
    }
    assert len(identities) == 3


def test_a_bias_of_zeros_that_gptq_wrote_is_left_out(
    plain: Callable[[str], Path], tmp_path: Path
) -> None:
    path = write_quantized(plain("llama"), tmp_path, gptq())
    name = "model.layers.0.mlp.down_proj.bias"
    add(path, {name: torch.zeros(96)})
    assert name not in dict(weights(path))
    add(path, {name: torch.ones(96)})
    with pytest.raises(ValueError, match=f"{name}' has no place in LlamaForCausalLM"):
        dict(weights(path))


LAYER = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("fp8-blocks-of-128", {f"{LAYER}.weight_scale_inv": None}, r"is F8_E4M3 and has no scales"),
        (
            "fp8-blocks-of-128",
            {f"{LAYER}.weight_scale_inv": torch.ones(2, 1)},
            r"scales \[2, 1\] do not fit the weight \[96, 128\] in blocks of 128 x 128",
        ),
        ("gptq-4", {f"{LAYER}.scales": None}, r"tensor '.*scales' is missing"),
        ("gptq-4", {f"{LAYER}.scales": torch.ones(3, 96)}, r"scales \[96, 3\] must be \[96, 4\]"),
        (
            "awq",
            {f"{LAYER}.qzeros": torch.zeros(3, 12, dtype=torch.int32)},
            r"zero points \[96, 3\] must be \[96, 4\]",
        ),
        (
            "gptq-4",
            {f"{LAYER}.g_idx": torch.full((128,), 4, dtype=torch.int32)},
            r"groups must name one of 4 groups for each of 128 inputs",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    plain: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    changes: dict[str, torch.Tensor | None],
    words: str,
) -> None:
    path = write_quantized(plain("llama"), tmp_path, FORMATS[name]())
    add(path, changes)
    with pytest.raises(ValueError, match=words) as error:
        dict(weights(path))
    assert LAYER in str(error.value)
    assert "quantization_config in config.json are not of the same model" in str(error.value)


def add(path: Path, tensors: dict[str, Any]) -> None:
    """Change tensors of a checkpoint; None removes one."""
    file = path / "model.safetensors"
    found = {**load_file(file), **tensors}
    save_file({name: one for name, one in found.items() if one is not None}, file)


def test_pickled_files_are_refused(plain: Callable[[str], Path], tmp_path: Path) -> None:
    path = write_quantized(plain("llama"), tmp_path, fp8_blocks())
    config = ModelConfig.from_path(str(path))
    with pytest.raises(ValueError, match="read from safetensors files only"):
        get_model(config, LoadConfig(load_format="pt", show_progress=False))


def test_fp8_without_a_format_is_refused(plain: Callable[[str], Path], tmp_path: Path) -> None:
    """Its bytes would be taken for values without their scales."""
    path = write_quantized(plain("llama"), tmp_path, fp8_blocks())
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"has no place|has no scales"):
        dict(weights(path))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
