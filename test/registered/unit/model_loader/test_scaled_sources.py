"""Quantized weights that stay so in memory: random ones, those of a seed, and their identity."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.caches.cache_rig import CacheRig, Reused
from rigs.caches.memory_ranks import PlaceInGroup
from rigs.caches.tier_rigs import three_tiers
from rigs.models.quantized_checkpoints import awq, fp8_blocks, mxfp4, write_quantized
from rigs.models.scaled_products import dequantized, scaled_products, scaled_weights
from rigs.models.tiny_models import save_tiny_checkpoint, tiny_config
from rigs.models.weight_rig import IDENTITY, weight_rig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.quantization_config import quantization_of
from sglang.srt.layers.placement import WeightSlot
from sglang.srt.layers.triton_ops.arguments import ScaledWeight
from sglang.srt.model_loader import loader
from sglang.srt.model_loader.loader import build_model, get_model, load_weights
from sglang.srt.model_loader.remote_weights import RemoteInstanceWeights
from sglang.srt.model_loader.rounded_weights import rounded
from sglang.srt.model_loader.seed_answer import formats_of_seed
from sglang.srt.model_loader.weight_source import LoadConfig, SeedAddress
from sglang.srt.models.causal_lm import CausalLM
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
}


def config_of(
    path: Path, family: str, dtype: str, quantization: dict[str, Any] | None, **fields: Any
) -> Path:
    """A directory with a config.json alone."""
    config = tiny_config(family, **fields)
    config.architectures = [NAMES[family]]
    config.dtype = dtype
    config.save_pretrained(path)
    file = path / "config.json"
    values = json.loads(file.read_text())
    if quantization is not None:
        values["quantization_config"] = quantization
    file.write_text(json.dumps(values))
    return path


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
NAMES = {**ARCHITECTURES, "gpt_oss": "GptOssForCausalLM"}


def dummy_of(path: Path) -> tuple[dict[str, torch.Tensor], str, int]:
    """Values of a model of random weights, their identity, and the number of those with scales."""
    load_config = LoadConfig(load_format="dummy", show_progress=False)
    config = ModelConfig.from_path(str(path))
    model = build_model(config, load_config)
    source = load_weights(model, config, load_config)
    found: dict[str, torch.Tensor] = {}
    count = 0
    for name, weight in scaled_weights(model):
        if name.startswith("model") and "products" in name:
            continue
        if isinstance(weight, ScaledWeight):
            count += 1
            weight = dequantized(weight).to(config.dtype)
        found[name] = weight
    return found, source.identity(), count


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("quantization", [FP8, AWQ], ids=["fp8", "int4"])
def test_random_weights_are_rounded_to_the_stated_format(
    tmp_path: Path, family: str, quantization: dict[str, Any]
) -> None:
    plain = config_of(tmp_path / "plain", family, "bfloat16", None)
    path = config_of(tmp_path / "quantized", family, "bfloat16", quantization)
    with scaled_products():
        got, identity, count = dummy_of(path)
        exact, other, none = dummy_of(plain)
    want, same, _ = dummy_of(path)
    assert count and not none and identity == same != other
    worst = 0.04 if quantization is FP8 else 0.15
    for name, values in got.items():
        assert torch.equal(values, want[name]), name
        error = (values.float() - exact[name].float()).norm()
        assert error <= worst * exact[name].float().norm(), name


def test_random_experts_are_4_bit_floats(tmp_path: Path) -> None:
    """All else is plain, as in published checkpoints."""
    quantization = {"quant_method": "mxfp4"}
    plain = config_of(tmp_path / "plain", "gpt_oss", "bfloat16", None)
    path = config_of(tmp_path / "quantized", "gpt_oss", "bfloat16", quantization)
    with scaled_products():
        got, identity, count = dummy_of(path)
        exact, other, _ = dummy_of(plain)
    want, same, _ = dummy_of(path)
    assert count == 8 and identity == same != other
    for name, values in got.items():
        assert torch.equal(values, want[name]), name
        error = (values.float() - exact[name].float()).norm() / exact[name].float().norm()
        assert 0.05 < error < 0.15 if ".experts." in name else not error, (name, error)


def test_4_bit_floats_are_the_nearest() -> None:
    """Between two of them, the one with even bits; the scale puts the greatest number below 8."""
    numbers = [7.9, 5.0, 2.5, 0.25, 0.75, 1.25, 1.75, 3.5, -5.0, -0.3, 0.2, 2.6]
    want = [6.0, 4.0, 2.0, 0.0, 1.0, 1.0, 2.0, 4.0, -4.0, -0.5, 0.0, 3.0]
    config = quantization_of({"quantization_config": {"quant_method": "mxfp4"}})
    assert config is not None
    for factor in (1.0, 2.0**-9):
        values = torch.zeros(2, 64)
        values[1, 32 : 32 + len(numbers)] = torch.tensor(numbers) * factor
        found = rounded(values, config, torch.float32, torch.uint8)
        got = found[slice(None), slice(None)]
        assert (got[1, 32 : 32 + len(want)] / factor).tolist() == want
        assert got.count_nonzero() == 10
    with pytest.raises(ValueError, match="groups of 32 inputs: leave quantization_config out"):
        rounded(torch.zeros(2, 48), config, torch.float32, torch.uint8)


@pytest.mark.parametrize("family", ["llama", "deepseek_v32"])
@pytest.mark.parametrize("size", [2, 4])
def test_random_fp8_of_a_rank_is_its_slice(tmp_path: Path, family: str, size: int) -> None:
    """Elements and scales; of four ranks some have parts of blocks."""
    wide = WIDE if family == "llama" else {**WIDE, "moe_intermediate_size": 512, "v_head_dim": 64}
    path = config_of(tmp_path, family, "bfloat16", FP8, **wide)
    config = ModelConfig.from_path(str(path))

    def slots(group: PlaceInGroup) -> dict[str, WeightSlot]:
        load_config = LoadConfig(load_format="dummy", tp_group=group, show_progress=False)
        return dict(get_model(config, load_config).weight_slots())

    with scaled_products():
        whole = slots(PlaceInGroup(0, 1))
        for rank in (0, size - 1):
            compared = 0
            for name, slot in slots(PlaceInGroup(rank, size)).items():
                compared += slot.dest.dtype == torch.float8_e4m3fn
                want = whole[name].copies[0].float()
                if slot.shares:
                    # A rank without whole blocks has a copy of the scale for each output.
                    repeats = slot.shape[slot.dim] // want.shape[slot.dim]
                    want = want.repeat_interleave(repeats, slot.dim)
                    rows = [want.narrow(slot.dim, a, b - a) for a, b in slot.ranges]
                    want = torch.cat(rows, slot.dim)
                assert torch.equal(slot.copies[0].float(), want), name
            assert compared > 10


@pytest.fixture(scope="module")
def plain(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", **WIDE)


def assert_equal(got: CausalLM, want: CausalLM) -> None:
    pairs = zip(got.named_parameters(), want.named_parameters(), strict=True)
    for (name, one), (other_name, other) in pairs:
        assert name == other_name
        assert torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)), name


@pytest.mark.usefixtures("on_a_cpu_over_tcp")
@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("llama", fp8_blocks),
        ("qwen3_moe", awq),
        ("deepseek_v3", fp8_blocks),
        ("gpt_oss", mxfp4),
    ],
)
def test_servers_read_from_a_seed_what_it_keeps(
    tmp_path: Path, family: str, form: Callable[[], Any]
) -> None:
    save_tiny_checkpoint(tmp_path / "written", family)
    path = write_quantized(tmp_path / "written", tmp_path, form())
    with scaled_products(), weight_rig(path, 2) as rig:
        for rank in range(2):
            model, source = rig.read(rank, 2)
            assert_equal(model, rig.load_rank(rank, 2))
            assert source.identity() == IDENTITY
            assert any(isinstance(one, ScaledWeight) for _, one in scaled_weights(model))


@pytest.mark.usefixtures("on_a_cpu_over_tcp")
def test_another_number_of_ranks_reads_what_has_the_same_blocks(
    plain: Path, tmp_path: Path
) -> None:
    """Two ranks have whole blocks each. Four ranks do not."""
    path = write_quantized(plain, tmp_path, fp8_blocks())
    with scaled_products(), weight_rig(path, 1) as rig:
        model, _ = rig.read(1, 2)
        assert_equal(model, rig.load_rank(1, 2))
        with pytest.raises(ValueError, match=r"tensor '.*qkv_proj|_proj.weight_scale' is .* and"):
            rig.read(3, 4)


@pytest.mark.usefixtures("on_a_cpu_over_tcp")
@pytest.mark.parametrize(
    ("family", "form", "count"), [("llama", fp8_blocks, 14), ("gpt_oss", mxfp4, 96)]
)
def test_the_formats_are_those_of_the_seed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    form: Callable[[], Any],
    count: int,
) -> None:
    """The reader needs a config.json alone."""
    save_tiny_checkpoint(tmp_path / "written", family, **(WIDE if family == "llama" else {}))
    path = write_quantized(tmp_path / "written", tmp_path, form())
    with scaled_products(), weight_rig(path, 2) as rig:
        tensors = rig.client.told[0].weights.tensors
        formats = formats_of_seed(tensors)
        want = build_model(rig.config, LoadConfig())

        class Seed:
            def formats(self) -> Any:
                return formats.get

        monkeypatch.setattr(loader, "_make_source", lambda *args: Seed())
        got = build_model(rig.config, LoadConfig(load_format="remote_instance"))
    shapes = [[(one.dtype, one.shape) for one in model.parameters()] for model in (got, want)]
    assert shapes[0] == shapes[1]
    assert len(formats) == count


def test_a_reader_does_not_round_what_it_reads(plain: Path) -> None:
    config = ModelConfig.from_path(str(plain), quantization="fp8")
    load_config = LoadConfig(
        load_format="remote_instance", seed_instance=SeedAddress(host="127.0.0.1", port=1)
    )
    with pytest.raises(ValueError, match="--quantization fp8 rounds weights at load, and"):
        RemoteInstanceWeights(config, load_config)


def identity_of(path: Path, quantization: str | None, load_format: str) -> str:
    """Identity of the weights of a server with these flags."""
    load_config = LoadConfig(load_format=load_format, show_progress=False)
    config = ModelConfig.from_path(str(path), quantization=quantization)
    return load_weights(build_model(config, load_config), config, load_config).identity()


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_pages_of_rounded_weights_are_not_read_for_plain_ones(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_format: str
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    exact, rounded = (identity_of(plain, asked, load_format) for asked in (None, "fp8"))
    settings = three_tiers().hi_settings()

    def server(identity: str) -> CacheRig:
        return CacheRig(l1_pages=32, settings=settings, weights_identity=identity)

    writer = server(rounded)
    writer.run(range(32))
    writer.settle()
    assert server(exact).run(range(33)) == Reused()
    assert server(identity_of(plain, "fp8", load_format)).run(range(33)) == Reused(storage=32)


def test_pickled_files_are_not_rounded(plain: Path) -> None:
    config = ModelConfig.from_path(str(plain), quantization="fp8")
    with pytest.raises(ValueError, match="read from safetensors files only"):
        get_model(config, LoadConfig(load_format="pt", show_progress=False))
