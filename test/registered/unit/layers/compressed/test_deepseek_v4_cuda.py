"""DeepSeek-V4 by Triton: whole models, in graphs and without, with padding and snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.models.triton_device import triton_device
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=90, suite="base-b-test-1-gpu-large")

ON_GPU = triton_device() == "cuda"

from rigs.layers.replayed_graphs import replayed_driver  # noqa: E402
from rigs.models.model_oracle import prompt, reference  # noqa: E402
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


def make_driver(patch: pytest.MonkeyPatch, path: Path) -> StepDriver:
    if ON_GPU:
        return StepDriver(path, device="cuda", **SETTINGS)
    return replayed_driver(patch, path, max_requests=4, pool_tokens=1024, **SETTINGS)


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal up to sums in another order."""
    torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-3)


def test_replayed_steps_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of other sizes than those captured. A snapshot is taken amid a short prefill."""
    hf = save_tiny_checkpoint(tmp_path, "deepseek_v4", max_position_embeddings=96)
    driver = make_driver(monkeypatch, tmp_path)
    assert isinstance(driver.runner.attn_backends[COMPRESSED], CompressedTritonBackend)
    prompts = {row: prompt(60, row) for row in range(4)}
    wanted = {row: reference(hf, tokens) for row, tokens in prompts.items()}

    def extend(news: dict[int, int], track: dict[int, tuple[int, int]] | None = None) -> None:
        begins = {row: driver.lens[row] for row in news}
        work = [(row, prompts[row][begins[row] :][:new]) for row, new in news.items()]
        got = driver.extend(work, track).next_token_logits
        ends = [wanted[row][begins[row] + new - 1] for row, new in news.items()]
        check(got, torch.stack(ends))

    extend({0: 40, 1: 3})  # longer than what is captured on a CPU
    extend({0: 5, 1: 9, 2: 1})
    extend({1: 14}, {1: (18, 4)})
    driver.continue_from(18, 1, [3], 16)
    prompts[3], wanted[3] = prompts[1], wanted[1]
    for _ in range(4):
        rows = [0, 1, 2, 3][: driver.lens[0] % 2 + 3]
        ends = torch.stack([wanted[row][driver.lens[row]] for row in rows])
        work = [(row, prompts[row][driver.lens[row]]) for row in rows]
        check(driver.decode(work).next_token_logits, ends)
    extend({3: 1})
    for name in (PoolName.SWA, PoolName.COMPRESSOR):
        pool = driver.runner.pools[name]
        assert isinstance(pool, StatePool)
        assert all(buffer.isfinite().all() for buffer in pool.buffers)


def test_drafts_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_checkpoint(tmp_path, "deepseek_v4", max_position_embeddings=96)
    driver = make_driver(monkeypatch, tmp_path)

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
        check(got, want.cpu())
    return dict(zip(rows, want.argmax(-1).tolist(), strict=True))
