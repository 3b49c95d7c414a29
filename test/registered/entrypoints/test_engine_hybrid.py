"""`sglang.Engine` on a random Qwen3.5 over a real Mooncake Store: real processes, states too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sglang
from rigs.servers.engine_case import (
    IDS,
    ask,
    assert_same_words_from_every_tier,
    start_engine,
)
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=7, suite="base-b-test-cpu")

STATES: dict[str, Any] = {"max_running_requests": 2, "max_mamba_cache_size": 12}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3_5_moe_vision", vocab_size=2176, eos_token_id=2)


@pytest.fixture(scope="module")
def without_cache(model: Path) -> Iterator[sglang.Engine]:
    """An engine without a cache, whose answers are the reference."""
    with start_engine(model, disable_radix_cache=True, **STATES) as engine:
        yield engine


def test_every_tier_gives_the_words_of_no_cache(
    model: Path,
    without_cache: sglang.Engine,
    cluster: MooncakeCluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in cluster.engine_env().items():
        monkeypatch.setenv(name, value)
    cold, _ = ask(without_cache, IDS)
    assert_same_words_from_every_tier(model, cold, "mooncake", **STATES)


def test_a_conversation_goes_on_from_what_was_said(
    model: Path, without_cache: sglang.Engine
) -> None:
    with start_engine(model, mamba_track_interval=64, **STATES) as engine:
        said, _ = ask(engine, IDS[:50], max_new_tokens=100)
        turn = [*IDS[:50], *said, *IDS[50:60]]
        warm, found = ask(engine, turn)
        assert found == (128, 0, 0)
        params = {"temperature": 0.8, "max_new_tokens": 6, "n": 3, "sampling_seed": 5}
        assert len(engine.generate(input_ids=IDS, sampling_params=params)) == 3
    assert ask(without_cache, turn)[0] == warm
