"""Sliding windows in every tier: words as transformers'."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

WINDOW = 12
WORDS = 16
PROMPTS = [prompt(1, 37), prompt(2, 21), prompt(1, 37)[:24] + prompt(3, 9)]


@pytest.fixture(scope="module", name="model", params=["ministral", "gpt_oss"])
def make_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("windows")
    return path, save_tiny_checkpoint(path, request.param, eos_token_id=None, sliding_window=WINDOW)


@pytest.fixture(scope="module")
def words(model: tuple[Path, PreTrainedModel]) -> list[list[int]]:
    return [words_of(model[1], tokens) for tokens in PROMPTS]


def words_of(hf: PreTrainedModel, tokens: list[int], count: int = WORDS) -> list[int]:
    generate: Any = hf.generate
    ids = generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False)
    return ids[0, len(tokens) :].tolist()  # type: ignore[no-any-return]


@pytest.fixture(name="make_rig")
def rig_maker(model: tuple[Path, PreTrainedModel]) -> Iterator[Any]:
    made = []

    def make(**args: Any) -> SchedulerRig:
        settings = {"page_size": 4, "num_states": 12, "chunked_prefill_size": 16, **args}
        made.append(SchedulerRig(model[0], **settings))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def cached(rig: SchedulerRig, rid: str) -> tuple[int, int, int]:
    """Tokens of a request's prompt that came from L1, L2 and L3."""
    last = rig.results[rid].last
    assert last is not None
    details = last.cached_tokens_details
    return details.device, details.host, details.storage


def test_an_answer_is_continued_from_its_window(
    make_rig: Any, model: tuple[Path, PreTrainedModel]
) -> None:
    rig = make_rig(mamba_track_interval=8)
    turn = PROMPTS[1] + words_of(model[1], PROMPTS[1])
    assert rig.generate([PROMPTS[1]], WORDS) == [turn[len(PROMPTS[1]) :]]
    longer = [*turn, 5, 6, 7]
    rig.run(rig.request("next", longer, greedy(WORDS)))
    assert rig.results["next"].output_ids == words_of(model[1], longer)
    assert cached(rig, "next") == (32, 0, 0), "the last snapshot of decoding"


def test_words_are_right_from_l2_and_l3(make_rig: Any, words: list[list[int]]) -> None:
    settings = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 3.0,
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": 4}),
    }
    rig = make_rig(**settings)
    assert rig.generate(PROMPTS, WORDS) == words
    rig.settle()
    rig.tree.evict(EvictParams(num_tokens=10_000))
    rig.run(rig.request("from L2", PROMPTS[0], greedy(WORDS)))
    assert rig.results["from L2"].output_ids == words[0]
    assert cached(rig, "from L2") == (0, 36, 0)
    rig.settle()
    other = make_rig(**settings)
    other.run(other.request("from L3", PROMPTS[0], greedy(WORDS)))
    assert other.results["from L3"].output_ids == words[0]
    assert cached(other, "from L3") == (0, 0, 36)


def test_words_are_right_after_retractions(make_rig: Any, words: list[list[int]]) -> None:
    rig = make_rig(pool_tokens=80, num_states=6, schedule_conservativeness=0.1)
    for _ in range(3):
        assert rig.generate(PROMPTS, WORDS) == words
    assert rig.scheduler.state.counters.retractions > 0
