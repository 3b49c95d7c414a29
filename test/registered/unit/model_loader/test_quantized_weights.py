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
    mxfp4,
    write_quantized,
)
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from rigs.nightly_cases import nightly
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import build_model, get_model, load_weights
from sglang.srt.model_loader.weight_files import weights_identity
from sglang.srt.model_loader.weight_source import LoadConfig
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

FAMILIES = (
    "llama", "qwen3_moe", "deepseek_v3", "deepseek_v32", "kimi_linear", "qwen3_next",
    "qwen3_5_moe", "nemotron_h",
)  # fmt: skip
FORMATS: dict[str, Callable[[], Format]] = {
    "fp8-blocks-of-128": fp8_blocks,
    "fp8-blocks-of-20-by-24": lambda: fp8_blocks(20, 24),
    "fp8-per-tensor": fp8_per_tensor,
    "awq": awq,
    "gptq-4": gptq,
    "gptq-8-whole": lambda: gptq(8, -1),
    "gptq-4-reordered": lambda: gptq(act_order=True),
    "gptq-v2": lambda: gptq(version=2),
    # Writers of symmetric weights disagree on what the files hold; readers do not look.
    "gptq-symmetric-7": lambda: gptq(stored_zero=7),
    "gptq-symmetric-8": lambda: gptq(stored_zero=8),
    "gptq-v2-symmetric-7": lambda: gptq(version=2, stored_zero=7),
    "gptq-8-symmetric-128": lambda: gptq(8, stored_zero=128),
}


def weights(path: Path, rank: int = 0, size: int = 1) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of one rank."""
    load_config = LoadConfig(tp_group=PlaceInGroup(rank, size), show_progress=False)
    model = get_model(ModelConfig.from_path(str(path)), load_config)
    return ((name, weight.data) for name, weight in model.named_parameters())


@pytest.mark.parametrize(
    ("family", "name"),
    [
        # In CI every family has half of the formats, and every format half of the families.
        nightly(family, name) if (row + column) % 2 and family != "llama" else (family, name)
        for row, family in enumerate(FAMILIES)
        for column, name in enumerate(FORMATS)
        if "symmetric" not in name or family == "llama"
    ],
)
def test_every_rank_has_the_values_that_the_format_stands_for(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, name: str
) -> None:
    """Ranks cut blocks and words anywhere; tensors of one weight are in different files."""
    path = write_quantized(tiny_model(family), tmp_path, FORMATS[name](), files=2)
    assert_equal_weights(path, tmp_path / "plain")


def test_every_rank_has_the_values_of_4_bit_floats(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The plain twin has its inputs before its outputs."""
    path = write_quantized(tiny_model("gpt_oss"), tmp_path, mxfp4(), files=2)
    assert_equal_weights(path, tmp_path / "plain")


EXPERTS = "model.layers.0.mlp.experts.down_proj"


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.full(shape, 127, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"blocks": bytes_of(8, 96, 4, 8)},
            r"_blocks' has shape \[8, 96, 4, 8\], config.json asks",
        ),
        (
            {"blocks": bytes_of(8, 96, 2, 16)},
            r"_blocks' has shape \[8, 96, 64\], .* \[8, 96, 128\]",
        ),
        (
            {"blocks": bytes_of(8, 96, 64)},
            r"_blocks' has shape \[8, 96, 64\], config.json asks for",
        ),
        ({"blocks": torch.zeros(8, 96, 4, 16)}, r"_blocks': elements of F32 must be U8"),
        ({"scales": None}, r"_blocks': tensor '.*_scales' is missing"),
        ({"scales": bytes_of(8, 96, 2)}, r"_blocks': scales \[8, 96, 2\] must be \[8, 96, 4\]"),
        ({"scales": torch.ones(8, 96, 4)}, r"_scales' has scales of torch.float32, which must be"),
        (
            {"scales": bytes_of(8, 96, 4) * 2 + 1},
            r"_scales' has 255, which is NaN, for 3072 of 3072",
        ),
        (
            {"scales": bytes_of(8, 96, 4) + 34},
            r"_scales' has more than 160, which is 2\^33, for 3072 of 3072 scales",
        ),
    ],
)
def test_4_bit_floats_that_do_not_fit_are_named(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    changes: dict[str, torch.Tensor | None],
    words: str,
) -> None:
    path = write_quantized(tiny_model("gpt_oss"), tmp_path, mxfp4())
    add(path, {f"{EXPERTS}_{name}": one for name, one in changes.items()})
    with pytest.raises(ValueError, match=words) as error:
        dict(weights(path))
    text = str(error.value)
    assert EXPERTS in text and "are not of the same model" in text and "\n" not in text


