"""DeepSeek-V4 by Triton: whole models, in graphs and without, with padding and snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rigs.models.triton_device import triton_device
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=90, suite="base-b-test-1-gpu-large")

ON_GPU = triton_device() == "cuda"

from rigs.layers.replayed_graphs import (  # noqa: E402
    assert_replayed_steps,
    check_logits,
    driver_with_states,
)
from rigs.models.model_oracle import prompt  # noqa: E402
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint  # noqa: E402
from sglang.srt.layers.attention.compressed_triton_backend import (  # noqa: E402
    CompressedTritonBackend,
)
from sglang.srt.layers.attention_kind import COMPRESSED  # noqa: E402
from sglang.srt.layers.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.layers.logits_processor import LogitsProcessorOutput  # noqa: E402
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
def test_words_equal_those_of_torch(tmp_path: Path, window: int) -> None:
    """A long prompt in chunks, and steps of batches of many sizes in graphs and without."""
    save_tiny_checkpoint(
        tmp_path, "deepseek_v4", sliding_window=window, max_position_embeddings=2048
    )
    drivers = [
        StepDriver(tmp_path, device="cuda", **SETTINGS),
        StepDriver(tmp_path, device="cuda", disable_cuda_graph=True, **SETTINGS),
        StepDriver(tmp_path, device="cuda", attention_backend="torch_native", **SETTINGS),
    ]
    begin, words = 0, dict[int, int]()
    tokens = {row: prompt(1000, row) for row in range(3)}
    for new in (127, 1, 1, 128, 243, 500):
        part = [(row, ids[begin : begin + new]) for row, ids in tokens.items()]
        words = _words([driver.extend(part) for driver in drivers], list(tokens))
        begin += new
    for rows in ([0, 1, 2], [1], [0, 2], *[[0, 1, 2]] * 10):
        work = [(row, words[row]) for row in rows]
        words |= _words([driver.decode(work) for driver in drivers], rows)


def _words(outputs: list[LogitsProcessorOutput], rows: list[int]) -> dict[int, int]:
    """Check a step of every driver against the last one's. Returns the words, by row."""
    *others, want = (output.next_token_logits for output in outputs)
    for got in others:
        check_logits(got, want.cpu())
    return dict(zip(rows, want.argmax(-1).tolist(), strict=True))
