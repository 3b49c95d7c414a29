"""`sglang.Engine` on a random DeepSeek-V3.2: real processes, three tiers, two kinds of state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rigs.servers.engine_case import (
    GREEDY,
    IDS,
    ask,
    assert_same_words_from_every_tier,
    start_engine,
)
from sglang.srt.environ import envs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-b-test-cpu")


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("deepseek_v32", vocab_size=2176, eos_token_id=2)


@pytest.fixture(name="storage_dir", autouse=True)
def make_storage_dir(tmp_path: Path) -> Iterator[None]:
    with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path)):
        yield


@pytest.fixture(scope="module")
def cold(model: Path) -> list[int]:
    """Answer of an engine without a cache."""
    with start_engine(model, disable_radix_cache=True) as engine:
        return ask(engine, IDS)[0]


@pytest.mark.parametrize("layout", ["auto", "page_first_kv_split"])
def test_every_tier_gives_the_words_of_no_cache(model: Path, cold: list[int], layout: str) -> None:
    assert_same_words_from_every_tier(model, cold, "file", hicache_mem_layout=layout)


def test_samples_and_grammars_are_served(model: Path) -> None:
    with start_engine(model) as engine:
        params = {"temperature": 0.8, "max_new_tokens": 6, "n": 3, "sampling_seed": 5}
        samples = engine.generate(input_ids=IDS, sampling_params=params)
        assert len(samples) == 3
        digits = engine.generate("hello", {**GREEDY, "ignore_eos": False, "regex": "[0-9]{4}"})
        assert digits["text"].isdigit() and len(digits["text"]) == 4
