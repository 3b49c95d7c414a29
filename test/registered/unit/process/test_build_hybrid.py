"""Start of a model with recurrent states: sizes, lines of the log, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rigs.drafts.replayed_graphs import replayed_graphs
from rigs.models.tiny_models import save_tiny_checkpoint
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.distributed.rank_group import SingleRank
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hi_mamba_radix_cache import HiMambaRadixCache
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_config import ModelRunnerConfig
from sglang.srt.process.build import (
    build_scheduler,
    check_model_flags,
    init_pools,
)
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


@pytest.fixture(scope="module")
def hybrid(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3_5")


def start_args(model: Path, **fields: Any) -> ServerArgs:
    """Arguments of a start on the CPU with the built-in tokenizer."""
    sizes = {"max_total_tokens": 256, "max_mamba_cache_size": 64, "page_size": 16}
    args: dict[str, Any] = sizes | fields
    return ServerArgs(
        model_path=str(model), tokenizer_path=str(BUILTIN_MODEL_DIR), device="cpu", **args
    ).resolve()


def cached_args(model: Path, **fields: Any) -> ServerArgs:
    """The same with a host tier."""
    return start_args(model, enable_hierarchical_cache=True, **fields)


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
    each = 2 * (4 * 8 * 12 * 4 + (2 * 2 * 8 + 4 * 12) * 3 * 4)
    assert runner.state_bytes() == each
    assert "; 3 requests at once (one for each of 3 states)" in kv
    assert f"3 recurrent states of {each / 1e6:.2f} MB" in states
    assert "(--max-mamba-cache-size 3)" in states
    assert "a prefix of 8192 tokens takes 0.002 GB of keys and values" in states
    assert runner.req_to_token_pool.available_size() == 3


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("deepseek_v4", "A token takes 86 bytes on a rank: kv 48, indexer 32, c128 6; a prefix of"),
        # Three latent rows of 32 for each token, and two keys of 24 for 16, in fp32.
        ("glm5_next", "A token takes 396 bytes on a rank: kv 384, indexer 12; a prefix of 131072"),
    ],
)
def test_items_of_several_tokens_are_said(
    tiny_model: Callable[..., Path], family: str, words: str
) -> None:
    path = tiny_model(family)
    config = ModelConfig.from_path(str(path))
    runner = ModelRunner(ModelRunnerConfig(model_config=config, page_size=16, show_progress=False))
    lines = init_pools(runner, start_args(path), SingleRank())
    assert lines[-1].startswith(words) and lines[-1].endswith("in each tier")


def test_prefixes_are_cached_with_their_states(hybrid: Path) -> None:
    built = build_scheduler(cached_args(hybrid, mamba_max_states_per_path=3))
    tree = built.scheduler.state.tree
    assert tree.mamba_snapshot_alignment == 64, "a page of 16, a chunk of 64"
    assert [one.max_per_path for one in tree.tree.components] == [3]
    assert isinstance(tree, HiMambaRadixCache)
    assert set(tree.cache_controller.mem_pool_host.entries) == {"kv", "mamba"}
    tiers = built.ready_details["tiers"]
    assert [line[:3] for line in tiers[:3]] == ["L1:", "L1:", "L2:"]
    assert "for kv, mamba in layout" in tiers[2]
    built.scheduler.close()


def test_snapshots_are_at_multiples_of_the_models_own_chunk(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "nemotron_h", chunk_size=128)
    scheduler = build_scheduler(
        start_args(tmp_path, page_size=48, max_total_tokens=960, mamba_track_interval=384)
    ).scheduler
    assert scheduler.state.tree.mamba_snapshot_alignment == 384, "a page of 48, a chunk of 128"
    scheduler.close()


def test_graphs_of_drafts_are_captured_before_l2_joins_the_pools(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "qwen3_next", mtp=True)
    drafts: dict[str, Any] = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2}
    with replayed_graphs():
        built = build_scheduler(cached_args(tmp_path, **drafts))
    assert built.scheduler._resources.worker.verifies_ahead(1), "verifications are captured"
    built.scheduler.close()


@pytest.mark.parametrize(("page_size", "alignment"), [(1, 64), (48, 192), (128, 128)])
def test_snapshots_end_with_a_page_and_with_a_chunk_of_the_kernel(
    hybrid: Path, page_size: int, alignment: int
) -> None:
    fields = {"page_size": page_size, "max_total_tokens": 384, "mamba_track_interval": 384}
    built = build_scheduler(start_args(hybrid, **fields))
    assert built.scheduler.state.tree.mamba_snapshot_alignment == alignment
    built.scheduler.close()


def test_snapshots_while_decoding_are_where_snapshots_can_be(hybrid: Path) -> None:
    args = start_args(hybrid, mamba_track_interval=100)
    with pytest.raises(ValueError, match="--mamba-track-interval 100 must be a multiple of 64"):
        build_scheduler(args)


class OfKeysAndValues(HiCacheFile):
    """A backend whose question about prompts knows one pool."""

    def __init__(self, storage_config: HiCacheStorageConfig, **_: Any) -> None:
        super().__init__(storage_config, envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get())

    def prompts_exist(self, prompts: Any, extra_infos: Any) -> Any:  # type: ignore[override]
        return []


def of_this_file(backend: type) -> dict[str, Any]:
    extra = {"backend_name": "x", "module_path": __name__, "class_name": backend.__name__}
    return {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }


@pytest.mark.parametrize(("family", "second"), [("qwen3_5", "mamba"), ("deepseek_v32", "indexer")])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hicache_size": 1e6}, r"pool kv \d+ bytes, pool {second} \d+ .*needs .* GiB available"),
        ({"hicache_ratio": 1e-6}, r"pool kv gets \d+ bytes .* takes \d+; .* GB available"),
        (of_this_file(OfKeysAndValues), r"host pool {second} of \d+ bytes .* knows one pool"),
    ],
)
def test_a_stack_that_cannot_be_built_ends_the_start(
    tmp_path: Path, family: str, second: str, fields: dict[str, Any], message: str
) -> None:
    save_tiny_checkpoint(tmp_path / family, family)
    folder = envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path / "l3"))
    with folder, pytest.raises(ValueError, match=message.format(second=second)):
        build_scheduler(cached_args(tmp_path / family, **fields))


def test_a_layout_that_states_do_not_have_ends_the_start_with_the_name_of_their_pool(
    hybrid: Path,
) -> None:
    with pytest.raises(ValueError, match=r"kv_split is not for host pool mamba; use .*page_first"):
        build_scheduler(cached_args(hybrid, hicache_mem_layout="page_first_kv_split"))


def test_flags_of_states_are_ignored_with_a_warning_where_there_are_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_checkpoint(tmp_path, "qwen3")
    config = ModelConfig.from_path(str(tmp_path))
    check_model_flags(ServerArgs(model_path=str(tmp_path)).resolve(), config)
    assert not caplog.records
    args = ServerArgs(
        model_path=str(tmp_path),
        max_mamba_cache_size=4,
        mamba_full_memory_ratio=2.0,
        mamba_ssm_dtype="bfloat16",
        mamba_track_interval=128,
    )
    check_model_flags(args.resolve(), config)
    (record,) = caplog.records
    assert record.getMessage() == (
        "no effect on Qwen3ForCausalLM, which keeps no recurrent states: --max-mamba-cache-size, "
        "--mamba-full-memory-ratio, --mamba-ssm-dtype, --mamba-track-interval"
    )


def test_flags_of_sizes_hold_for_windows_and_that_of_dtypes_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_checkpoint(tmp_path, "ministral")
    config = ModelConfig.from_path(str(tmp_path))
    args = ServerArgs(model_path=str(tmp_path), max_mamba_cache_size=4).resolve()
    check_model_flags(args, config)
    assert not caplog.records
    args = ServerArgs(model_path=str(tmp_path), mamba_ssm_dtype="bfloat16").resolve()
    check_model_flags(args, config)
    assert "MinistralForCausalLM, which keeps no recurrent states: --mamba-ssm-d" in caplog.text
