"""Every change of `rigs.checkpoints.malformed`, for every family and weight format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rigs.checkpoints.malformed import assert_told, malformed_configs, malformed_tensors
from rigs.models.quantized_checkpoints import (
    Format,
    awq,
    fp8_blocks,
    fp8_per_tensor,
    gptq,
    write_quantized,
)
from rigs.models.tiny_models import FAMILIES, save_tiny_checkpoint
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=400, suite="nightly-test-cpu", nightly=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_malformed_field_is_named(tmp_path: Path, family: str) -> None:
    save_tiny_checkpoint(tmp_path, family)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    assert sum(
        assert_told(one, loads=False) for one in malformed_configs(tmp_path, seed=0, share=1)
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "make",
    [
        fp8_blocks,
        fp8_per_tensor,
        awq,
        gptq,
        lambda: gptq(act_order=True),
        lambda: gptq(8, -1),
        lambda: gptq(stored_zero=8),
    ],
)
def test_any_malformed_tensor_is_named(tmp_path: Path, make: Callable[[], Format]) -> None:
    save_tiny_checkpoint(tmp_path / "made", "llama")
    path = write_quantized(tmp_path / "made", tmp_path, make())
    assert sum(assert_told(one, loads=True) for one in malformed_tensors(path, seed=0, share=1))
