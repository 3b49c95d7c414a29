"""Models on a GPU whose weights stay quantized in memory, with graphs and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rigs.models.model_oracle import logits_of_batches
from rigs.models.quantized_checkpoints import Format, awq, fp8_blocks, write_quantized
from rigs.models.scaled_products import scaled_products, scaled_weights
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.layers.triton_ops.arguments import ScaledWeight
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=60, suite="base-b-test-1-gpu-large")

pytestmark = pytest.mark.skipif(detect_device() != "cuda", reason="needs a GPU")

WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}


@pytest.mark.parametrize("disable_cuda_graph", [True, False])
@pytest.mark.parametrize(("form", "bound"), [(fp8_blocks, 0.5), (awq, 0.12)], ids=["fp8", "int4"])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("qwen3", WIDE),
        # A head is a group, so attention rounds.
        ("qwen3", WIDE | {"head_dim": 128}),
        ("qwen3_moe", {}),
        # All experts, because rounding would choose others.
        ("minimax_m2", {"num_experts_per_tok": 8}),
        ("qwen3_next", {}),
        ("deepseek_v3", {}),
        ("deepseek_v32", {}),
    ],
)
def test_logits_are_those_of_the_reference_products(
    tmp_path: Path,
    family: str,
    overrides: dict[str, Any],
    form: Callable[[], Format],
    bound: float,
    disable_cuda_graph: bool,
) -> None:
    """The bounds are twice the distance of bf16 from fp32 on a CPU, where a wrong product is off by
    more than 1. Random weights amplify what activations in fp8 round away."""
    save_tiny_checkpoint(tmp_path / "written", family, **overrides)
    path = write_quantized(tmp_path / "written", tmp_path, form())
    with scaled_products(rounds=True):
        want = logits_of_batches(StepDriver(path, page_size=64))
    driver = StepDriver(
        path,
        page_size=64,
        device="cuda",
        dtype="bfloat16",
        disable_cuda_graph=disable_cuda_graph,
    )
    weights = scaled_weights(driver.runner.model)
    assert any(isinstance(weight, ScaledWeight) for _, weight in weights)
    got = logits_of_batches(driver)
    error = (got - want).norm() / want.norm()
    assert error < bound, f"{error:.3f}"
