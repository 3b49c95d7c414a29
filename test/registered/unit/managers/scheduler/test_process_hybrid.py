"""What a start does for a model with recurrent states: sizes, lines of the log, refusals."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.distributed.rank_group import SingleRank
from sglang.srt.managers.scheduler.process import build_scheduler, init_pools, on_this_model
from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerConfig
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_models import save_tiny_checkpoint

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    save_tiny_checkpoint(path, "qwen3_5")
    return path


def test_states_are_sized_and_said(hybrid: Path) -> None:
    config = ModelConfig.from_path(str(hybrid))
    runner = ModelRunner(ModelRunnerConfig(model_config=config, page_size=16, show_progress=False))
    args = ServerArgs(
        model_path=str(hybrid),
        page_size=16,
        max_total_tokens=1024,
        max_mamba_cache_size=3,
        max_running_requests=8,
        disable_radix_cache=True,
        device="cpu",
    ).resolve()
    kv, states = init_pools(runner, args, SingleRank())
    each = 3 * (4 * 8 * 12 * 4 + (2 * 2 * 8 + 4 * 12) * 3 * 4)
    assert runner.state_bytes() == each
    assert "; 3 requests at once (one for each of 3 states)" in kv
    assert f"3 recurrent states of {each / 1e6:.2f} MB" in states
    assert "(--max-mamba-cache-size 3)" in states
    assert "a prefix of 8192 tokens takes 0.002 GB of keys and values" in states
    assert runner.req_to_token_pool.available_size() == 3


def test_the_radix_cache_is_off(hybrid: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = ServerArgs(
        model_path=str(hybrid),
        tokenizer_path=str(BUILTIN_MODEL_DIR),
        max_total_tokens=256,
        device="cpu",
    ).resolve()
    with caplog.at_level(logging.INFO):
        built = build_scheduler(args)
    assert built.scheduler.state.tree.disable
    assert built.server_args.disable_radix_cache
    said = [record.message for record in caplog.records if "radix cache is off" in record.message]
    assert len(said) == 1
    assert len(built.tiers) == 2
    built.scheduler.close()


def test_what_needs_cached_states_is_refused_before_weights_are_loaded(
    hybrid: Path, tmp_path: Path
) -> None:
    shutil.copy(hybrid / "config.json", tmp_path)
    args = ServerArgs(model_path=str(tmp_path), enable_hierarchical_cache=True).resolve()
    with pytest.raises(ValueError, match=r"--enable-hierarchical-cache .* Qwen3_5ForCausalLM yet"):
        build_scheduler(args)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_mamba_cache_size": 4},
        {"mamba_ssm_dtype": "bfloat16"},
        {"mamba_full_memory_ratio": 2.0},
    ],
)
def test_flags_of_states_are_refused_where_there_are_none(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    save_tiny_checkpoint(tmp_path, "qwen3")
    config = ModelConfig.from_path(str(tmp_path))
    args = ServerArgs(model_path=str(tmp_path), **fields).resolve()
    with pytest.raises(ValueError, match=r"mamba.* has no effect on Qwen3ForCausalLM"):
        on_this_model(args, config)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
