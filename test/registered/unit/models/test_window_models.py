"""Layers with a sliding window: logits and words as transformers', in chunks and from snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.layers.window_cases import Shape, Windows, Work
from rigs.models.model_oracle import (
    assert_close,
    assert_continued,
    assert_errs_like_bf16,
    assert_greedy_words,
    assert_logits_in_chunks,
    assert_logits_of_batches,
    prompt,
    reference,
)
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention import window_backend
from sglang.srt.layers.attention.window_backend import WindowTorchBackend
from sglang.srt.layers.forward_batch_info import ForwardMode
from sglang.srt.mem_cache.device.state_pool import StatePool
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

LATE: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 20}
"""The second of two layers has a window."""
CASES = [
    pytest.param("ministral", {}, id="ministral"),
    pytest.param("ministral", {"sliding_window": 1}, id="ministral-window-1"),
    pytest.param("ministral", {"sliding_window": 130}, id="ministral-window-beyond-prompts"),
    pytest.param("qwen2", LATE, id="qwen2"),
    pytest.param("qwen3", {**LATE, "num_key_value_heads": 6}, id="qwen3-mha"),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_backend, "BLOCK", 16)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_logits_equal_transformers(
    tmp_path: Path, family: str, overrides: dict[str, Any], page_size: int
) -> None:
    hf = save_tiny_checkpoint(tmp_path, family, **overrides)
    driver = StepDriver(tmp_path, page_size=page_size)
    assert_logits_of_batches(hf, driver)


@pytest.mark.parametrize("chunk", [1, 5, 11, 12, 13, 16, 33, 100])
def test_any_chunks_of_a_prompt_give_the_same_logits(tmp_path: Path, chunk: int) -> None:
    hf = save_tiny_checkpoint(tmp_path, "ministral")
    assert_logits_in_chunks(hf, StepDriver(tmp_path), prompt(100, 3), chunk)


def test_logits_of_all_tokens_equal_transformers(tmp_path: Path) -> None:
    hf = save_tiny_checkpoint(tmp_path, "qwen3", **LATE)
    driver = StepDriver(tmp_path)
    tokens = prompt(60, 4)

    def ask_for_logprobs(batch: Any) -> None:
        batch.extend_logprob_start_lens_cpu = [0]
        batch.extend_input_logprob_token_ids_cpu = [[*tokens[31:], 0]]

    driver.extend([(0, tokens[:30])])
    output = driver.extend([(0, tokens[30:])], before=ask_for_logprobs)
    assert output.input_logprobs is not None
    got = torch.tensor(output.input_logprobs.values[0])
    logprobs = reference(hf, tokens)[30:].log_softmax(-1)
    assert_close(got, logprobs[torch.arange(30), torch.tensor([*tokens[31:], 0])])


@pytest.mark.parametrize("family", ["ministral", "qwen2", "qwen3"])
def test_greedy_words_equal_transformers(tmp_path: Path, family: str) -> None:
    hf = save_tiny_checkpoint(
        tmp_path, family, eos_token_id=None, **({} if family == "ministral" else LATE)
    )
    assert_greedy_words(hf, StepDriver(tmp_path, page_size=16), prompt(70, 4), chunk=33)


@pytest.mark.parametrize("at", [1, 5, 12, 13, 40, 59, 60])
def test_requests_continue_from_a_snapshot_of_a_prefill(tmp_path: Path, at: int) -> None:
    hf = save_tiny_checkpoint(tmp_path, "ministral")
    driver = StepDriver(tmp_path, num_states=20)
    assert_continued(hf, driver, at, whole=60, ends=(61, 70))


@pytest.mark.parametrize("new", [1, 7])
def test_a_step_reads_a_snapshot_and_leaves_it_as_it_is(tmp_path: Path, new: int) -> None:
    hf = save_tiny_checkpoint(tmp_path, "ministral")
    driver = StepDriver(tmp_path, num_states=20)
    tokens = prompt(50, 7)
    want = reference(hf, tokens)
    driver.extend([(0, tokens[:30])], {0: (18, 30)})
    pool = driver.runner.pools[PoolName.SWA]
    assert isinstance(pool, StatePool)
    before = [buffer[:, 18].clone() for buffer in pool.buffers]
    table = driver.runner.req_to_token_pool.req_to_token
    table[1, :30], driver.lens[1] = table[0, :30], 30

    def from_snapshot(batch: Any) -> None:
        batch.states.first_slots = torch.tensor([18])

    step = driver.extend([(1, tokens[30 : 30 + new])], before=from_snapshot)
    end = driver.lens[1]
    assert_close(step.next_token_logits, want[end - 1 : end])
    assert all(map(torch.equal, before, (buffer[:, 18] for buffer in pool.buffers)))
    assert_close(driver.decode([(1, tokens[end])]).next_token_logits, want[end : end + 1])


def test_requests_continue_from_a_snapshot_of_decoding(tmp_path: Path) -> None:
    hf = save_tiny_checkpoint(tmp_path, "ministral")
    driver = StepDriver(tmp_path, num_states=20)
    tokens = prompt(50, 8)
    want = reference(hf, tokens)
    driver.extend([(0, tokens[:40])])
    driver.decode([(0, tokens[40])], {0: (18, 1)})
    driver.decode([(0, tokens[41])])
    driver.continue_from(18, 0, [1], 41)
    assert_close(driver.decode([(1, tokens[41])]).next_token_logits, want[41:42])


def test_bf16_errs_like_transformers(tmp_path: Path) -> None:
    hf = save_tiny_checkpoint(tmp_path, "ministral", dtype=torch.bfloat16)
    driver = StepDriver(tmp_path, page_size=16)
    assert_errs_like_bf16(hf, driver, prompt(120, 3), 40)


def test_memory_of_windows_does_not_grow_with_the_context(tmp_path: Path) -> None:
    """A token takes slots of two of the four layers; the others hold 12 tokens of each request."""
    save_tiny_checkpoint(tmp_path, "ministral")
    pools = StepDriver(tmp_path, num_states=20).runner.pools
    assert pools[PoolName.KV].spec.layers == (1, 3)
    rings = pools[PoolName.SWA]
    assert isinstance(rings, StatePool) and rings.spec.layers == (0, 2)
    heads, window, head_dim = 2, 12, 16
    assert {buffer.shape for buffer in rings.buffers} == {(2, 20 + 1, heads, window, head_dim)}


def test_windows_as_long_as_the_context_are_full_attention(tmp_path: Path) -> None:
    hf = save_tiny_checkpoint(tmp_path, "qwen3", **{**LATE, "sliding_window": 512})
    assert ModelConfig.from_path(str(tmp_path)).sliding_window_layers == ()
    driver = StepDriver(tmp_path)
    assert list(driver.runner.pools) == [PoolName.KV]
    assert_logits_of_batches(hf, driver)


def test_a_model_without_full_attention_is_refused_with_the_remedy(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "ministral", layer_types=["sliding_attention"] * 4)
    with pytest.raises(ValueError, match=r"window of 12 tokens.*give --context-length 12"):
        ModelConfig.from_path(str(tmp_path))
    assert ModelConfig.from_path(str(tmp_path), context_length=12).sliding_window_layers == ()


@pytest.mark.parametrize("tokens", [1, 12, 13, 40])
def test_drafts_are_refused_before_they_overwrite_tokens(tokens: int) -> None:
    windows = Windows(WindowTorchBackend, Shape(6, 2, 16, 12), torch.float32, "cpu")
    assert windows.extend([Work(1, tokens)]) < 1e-5
    batch = windows.extend_batch([Work(1, 3)], [tokens])
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    q, k, v, *_ = windows.inputs(3)
    windows.backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match="remove --speculative-algorithm"):
        windows.layer.forward(q, k, v, batch)
    windows.check_rings([1])


@pytest.mark.parametrize("window", [1, 5, 16])
def test_random_steps_equal_the_definition(window: int) -> None:
    windows = Windows(
        WindowTorchBackend,
        Shape(4, 2, 16, window),
        torch.float32,
        "cpu",
        has_sinks=True,
        unwritten=7.0,
    )
    assert windows.walk(window, 60) < 1e-5
