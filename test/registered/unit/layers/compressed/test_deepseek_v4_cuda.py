"""DeepSeek-V4 by Triton: whole models, in graphs and without, with padding and snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rigs.models.triton_device import triton_device
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=90, suite="base-b-test-1-gpu-large")

ON_GPU = triton_device() == "cuda"

from rigs.layers.exchange_search import TextLogits, logits_of_steps  # noqa: E402
from rigs.layers.replayed_graphs import assert_replayed_steps, driver_with_states  # noqa: E402
from rigs.models.model_oracle import prompt  # noqa: E402
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint  # noqa: E402
from sglang.srt.layers.attention.compressed_triton_backend import (  # noqa: E402
    CompressedTritonBackend,
)
from sglang.srt.layers.attention_kind import COMPRESSED  # noqa: E402
from sglang.srt.layers.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.mem_cache.device.state_pool import StatePool  # noqa: E402
from sglang.srt.mem_cache.device.state_spec import PoolName  # noqa: E402

SETTINGS: dict[str, Any] = {"page_size": 16, "num_states": 20}


def test_replayed_steps_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = save_tiny_checkpoint(tmp_path, "deepseek_v4", max_position_embeddings=96)
    driver = driver_with_states(monkeypatch, tmp_path)
    assert isinstance(driver.runner.attn_backends[COMPRESSED], CompressedTritonBackend)
    assert_replayed_steps(hf, driver, short=14, decodes=4)
    for name in (PoolName.SWA, PoolName.COMPRESSOR):
        pool = driver.runner.pools[name]
        assert isinstance(pool, StatePool)
        assert all(buffer.isfinite().all() for buffer in pool.buffers)


def test_drafts_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_checkpoint(tmp_path, "deepseek_v4", max_position_embeddings=96)
    driver = driver_with_states(monkeypatch, tmp_path)

    def as_drafts(batch: Any) -> None:
        batch.forward_mode = ForwardMode.TARGET_VERIFY

    with pytest.raises(ValueError, match="--speculative-algorithm"):
        driver.extend([(0, prompt(3, 1))], before=as_drafts)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter takes too long")
@pytest.mark.parametrize("window", [12, 128])
def test_steps_equal_those_of_torch_on_a_cpu(tmp_path: Path, window: int) -> None:
    """Long prompts in chunks, and steps of batches of many sizes, in graphs and without. Rounding
    may decide a near choice of experts or rows either way."""
    save_tiny_checkpoint(
        tmp_path, "deepseek_v4", sliding_window=window, max_position_embeddings=2048
    )
    texts = {row: TextLogits(tmp_path, prompt(1012, row)) for row in range(3)}
    for settings in ({}, {"disable_cuda_graph": True}):
        driver = StepDriver(tmp_path, device="cuda", **SETTINGS, **settings)
        for row, got in logits_of_steps(driver, [text.tokens for text in texts.values()]).items():
            texts[row].assert_explained(got)
