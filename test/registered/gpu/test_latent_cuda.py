"""DeepSeek models on a GPU, with attention by Triton and steps in graphs: the logits of a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.models.model_oracle import logits_of_batches
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import SchedulerRig, prompt
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.layers.linear import apply_linear
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=60, suite="base-b-test-1-gpu-large")

pytestmark = pytest.mark.skipif(detect_device() != "cuda", reason="needs a GPU")

FAMILIES = ("deepseek_v2", "deepseek_v3", "deepseek_v32")


@pytest.mark.parametrize("family", FAMILIES)
def test_state_in_fp8_gives_the_logits_of_a_cpu(tmp_path: Path, family: str) -> None:
    """In steps of graphs too. A sum in another order now and then moves a number to the next in
    fp8; the models have no experts, of which it would choose others."""
    dense: dict[str, Any] = {"first_k_dense_replace": 2}
    if family == "deepseek_v32":
        dense |= {"mlp_layer_types": ["dense", "dense"], "index_topk": 500}
    save_tiny_checkpoint(tmp_path, family, **dense)
    got, want = (
        logits_of_batches(
            StepDriver(tmp_path, page_size=16, device=device, kv_cache_dtype="fp8_e4m3")
        )
        for device in ("cuda", "cpu")
    )
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("family", [*FAMILIES, "glm_moe_dsa", "glm_moe_dsa_shared"])
def test_logits_equal_those_of_a_cpu(tmp_path: Path, family: str) -> None:
    save_tiny_checkpoint(tmp_path, family)
    got, want = (
        logits_of_batches(StepDriver(tmp_path, page_size=16, device=device))
        for device in ("cuda", "cpu")
    )
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_warm_words_are_those_of_cold_ones(tmp_path: Path, family: str, dtype: str) -> None:
    save_tiny_checkpoint(tmp_path, family, eos_token_id=None)
    prompts = [prompt(seed, 60) for seed in range(3)]
    state: dict[str, Any] = {"kv_cache_dtype": dtype}
    cold = SchedulerRig(tmp_path, disable_radix_cache=True, **state).generate(prompts)
    rig = SchedulerRig(tmp_path, page_size=16, overlap=True, **state)
    assert [rig.generate([ids])[0] for ids in prompts] == cold
    assert rig.generate(prompts) == cold


def test_products_of_fp32_weights_with_many_bf16_rows_are_those_of_fp32() -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    for rows, outputs in ((1023, 64), (1024, 64), (2000, 256)):
        x = torch.randn(rows, 7168, generator=generator, device="cuda").bfloat16()
        weight = torch.randn(outputs, 7168, generator=generator, device="cuda")
        right = x.double() @ weight.double().t()
        got = apply_linear(x, weight)
        assert got.dtype is torch.float32
        # A bf16 weight would be 2e-3 off.
        assert (got - right).norm() < 3e-5 * right.norm()
