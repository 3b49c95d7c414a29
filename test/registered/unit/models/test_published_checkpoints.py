"""Checkpoints as they are published, made small: logits equal transformers' of the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.caches.memory_ranks import MemoryTensorGroup
from rigs.checkpoints.published_checkpoints import save_as_published
from rigs.drafts.draft_driver import (
    DraftDriver,
    draft_reference,
    drafted_in_steps,
    rows_in_steps,
)
from rigs.models.model_oracle import (
    assert_close,
    assert_logits_of_batches,
    logits_of_batches,
    prompt,
)
from rigs.models.published_configs import PUBLISHED
from rigs.models.quantized_checkpoints import Format, fp8_blocks, mxfp4, packed_experts
from rigs.models.tiny_models import StepDriver
from rigs.schedulers.rank_threads import on_rank_threads
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

KIMI_TEXT = PUBLISHED["Kimi-K2.5"].config["text_config"]
KIMI: dict[str, Any] = {
    "rope_parameters": {**KIMI_TEXT["rope_scaling"], "rope_theta": KIMI_TEXT["rope_theta"]}
}
MINIMAX: dict[str, Any] = {
    "rotary_dim": 8,
    "rope_parameters": {"rope_theta": 5000000.0, "partial_rotary_factor": 0.5},
}
GPT_OSS_CONFIG = PUBLISHED["gpt-oss-20b-BF16"].config
GPT_OSS: dict[str, Any] = {
    "rope_parameters": {
        **GPT_OSS_CONFIG["rope_scaling"],
        "rope_theta": GPT_OSS_CONFIG["rope_theta"],
    }
}
QWEN_TEXT = PUBLISHED["Qwen3.8-27B"].config["text_config"]
QWEN: dict[str, Any] = {
    "rope_parameters": {**QWEN_TEXT["rope_parameters"], "mrope_section": [1, 1, 0]},
    # Its config has an interval of 4 instead.
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
CASES = [
    pytest.param("GLM-5.3", "glm_moe_dsa_shared", fp8_blocks, {}, id="GLM-5.3"),
    pytest.param("Kimi-K2.5", "kimi_k25_vision", packed_experts, KIMI, id="Kimi-K2.5"),
    pytest.param("MiniMax-M2", "minimax_m2", fp8_blocks, MINIMAX, id="MiniMax-M2"),
    pytest.param("gpt-oss-20b", "gpt_oss", mxfp4, GPT_OSS, id="gpt-oss"),
    pytest.param("gpt-oss-20b-BF16", "gpt_oss", None, GPT_OSS, id="gpt-oss-BF16"),
    pytest.param("Qwen3.6-35B-A3B", "qwen3_5_moe_vision", None, QWEN, id="Qwen3.6"),
    pytest.param("Qwen3.8-27B", "qwen3_5_vision", None, QWEN, id="Qwen3.8"),
]


@pytest.mark.parametrize(("name", "family", "form", "overrides"), CASES)
def test_logits_equal_transformers(
    tmp_path: Path,
    name: str,
    family: str,
    form: Callable[[], Format] | None,
    overrides: dict[str, Any],
) -> None:
    path, model = save_as_published(tmp_path, name, family, form and form(), **overrides)
    assert_logits_of_batches(model, StepDriver(path, page_size=16))
    want = logits_of_batches(StepDriver(path, page_size=16))

    def work(driver: StepDriver, group: MemoryTensorGroup) -> torch.Tensor:
        return logits_of_batches(driver)

    for got in on_rank_threads(2, path, work, page_size=16):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "family", "overrides"),
    [
        ("GLM-5.3", "glm_moe_dsa_shared", {}),
        ("Qwen3.6-35B-A3B", "qwen3_5_moe_vision", QWEN),
        ("Qwen3.8-27B", "qwen3_5_vision", QWEN),
    ],
)
def test_drafts_equal_transformers(
    tmp_path: Path, name: str, family: str, overrides: dict[str, Any]
) -> None:
    path, model = save_as_published(tmp_path, name, family, mtp=True, **overrides)
    long, short = prompt(82, 1), prompt(21, 2)
    got = drafted_in_steps(DraftDriver(path, page_size=16), long, short)
    want = rows_in_steps(draft_reference(model, long), draft_reference(model, short))
    assert_close(got.hidden, want.hidden)
    assert_close(got.logits, want.logits)
