"""`sglang.Engine` on a random Qwen3-Next over a real Mooncake Store: real processes, states too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sglang
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.mooncake_cluster import MooncakeCluster
from sglang.test.scheduler_rig import prompt
from sglang.test.tiny_models import save_tiny_checkpoint

register_cpu_ci(est_time=45, suite="base-b-test-cpu")

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
IDS = prompt(1, 200)
PAGE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    save_tiny_checkpoint(path, "qwen3_next", vocab_size=2176, eos_token_id=2)
    return path


@pytest.fixture(scope="module")
def cluster() -> Iterator[MooncakeCluster]:
    with MooncakeCluster() as running:
        yield running


def start(model: Path, **settings: Any) -> sglang.Engine:
    settings = {
        "tokenizer_path": str(BUILTIN_MODEL_DIR),
        "page_size": PAGE,
        "max_total_tokens": 512,
        "max_running_requests": 2,
        "max_mamba_cache_size": 12,
        "device": "cpu",
        **settings,
    }
    return sglang.Engine(model_path=str(model), **settings)


def ask(
    engine: sglang.Engine, ids: list[int], **params: Any
) -> tuple[list[int], tuple[int, int, int]]:
    """The words, and how many tokens came from the device, the host and the store."""
    answer = engine.generate(input_ids=ids, sampling_params={**GREEDY, **params})
    found = answer["meta_info"]["cached_tokens_details"]
    return answer["output_ids"], (found["device"], found["host"], found.get("storage", 0))


def test_the_same_words_cold_and_from_every_tier(
    model: Path, cluster: MooncakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.engine_env().items():
        monkeypatch.setenv(name, value)
    with start(model, disable_radix_cache=True) as engine:
        cold, _ = ask(engine, IDS)
    tiers = {
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "mooncake",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": PAGE}),
    }
    with start(model, **tiers) as engine:
        assert ask(engine, IDS) == (cold, (0, 0, 0))
        assert ask(engine, IDS) == (cold, (192, 0, 0))
        for seed in range(10, 13):
            ask(engine, prompt(seed, 220))
        assert ask(engine, IDS) == (cold, (0, 192, 0))
        assert engine.flush_cache(timeout=60)
        assert ask(engine, IDS) == (cold, (0, 0, 192))
    with start(model, **tiers) as engine:
        assert ask(engine, IDS) == (cold, (0, 0, 192)), "from the store of an engine that ended"


def test_a_conversation_goes_on_from_what_was_said(model: Path) -> None:
    with start(model, mamba_track_interval=64) as engine:
        said, _ = ask(engine, IDS[:50], max_new_tokens=100)
        turn = [*IDS[:50], *said, *IDS[50:60]]
        warm, found = ask(engine, turn)
        assert found == (128, 0, 0)
        params = {"temperature": 0.8, "max_new_tokens": 6, "n": 3, "sampling_seed": 5}
        assert len(engine.generate(input_ids=IDS, sampling_params=params)) == 3
    with start(model, disable_radix_cache=True) as engine:
        assert ask(engine, turn)[0] == warm


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
