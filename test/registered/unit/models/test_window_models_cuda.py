"""Layers with a sliding window by Triton: whole models, in graphs, with padding and snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rigs.models.triton_device import triton_device
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=60, suite="base-b-test-1-gpu-large")

ON_GPU = triton_device() == "cuda"

from rigs.layers.replayed_graphs import (  # noqa: E402
    assert_replayed_steps,
    check_logits,
    driver_with_states,
)
from rigs.models.model_oracle import prompt, reference  # noqa: E402
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint  # noqa: E402
from sglang.srt.layers.attention.window_triton_backend import WindowTritonBackend  # noqa: E402
from sglang.srt.layers.attention_kind import SLIDING_WINDOW  # noqa: E402
from sglang.srt.layers.logits_processor import LogitsProcessorOutput  # noqa: E402
from sglang.srt.mem_cache.device.state_pool import StatePool  # noqa: E402
from sglang.srt.mem_cache.device.state_spec import PoolName  # noqa: E402


@pytest.mark.parametrize("family", ["ministral", "gpt_oss"])
def test_replayed_steps_equal_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    types = ["sliding_attention", "full_attention"]
    hf = save_tiny_checkpoint(tmp_path, family, num_hidden_layers=2, layer_types=types)
    driver = driver_with_states(monkeypatch, tmp_path)
    assert isinstance(driver.runner.attn_backends[SLIDING_WINDOW], WindowTritonBackend)
    assert_replayed_steps(hf, driver, short=17, decodes=2)
    rings = driver.runner.pools[PoolName.SWA]
    assert isinstance(rings, StatePool)
    assert all(buffer.isfinite().all() for buffer in rings.buffers)


def test_decode_steps_of_gpt_oss_store_while_they_attend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    types = ["sliding_attention", "full_attention"]
    hf = save_tiny_checkpoint(tmp_path, "gpt_oss", num_hidden_layers=2, layer_types=types)
    driver, tokens = driver_with_states(monkeypatch, tmp_path), prompt(24, 1)
    driver.extend([(0, tokens[:20])])

    def refuse(*_: Any) -> None:
        raise AssertionError("the kernel stores")

    monkeypatch.setattr(type(driver.runner.token_to_kv_pool), "set_kv_buffer", refuse)
    wanted = reference(hf, tokens)
    for place in range(20, 24):
        got = driver.decode([(0, tokens[place])]).next_token_logits
        check_logits(got, wanted[place][None, :])


@pytest.mark.skipif(not ON_GPU, reason="the interpreter takes too long")
@pytest.mark.parametrize("window", [12, 128])
@pytest.mark.parametrize("family", ["ministral", "gpt_oss"])
def test_words_equal_those_of_torch(tmp_path: Path, family: str, window: int) -> None:
    """A long prompt in chunks, and steps of batches of many sizes in graphs and without."""
    save_tiny_checkpoint(tmp_path, family, sliding_window=window, max_position_embeddings=2048)
    settings: dict[str, Any] = {"page_size": 16, "num_states": 20, "device": "cuda"}
    drivers = [
        StepDriver(tmp_path, **settings),
        StepDriver(tmp_path, disable_cuda_graph=True, **settings),
        StepDriver(tmp_path, attention_backend="torch_native", **settings),
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
