"""What a start does for a model with recurrent states: sizes, lines of the log, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.distributed.rank_group import SingleRank
from sglang.srt.managers.scheduler.process.build import (
    build_scheduler,
    check_model_flags,
    init_pools,
)
from sglang.srt.mem_cache.hi_mamba_radix_cache import HiMambaRadixCache
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


def test_prefixes_are_cached_with_their_states(hybrid: Path) -> None:
    args = ServerArgs(
        model_path=str(hybrid),
        tokenizer_path=str(BUILTIN_MODEL_DIR),
        max_total_tokens=256,
        page_size=16,
        device="cpu",
        enable_hierarchical_cache=True,
    ).resolve()
    built = build_scheduler(args)
    tree = built.scheduler.state.tree
    assert tree.mamba_snapshot_alignment == 64, "a page of 16, a chunk of 64"
    assert isinstance(tree, HiMambaRadixCache)
    assert set(tree.cache_controller.mem_pool_host.entries) == {"kv", "mamba"}
    assert [line[:3] for line in built.tiers[:3]] == ["L1:", "L1:", "L2:"]
    built.scheduler.close()


@pytest.mark.parametrize(("page_size", "alignment"), [(1, 64), (48, 192), (128, 128)])
def test_snapshots_end_with_a_page_and_with_a_chunk_of_the_kernel(
    hybrid: Path, page_size: int, alignment: int
) -> None:
    args = ServerArgs(
        model_path=str(hybrid),
        tokenizer_path=str(BUILTIN_MODEL_DIR),
        max_total_tokens=384,
        page_size=page_size,
        mamba_track_interval=384,
        device="cpu",
    ).resolve()
    built = build_scheduler(args)
    assert built.scheduler.state.tree.mamba_snapshot_alignment == alignment
    built.scheduler.close()


def test_snapshots_while_decoding_are_where_snapshots_can_be(hybrid: Path) -> None:
    args = ServerArgs(
        model_path=str(hybrid),
        tokenizer_path=str(BUILTIN_MODEL_DIR),
        max_total_tokens=256,
        device="cpu",
        mamba_track_interval=100,
    ).resolve()
    with pytest.raises(ValueError, match="--mamba-track-interval 100 must be a multiple of 64"):
        build_scheduler(args)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_mamba_cache_size": 4},
        {"mamba_ssm_dtype": "bfloat16"},
        {"mamba_full_memory_ratio": 2.0},
        {"mamba_track_interval": 128},
        {"mamba_scheduler_strategy": "no_buffer"},
    ],
)
def test_flags_of_states_are_refused_where_there_are_none(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    save_tiny_checkpoint(tmp_path, "qwen3")
    config = ModelConfig.from_path(str(tmp_path))
    args = ServerArgs(model_path=str(tmp_path), **fields).resolve()
    with pytest.raises(ValueError, match=r"mamba.* has no effect on Qwen3ForCausalLM"):
        check_model_flags(args, config)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