def assert_equal_weights(path: Path, plain: Path) -> None:
    """Every rank has the same weights of both checkpoints."""
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        for (key, got), (_, want) in zip(
            weights(path, rank, size), weights(plain, rank, size), strict=True
        ):
            assert torch.equal(got, want), (key, rank, size)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_fp8_blocks_compute_what_transformers_computes(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    # Blocks that divide the weights: transformers cuts others at wrong places.
    path = write_quantized(tiny_model(family), tmp_path, fp8_blocks(8, 8))
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


def test_the_store_tells_formats_apart(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = write_quantized(tiny_model("llama"), tmp_path, fp8_blocks())
    identities = {
        weights_identity(str(one), load_format="auto", cache_dir=tmp_path)
        for one in (path, tmp_path / "plain", tiny_model("llama"))
    }
    assert len(identities) == 3


def test_a_bias_of_zeros_that_gptq_wrote_is_left_out(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_quantized(tiny_model("llama"), tmp_path, gptq())
    name = "model.layers.0.mlp.down_proj.bias"
    add(path, {name: torch.zeros(96)})
    assert name not in dict(weights(path))
    add(path, {name: torch.ones(96)})
    with pytest.raises(ValueError, match=f"{name}' has no place in LlamaForCausalLM"):
        dict(weights(path))


def test_groups_of_minus_one_are_consecutive(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Tools write them for weights whose inputs they did not reorder."""
    path = write_quantized(tiny_model("llama"), tmp_path, gptq())
    tensors = load_file(path / "model.safetensors")
    names = [name for name in tensors if name.endswith("g_idx")]
    add(path, {name: torch.full_like(tensors[name], -1) for name in names})
    assert_equal_weights(path, tmp_path / "plain")
    # If some are not, all are groups.
    mixed = torch.full((128,), -1, dtype=torch.int32)
    mixed[0] = 0
    add(path, {f"{LAYER}.g_idx": mixed})
    with pytest.raises(ValueError, match="groups must name one of 4 groups for each of 128"):
        dict(weights(path))
    for dtype in (torch.float32, torch.complex64):
        add(path, {f"{LAYER}.g_idx": torch.zeros(128, dtype=dtype)})
        with pytest.raises(ValueError, match=f"{LAYER}.g_idx' has groups of {dtype}"):
            dict(weights(path))


def test_zero_points_that_no_config_promises_may_be_absent(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Symmetric weights need none."""
    path = write_quantized(tiny_model("llama"), tmp_path, gptq(stored_zero=8))
    tensors = load_file(path / "model.safetensors")
    add(path, {name: None for name in tensors if name.endswith("qzeros")})
    assert_equal_weights(path, tmp_path / "plain")


def test_zero_points_of_symmetric_integers_are_not_read(tmp_path: Path) -> None:
    model = save_tiny_checkpoint(tmp_path / "plain", "llama")
    path = tmp_path / "quantized"
    save_compressed(model, path, num_bits=4, type="int", strategy="group", group_size=32)
    want = dict(weights(path))
    zeros = torch.ones(12, 4, dtype=torch.int32)
    add(path, {f"{LAYER}.weight_zero_point": zeros})
    got = dict(weights(path))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_the_store_does_not_mix_what_releases_read_of_symmetric_weights(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Earlier ones read zero points that the config does not mean."""
    path = write_quantized(tiny_model("llama"), tmp_path, gptq(stored_zero=8))
    config, load_config = ModelConfig.from_path(str(path)), LoadConfig(show_progress=False)
    source = load_weights(build_model(config, load_config), config, load_config)
    assert source.identity() != weights_identity(str(path), load_format="auto", cache_dir=tmp_path)


LAYER = "model.layers.0.mlp.down_proj"
SCALES = "gptq-4", f"{LAYER}.scales", (4, 96), torch.float16
SYMMETRIC = "gptq-symmetric-8", *SCALES[1:]
FP8_SCALES = "fp8-blocks-of-128", f"{LAYER}.weight_scale_inv", (1, 1), torch.float32


@pytest.mark.parametrize(
    ("form", "value", "words"),
    [
        *(
            (form, value, f"'{form[1]}' has scales from .* must be finite and")
            for form in (SCALES, SYMMETRIC, FP8_SCALES)
            for value in (float("nan"), float("inf"), -float("inf"), 0.0)
        ),
        (SCALES, -1.0, r"from -1 to 1, which must be finite and above 0: copy the file again"),
        (FP8_SCALES, -1.0, r"from -1 to -1, which must be finite and above 0"),
        (FP8_SCALES, 1, r"has scales of torch.int64"),
    ],
)
def test_scales_that_no_quantizer_writes_are_refused(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    form: tuple[str, str, tuple[int, int], torch.dtype],
    value: float,
    words: str,
) -> None:
    name, tensor, shape, dtype = form
    path = write_quantized(tiny_model("llama"), tmp_path, FORMATS[name]())
    scales = torch.ones(shape, dtype=torch.int64 if isinstance(value, int) else dtype)
    scales[-1, -1] = value
    add(path, {tensor: scales})
    with pytest.raises(ValueError, match=words) as error:
        dict(weights(path))
    assert LAYER in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "tensor", "dtype", "words"),
    [
        ("fp8-per-tensor", "weight", torch.float8_e5m2, "elements of F8_E5M2 must be F8_E4M3"),
        ("fp8-blocks-of-128", "weight", torch.int8, "elements of I8 must be F8_E4M3"),
        ("fp8-blocks-of-128", "weight", torch.bfloat16, "elements of BF16 must be F8_E4M3"),
        ("awq", "qweight", torch.float32, "elements of F32 must be I32"),
        ("gptq-4", "qweight", torch.int64, "elements of I64 must be I32"),
        ("gptq-4", "qzeros", torch.float32, "packed zero points, int32 in two dimensions, not"),
    ],
)
def test_elements_of_another_type_are_refused(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    name: str,
    tensor: str,
    dtype: torch.dtype,
    words: str,
) -> None:
    path = write_quantized(tiny_model("llama"), tmp_path, FORMATS[name]())
    key = f"{LAYER}.{tensor}"
    add(path, {key: load_file(path / "model.safetensors")[key].to(dtype)})
    with pytest.raises(ValueError, match=words) as error:
        dict(weights(path))
    assert LAYER in str(error.value) and "\n" not in str(error.value)


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
        ("gptq-4", {f"{LAYER}.qzeros": None}, r"its zero points are missing, which quantization_c"),
        ("awq", {f"{LAYER}.qzeros": None}, r"its zero points are missing, which quantization_c"),
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
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    name: str,
    changes: dict[str, torch.Tensor | None],
    words: str,
) -> None:
    path = write_quantized(tiny_model("llama"), tmp_path, FORMATS[name]())
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


def test_pickled_files_are_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = write_quantized(tiny_model("llama"), tmp_path, fp8_blocks())
    config = ModelConfig.from_path(str(path))
    with pytest.raises(ValueError, match="read from safetensors files only"):
        get_model(config, LoadConfig(load_format="pt", show_progress=False))


def test_fp8_without_a_format_is_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Its bytes would be taken for values without their scales."""
    path = write_quantized(tiny_model("llama"), tmp_path, fp8_blocks())
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"has no place|has no scales"):
        dict(weights(path))
