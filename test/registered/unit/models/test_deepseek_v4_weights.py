"""DeepSeek-V4's files: fp8 blocks and 4-bit experts with exponents as scales, tables of experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rigs.models.model_oracle import logits_of_batches
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import get_model
from sglang.srt.model_loader.weight_source import LoadConfig
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

BLOCK = 16
FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
PROJECTIONS = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")
TABLE = "layers.0.ffn.gate.tid2eid"
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Tensors = dict[str, torch.Tensor]


def in_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Elements, scales by block, and the weight that these stand for."""
    grid = [-(-size // BLOCK) for size in weight.shape]
    # Exponents that differ from block to block.
    powers = (torch.arange(grid[0])[:, None] + torch.arange(grid[1])) % 3 - 9
    scales = torch.exp2(powers.float())
    whole = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    whole = whole[: weight.shape[0], : weight.shape[1]]
    elements = (weight / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
    return elements, scales.to(torch.float8_e8m0fnu), elements.float() * whole


def in_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Likewise, with two elements in a byte, the first in the low bits, and groups of 32."""
    powers = torch.arange(weight.shape[0])[:, None] % 3 + torch.arange(weight.shape[1] // 32) - 5
    scales = torch.exp2(powers.float())
    whole = scales.repeat_interleave(32, 1)
    nearest = ((weight / whole).abs().unsqueeze(-1) - VALUES).abs().argmin(-1)
    bits = nearest + 8 * (weight < 0)
    pairs = (bits[:, ::2] | bits[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    value = VALUES[nearest] * whole * torch.where(weight < 0, -1.0, 1.0)
    return pairs, scales.to(torch.float8_e8m0fnu), value


def write_quantized(path: Path, expert_dtype: str) -> Tensors:
    """Quantize a tiny checkpoint; return the tensors that it stands for."""
    file = path / "model.safetensors"
    stored, meant = {}, {}
    for name, tensor in load_file(file).items():
        layer, _, kind = name.rpartition(".")
        is_compressor = ".compressor." in name
        if kind != "weight" or is_compressor or layer.rpartition(".")[2] not in PROJECTIONS:
            stored[name] = meant[name] = tensor
            continue
        is_fp4 = expert_dtype == "fp4" and ".experts." in name
        found = in_fp4(tensor) if is_fp4 else in_fp8(tensor)
        stored[name], stored[f"{layer}.scale"], meant[name] = found
    save_file(stored, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    fields = {"expert_dtype": expert_dtype, "quantization_config": FP8}
    (path / "config.json").write_text(json.dumps(config | fields))
    return meant


@pytest.mark.parametrize("expert_dtype", ["fp8", "fp4"])
def test_quantized_files_give_the_logits_of_what_they_stand_for(
    tmp_path: Path, expert_dtype: str
) -> None:
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    for path in (quantized, plain):
        save_tiny_checkpoint(path, "deepseek_v4")
    meant = write_quantized(quantized, expert_dtype)
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    got, want = (logits_of_batches(StepDriver(path, page_size=16)) for path in (quantized, plain))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_tensors_of_layers_that_draft_are_not_read(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "deepseek_v4", num_nextn_predict_layers=1)
    file = tmp_path / "model.safetensors"
    drafts = {"mtp.0.attn.wq_a.weight": torch.zeros(2, 2)}
    save_file(load_file(file) | drafts, file, {"format": "pt"})
    get_model(ModelConfig.from_path(str(tmp_path)), LoadConfig(show_progress=False))
    with pytest.raises(ValueError, match="--speculative-algorithm: DeepseekV4ForCausalLM has no"):
        ModelConfig.from_path(str(tmp_path), has_draft_layer=True)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda table: table.fill_(8), id="too-large"),
        pytest.param(lambda table: table.fill_(-1), id="negative"),
        pytest.param(lambda table: table.fill_(3), id="twice"),
        pytest.param(lambda table: table.float(), id="no-integers"),
    ],
)
def test_a_table_that_names_no_experts_is_refused_by_name(
    tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    save_tiny_checkpoint(tmp_path, "deepseek_v4")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {TABLE: change(tensors[TABLE].clone())}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"'{TABLE}' of .* must have integers from 0 to 7, each"):
        get_model(ModelConfig.from_path(str(tmp_path)), LoadConfig(show_progress=False))


@pytest.mark.parametrize("quantization", [None, FP8 | {"expert_dtype": "fp4"}])
def test_random_weights_serve(tmp_path: Path, quantization: dict[str, Any] | None) -> None:
    save_tiny_checkpoint(tmp_path, "deepseek_v4", head_dim=32, partial_rotary_factor=0.25)
    config = json.loads((tmp_path / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (tmp_path / "config.json").write_text(json.dumps(config))
    driver = StepDriver(tmp_path, page_size=16, load_format="dummy")
    assert logits_of_batches(driver).isfinite().all()
