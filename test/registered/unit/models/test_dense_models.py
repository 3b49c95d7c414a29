"""Logits equal transformers' on the same random weights, through the paged pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.models.model_oracle import (
    assert_close,
    assert_errs_like_bf16,
    assert_logits_of_batches,
    prompt,
    reference,
)
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from sglang.srt.configs.config_fields import FIELDS
from sglang.srt.models.registry import MODEL_CLASSES
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = [
    pytest.param("llama", {}, id="llama"),
    pytest.param("llama", {"attention_bias": True, "mlp_bias": True}, id="llama-biases"),
    pytest.param("llama", {"rope_parameters": LLAMA3}, id="llama-rope-llama3"),
    pytest.param("llama", {"rope_parameters": LINEAR}, id="llama-rope-linear"),
    pytest.param("qwen3", {"rope_parameters": YARN}, id="qwen3-rope-yarn"),
    pytest.param(
        "llama",
        {"rope_parameters": {**YARN, "attention_factor": 1.7, "beta_fast": 8, "truncate": False}},
        id="llama-rope-yarn-attention-factor",
    ),
    pytest.param("llama", {"tie_word_embeddings": True}, id="llama-tied"),
    pytest.param("mistral", {}, id="mistral"),
    pytest.param("mistral", {"sliding_window": 512}, id="mistral-longest-window"),
    pytest.param("qwen2", {}, id="qwen2"),
    pytest.param("qwen2", {"tie_word_embeddings": True}, id="qwen2-tied"),
    pytest.param("qwen3", {"tie_word_embeddings": True}, id="qwen3-tied"),
    pytest.param("qwen3", {"attention_bias": True}, id="qwen3-bias"),
    pytest.param("qwen3", {"num_key_value_heads": 6}, id="qwen3-mha"),
    pytest.param("qwen3", {"max_shard_size": "40KB"}, id="qwen3-sharded"),
]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_logits_equal_transformers(
    tmp_path: Path, family: str, overrides: dict[str, Any], page_size: int
) -> None:
    hf = save_tiny_checkpoint(tmp_path, family, **overrides)
    driver = StepDriver(tmp_path, page_size=page_size)
    assert_logits_of_batches(hf, driver)


def test_bf16_errs_like_transformers(tmp_path: Path) -> None:
    hf = save_tiny_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16)
    driver = StepDriver(tmp_path, page_size=16)
    assert_errs_like_bf16(hf, driver, prompt(120, 3), 40)


def test_scattered_contexts_give_the_same_logits(tmp_path: Path) -> None:
    """Prefixes and contexts whose slots lie in no order, as after evictions."""
    hf = save_tiny_checkpoint(tmp_path, "llama")
    driver = StepDriver(tmp_path, page_size=1, pool_tokens=600)
    allocator = driver.runner.token_to_kv_pool_allocator
    held = allocator.alloc(600)
    assert held is not None
    order = torch.randperm(600, generator=torch.Generator().manual_seed(5))
    tokens = prompt(120, 4)
    want = reference(hf, tokens)
    for begin in range(0, 110, 11):  # each chunk gets slots from anywhere
        allocator.free(held[order[begin * 2 : begin * 2 + 11]])
        got = driver.extend([(0, tokens[begin : begin + 11])]).next_token_logits
        assert_close(got, want[begin + 10 : begin + 11])
    allocator.free(held[order[400:410]])
    for i in range(110, 120):
        assert_close(driver.decode([(0, tokens[i])]).next_token_logits, want[i : i + 1])


def test_every_supported_architecture_has_a_class() -> None:
    assert set(MODEL_CLASSES) == set(FIELDS)


def test_the_kv_cache_may_have_a_dtype_of_its_own(tmp_path: Path) -> None:
    hf = save_tiny_checkpoint(tmp_path, "qwen2")
    driver = StepDriver(tmp_path, kv_cache_dtype="bfloat16")
    assert_errs_like_bf16(hf, driver, prompt(80, 6), 20)
    assert driver.runner.kv_bytes_per_token() == 2 * 2 * 16 * 2 * 2
