"""`sglang.Engine` on a random DeepSeek-V3.2: real processes, three tiers, two kinds of state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sglang
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.environ import envs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scheduler_rig import prompt
from sglang.test.tiny_models import save_tiny_checkpoint

register_cpu_ci(est_time=60, suite="base-b-test-cpu")

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
IDS = prompt(1, 200)
PAGE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek")
    save_tiny_checkpoint(path, "deepseek_v32", vocab_size=2176, eos_token_id=2)
    return path


@pytest.fixture(name="storage_dir", autouse=True)
def make_storage_dir(tmp_path: Path) -> Iterator[None]:
    with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path)):
        yield


def start(model: Path, **settings: Any) -> sglang.Engine:
    settings = {
        "tokenizer_path": str(BUILTIN_MODEL_DIR),
        "page_size": PAGE,
        "max_total_tokens": 512,
        "device": "cpu",
        **settings,
    }
    return sglang.Engine(model_path=str(model), **settings)


def ask(engine: sglang.Engine, ids: list[int]) -> tuple[list[int], tuple[int, int, int]]:
    """The words, and how many tokens came from the device, the host and the store."""
    answer = engine.generate(input_ids=ids, sampling_params=GREEDY)
    found = answer["meta_info"]["cached_tokens_details"]
    return answer["output_ids"], (found["device"], found["host"], found.get("storage", 0))


@pytest.mark.parametrize("layout", ["auto", "page_first_kv_split"])
def test_the_same_words_cold_and_from_every_tier(model: Path, layout: str) -> None:
    with start(model, disable_radix_cache=True) as engine:
        cold, _ = ask(engine, IDS)
    tiers = {
        "enable_hierarchical_cache": True,
        "hicache_mem_layout": layout,
        "hicache_storage_backend": "file",
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


def test_samples_and_grammars(model: Path) -> None:
    with start(model) as engine:
        params = {"temperature": 0.8, "max_new_tokens": 6, "n": 3, "sampling_seed": 5}
        samples = engine.generate(input_ids=IDS, sampling_params=params)
        assert len(samples) == 3
        digits = engine.generate("hello", {**GREEDY, "ignore_eos": False, "regex": "[0-9]{4}"})
        assert digits["text"].isdigit() and len(digits["text"]) == 4


def test_more_ranks_are_refused(model: Path) -> None:
    with pytest.raises((RuntimeError, ValueError), match="tp"):
        start(model, tp_size=2)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
