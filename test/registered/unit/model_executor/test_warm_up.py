"""Work that is run once at the start, so that no request waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.models.tiny_models import FAMILIES, StepDriver, save_tiny_checkpoint
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_config import ModelRunnerConfig
from sglang.srt.model_executor.warm_up import (
    run_step,
    warm_up_batches,
    warm_up_lengths,
    warm_up_masks,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

SHORT = [(0, new) for new in (1, 4, 8, 16, 32, 64)]


def test_long_passes_come_first_in_the_context_and_after_an_uneven_prefix() -> None:
    lengths = warm_up_lengths(40_960, 8192)
    after_prefix = [(4096, new) for new in (1, 4, 8, 16, 32, 64)]
    between = [(0, new) for power in range(6) for new in (128 << power, 192 << power)]
    assert lengths == [*SHORT, *between, (0, 8192), *after_prefix, (8288, 8193)]


def test_no_step_is_longer_than_the_context() -> None:
    for context in (1, 3, 64, 100, 8192, 8200, 12_000):
        lengths = warm_up_lengths(context, 8192)
        assert lengths
        assert all(prefix >= 0 and 0 < new <= context - prefix for prefix, new in lengths)
        assert (0, min(context, 8192)) in lengths
    assert (3808, 8192) in warm_up_lengths(12_000, 8192)


def test_models_with_states_also_compute_in_chunks() -> None:
    plain, hybrid = (set(warm_up_lengths(40_960, 8192, has)) for has in (False, True))
    assert hybrid - plain == {(0, 320), (4096, 320)}
    for context in (300, 320, 400, 4500):
        assert all(
            0 <= prefix <= context - new for prefix, new in warm_up_lengths(context, 0, True)
        )


def test_without_a_long_pass_only_short_ones_are_run() -> None:
    assert max(new for _, new in warm_up_lengths(40_960, 0)) == 64


def test_the_steps_run_and_write_into_the_padding_page_alone(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "qwen3", eos_token_id=None)
    config = ModelConfig.from_path(str(tmp_path))
    runner = ModelRunner(ModelRunnerConfig(model_config=config, page_size=4, show_progress=False))
    runner.init_memory_pool(64, 2)
    pool = runner.token_to_kv_pool
    before = [pool.get_kv_buffer(0)[part][4:].clone() for part in (0, 1)]
    sizes = []
    for batch in warm_up_batches(runner.req_to_token_pool, pool, longest_pass=48):
        assert torch.isfinite(runner.forward(batch).next_token_logits).all()
        sizes.append((batch.batch_size, len(batch.input_ids)))
    alone = [(1, new) for _, new in warm_up_lengths(config.context_len, 48)]
    assert sizes == alone + [(count, count) for count in (2, 4, 8, 16, 32, 64, 128)] * 2
    after = [pool.get_kv_buffer(0)[part][4:] for part in (0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_steps_of_every_family_run(tmp_path: Path, family: str) -> None:
    """A device that does not warm up, like this one, never runs them in other tests."""
    save_tiny_checkpoint(tmp_path, family)
    driver = StepDriver(tmp_path, page_size=16, max_requests=2)
    runner = driver.runner
    for batch in warm_up_batches(runner.req_to_token_pool, runner.token_to_kv_pool, 192):
        rows = []
        for batch.capture_hidden in (False, True):
            output = runner.forward(batch)
            rows.append(output.next_token_logits)
        assert output.hidden_states is not None
        assert len(output.hidden_states) == len(batch.input_ids)
        if batch.states is None:  # States have moved on.
            torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3"])
def test_a_draft_layer_stores_the_steps_too(tmp_path: Path, family: str) -> None:
    save_tiny_checkpoint(tmp_path, family, mtp=True)
    config = ModelConfig.from_path(str(tmp_path), has_draft_layer=True)
    runner = ModelRunner(
        ModelRunnerConfig(model_config=config, page_size=4, num_draft_tokens=3, show_progress=False)
    )
    runner.init_memory_pool(64, 2)
    stored = []
    store = runner.store_drafts

    def record(batch: ForwardBatch, hidden: torch.Tensor) -> None:
        stored.append(hidden.shape)
        store(batch, hidden)

    runner.store_drafts = record  # type: ignore[method-assign]
    pool = runner.token_to_kv_pool
    tokens = []
    for batch in warm_up_batches(runner.req_to_token_pool, pool, longest_pass=0):
        run_step(runner, batch)
        tokens.append(len(batch.input_ids))
    assert stored == [(count, config.hidden_size) for count in tokens]


def test_the_last_layer_computes_wanted_rows_and_all_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_checkpoint(tmp_path, "qwen3_next")
    config = ModelConfig.from_path(str(tmp_path))
    runner = ModelRunner(ModelRunnerConfig(model_config=config, page_size=4, show_progress=False))
    runner.init_memory_pool(64, 2)
    rows = []
    last: Any = runner.model.get_submodule("model")
    last = last.decoder_layers[-1]
    forward = last.forward

    def record(*args: Any) -> Any:
        output = forward(*args)
        rows.append(len(output[1]))
        return output

    monkeypatch.setattr(last, "forward", record)
    for batch in warm_up_batches(runner.req_to_token_pool, runner.token_to_kv_pool, 48):
        run_step(runner, batch)
        assert rows == [batch.batch_size, len(batch.input_ids)]
        rows.clear()


def test_masks_are_applied_to_one_row_and_to_several() -> None:
    warm_up_masks(70, "cpu")
