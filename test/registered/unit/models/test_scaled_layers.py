"""Models whose weights stay in fp8, against the definition: dequantized weights, activations
rounded to fp8, all else in fp32.

Rounding to three bits turns the least difference into a coarse one. A model in bf16 is therefore as
far from the definition in fp32 as the definition is from a model that rounds no activations. Two
right models are as far from one another. The tests therefore compare products on equal operands,
layers on equal inputs with equal kernels around the products, and whole models by their distances.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch

from rigs.layers.forced_layers import layer_errors, layers_recorded, steps_of_every_size
from rigs.models import scaled_products as products
from rigs.models.quantized_checkpoints import fp8_blocks, write_quantized
from rigs.models.scaled_products import scaled_products, scaled_weights
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.layers.triton_ops.arguments import ScaledWeight
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")
register_cuda_ci(est_time=90, suite="base-b-test-1-gpu-large")

DEVICE: Final = detect_device()
needs_a_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")

EXPERTS: Final = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 128}
LATENT: Final = {
    "hidden_size": 256,
    "q_lora_rank": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "qwen3": {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512},
    "qwen3_moe": EXPERTS,
    "qwen3_next": {**EXPERTS, "shared_expert_intermediate_size": 128},
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
}
PRODUCT: Final = 0.005
"""Bound of a product's error: the result is rounded to bf16, and tensor cores add with 14 bits."""
EXPERT: Final = 0.02
"""Bound of the error of experts, which round to fp8 between two products."""
LAYER: Final = 0.1
"""Bound of a layer's error, the median over tokens. A product's last bit decides how some
activations of the next one are rounded: layers differ by up to 0.072 on an H200."""
AS_FAR: Final = 1.4
"""Bound of a ratio of distances that should be equal; a bit less in each activation doubles it."""


@pytest.fixture(name="path")
def make_path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    save_tiny_checkpoint(tmp_path / "written", request.param, **FAMILIES[request.param])
    return write_quantized(tmp_path / "written", tmp_path, fp8_blocks())


def driver_of(path: Path, dtype: str) -> StepDriver:
    driver = StepDriver(path, page_size=64, device=DEVICE, dtype=dtype, disable_cuda_graph=True)
    kept = [weight for _, weight in scaled_weights(driver.runner.model)]
    assert any(isinstance(weight, ScaledWeight) for weight in kept)
    return driver


def reference_logits(path: Path, dtype: str, *, rounds: bool) -> torch.Tensor:
    with scaled_products(rounds=rounds):
        return steps_of_every_size(driver_of(path, dtype))


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative distance of logits: the median over tokens."""
    return float(((one - other).norm(dim=-1) / other.norm(dim=-1)).median())


def farther_than_the_definition(path: Path, logits: torch.Tensor) -> float:
    """The larger ratio of the distances of `logits` and of the definition: from a model that rounds
    no activations; and from one another, where independent errors add up to the root of 2."""
    exact = reference_logits(path, "float32", rounds=False)
    right = reference_logits(path, "float32", rounds=True)
    unit = distance(right, exact)
    return max(distance(logits, exact) / unit, distance(logits, right) / unit / 2**0.5)


def with_a_bit_less(x: torch.Tensor, group: int) -> torch.Tensor:
    """`x` with two bits after the first, not the three of e4m3."""
    mantissa, exponent = torch.frexp(x.float())
    return torch.ldexp(torch.round(mantissa * 8) / 8, exponent)


@pytest.mark.parametrize("path", ["qwen3"], indirect=True)
def test_the_bound_tells_a_right_model_from_a_wrong_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch computes both models in bf16."""
    right = reference_logits(path, "bfloat16", rounds=True)
    with monkeypatch.context() as patch:
        patch.setattr(products, "rounded_activations", with_a_bit_less)
        wrong = reference_logits(path, "bfloat16", rounds=True)
    assert farther_than_the_definition(path, right) < AS_FAR
    assert farther_than_the_definition(path, wrong) > 1.1 * AS_FAR


@needs_a_gpu
@pytest.mark.parametrize("path", FAMILIES, indirect=True)
def test_kernels_compute_the_definition(path: Path) -> None:
    from rigs.layers.checked_products import checked_products

    driver, right = driver_of(path, "bfloat16"), driver_of(path, "bfloat16")
    with checked_products() as errors, layers_recorded(driver) as got:
        logits = steps_of_every_size(driver)
    assert {one.num_tokens for one in errors} >= {1, 2, 3, 42, 49, 200}
    for one in errors:
        assert one.error < (EXPERT if "experts" in one.kernel else PRODUCT), one
    with checked_products(replaces=True), layers_recorded(right, given=got) as want:
        steps_of_every_size(right)
    of_layers = layer_errors(got, want)
    assert of_layers.max() < LAYER, of_layers
    assert farther_than_the_definition(path, logits) < AS_FAR
