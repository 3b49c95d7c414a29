"""DeepSeek-V4: logits as transformers' around windows and groups, and settings refused by name."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rigs.models.model_oracle import (
    assert_close,
    assert_greedy_words,
    assert_logits_of_batches,
    prompt,
    reference,
)
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

PUBLISHED: dict[str, Any] = {
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "sliding_window": 128,
    "hc_sinkhorn_iters": 20,
    "index_topk": 48,
    "max_position_embeddings": 4096,
    "eos_token_id": None,
}
"""Ratios and window as published."""


@pytest.fixture(scope="module", name="model")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("deepseek_v4")
    return path, save_tiny_checkpoint(path, "deepseek_v4", **PUBLISHED)


def test_logits_of_batches_equal_transformers(tmp_path: Path) -> None:
    hf = save_tiny_checkpoint(tmp_path, "deepseek_v4")
    assert_logits_of_batches(hf, StepDriver(tmp_path, page_size=16))


@pytest.mark.parametrize("length", [1, 3, 4, 127, 128, 129, 255, 256, 511, 1024])
def test_logits_around_groups_equal_transformers(
    model: tuple[Path, PreTrainedModel], length: int
) -> None:
    """The whole prompt at once, in chunks that begin within groups, and words after it."""
    path, hf = model
    tokens = prompt(length + 2, length)
    want = reference(hf, tokens)
    driver = StepDriver(path, page_size=128)
    got = driver.extend([(0, tokens[:length])]).next_token_logits
    assert_close(got, want[length - 1 : length])
    cuts = sorted({0, *(cut for cut in (1, 2, 127, 128, 130, 300, 513) if cut < length), length})
    for begin, end in itertools.pairwise(cuts):
        got = driver.extend([(1, tokens[begin:end])]).next_token_logits
        assert_close(got, want[end - 1 : end])
    for place in (length, length + 1):
        both = driver.decode([(0, tokens[place]), (1, tokens[place])]).next_token_logits
        assert_close(both, want[[place, place]])
