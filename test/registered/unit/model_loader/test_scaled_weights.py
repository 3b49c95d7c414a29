"""Quantized weights that stay so in memory stand for the values that are otherwise dequantized."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rigs.caches.memory_ranks import PlaceInGroup
from rigs.models.quantized_checkpoints import (
    Format,
    awq,
    fp8_blocks,
    fp8_per_tensor,
    gptq,
    write_quantized,
)
from rigs.models.scaled_products import dequantized, scaled_products, scaled_weights
from rigs.models.tiny_models import save_tiny_checkpoint
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.triton_ops.arguments import ScaledWeight
from sglang.srt.model_loader.loader import get_model
from sglang.srt.model_loader.weight_source import LoadConfig
from sglang.srt.models.causal_lm import CausalLM
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

FAMILIES = ("llama", "qwen3_moe", "deepseek_v3", "deepseek_v32", "qwen3_next", "qwen3_5_moe")
FORMATS: dict[str, Callable[[], Format]] = {
    "fp8-blocks": fp8_blocks,
    "fp8-per-tensor": fp8_per_tensor,
    "awq": awq,
    "gptq": gptq,
    "gptq-whole": lambda: gptq(4, -1),
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


def model_of(path: Path, rank: int = 0, size: int = 1, **fields: str) -> CausalLM:
    """A rank's share of a model."""
    group = PlaceInGroup(rank, size)
    load_config = LoadConfig(tp_group=group, show_progress=False, **fields)  # type: ignore[arg-type]
    return get_model(ModelConfig.from_path(str(path)), load_config)


def kept(model: CausalLM) -> dict[str, ScaledWeight]:
    found = scaled_weights(model)
    return {name: weight for name, weight in found if isinstance(weight, ScaledWeight)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_rank_keeps_what_a_cpu_dequantizes(
    plain: Callable[[str], Path], tmp_path: Path, family: str, name: str
) -> None:
    """Tensors of one weight are in different files."""
    path = write_quantized(plain(family), tmp_path, FORMATS[name](), files=2)
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        with scaled_products():
            model = model_of(path, rank, size)
        assert kept(model), "none is kept"
        got = dict(scaled_weights(model))
        for key, want in scaled_weights(model_of(path, rank, size)):
            values = got[key]
            if isinstance(values, ScaledWeight):
                values = dequantized(values)
            assert isinstance(want, torch.Tensor)
            assert torch.equal(values, want), (key, rank, size)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
