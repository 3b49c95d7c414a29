"""Sliding windows in every tier: words as transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rigs.models.model_oracle import greedy_words
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import (
    SchedulerRig,
    greedy,
    prompt,
    rig_that_knows,
    run_beside_evictions,
    stored_in_files,
    watch_repeats,
)
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

WINDOW = 12
WORDS = 16
PROMPTS = [prompt(1, 37), prompt(2, 21), prompt(1, 37)[:24] + prompt(3, 9)]


STORED: dict[str, Any] = {**stored_in_files(4), "hicache_ratio": 3.0}
"""Settings with all tiers."""


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


def test_an_answer_is_continued_from_its_window(
    make_rig: Any, model: tuple[Path, PreTrainedModel]
) -> None:
    rig = make_rig(mamba_track_interval=8)
    turn = PROMPTS[1] + words_of(model[1], PROMPTS[1])
    assert rig.generate([PROMPTS[1]], WORDS) == [turn[len(PROMPTS[1]) :]]
    longer = [*turn, 5, 6, 7]
    rig.run(rig.request("next", longer, greedy(WORDS)))
    assert rig.results["next"].output_ids == words_of(model[1], longer)
    assert rig.results["next"].cached == (32, 0, 0), "the last snapshot of decoding"


def test_words_are_right_from_l2_and_l3(make_rig: Any, words: list[list[int]]) -> None:
    rig = make_rig(**STORED)
    assert rig.generate(PROMPTS, WORDS) == words
    rig.settle()
    rig.tree.evict(EvictParams(num_tokens=10_000))
    rig.run(rig.request("from L2", PROMPTS[0], greedy(WORDS)))
    assert rig.results["from L2"].output_ids == words[0]
    assert rig.results["from L2"].cached == (0, 36, 0)
    rig.settle()
    other = make_rig(**STORED)
    other.run(other.request("from L3", PROMPTS[0], greedy(WORDS)))
    assert other.results["from L3"].output_ids == words[0]
    assert other.results["from L3"].cached == (0, 0, 36)


def note_positions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions that the model computes from now on."""
    seen: list[int] = []
    forward = ModelRunner.forward

    def noting(runner: ModelRunner, batch: ForwardBatch) -> Any:
        seen.extend(batch.positions.tolist())
        return forward(runner, batch)

    monkeypatch.setattr(ModelRunner, "forward", noting)
    return seen


@pytest.mark.parametrize("tier", ["L1", "L2", "L3"])
@pytest.mark.parametrize("hit", [4, 12, 16])
def test_a_hit_that_ends_within_a_window_is_continued_at_its_position(
    make_rig: Any,
    model: tuple[Path, PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
    hit: int,
    tier: str,
) -> None:
    """The first tokens after the hit see keys from before it: fewer than a window has, as many, or
    more. They have the positions after the hit, not those within the window."""
    known = prompt(7, hit + 1)
    rig = rig_that_knows(known, tier, make_rig, STORED)
    seen = note_positions(monkeypatch)
    asked = [*known[:hit], known[hit] ^ 1, *prompt(8, 20)]
    rig.run(rig.request("fork", asked, greedy(WORDS)))
    assert rig.results["fork"].cached == tuple(
        hit if one == tier else 0 for one in ("L1", "L2", "L3")
    )
    found = rig.results["fork"].output_ids
    assert found == greedy_words(model[1], asked, found) and len(found) == WORDS
    assert seen == list(range(hit, len(asked) + WORDS - 1))


@pytest.mark.parametrize("tier", ["L1", "L2", "L3"])
@pytest.mark.parametrize("length", [4, 12, 32])
def test_a_whole_prompt_computes_its_last_token(
    make_rig: Any,
    model: tuple[Path, PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
    length: int,
    tier: str,
) -> None:
    known = prompt(7, length)
    rig = rig_that_knows(known, tier, make_rig, STORED)
    contexts = watch_repeats(monkeypatch)
    rig.run(rig.request("again", known, greedy(WORDS)))
    assert contexts == [length]
    assert rig.results["again"].cached == tuple(
        length - 1 if one == tier else 0 for one in ("L1", "L2", "L3")
    )
    found = rig.results["again"].output_ids
    assert found == greedy_words(model[1], known, found) and len(found) == WORDS
    rig.check()


def test_a_request_keeps_its_window_while_all_others_are_evicted(
    make_rig: Any, model: tuple[Path, PreTrainedModel]
) -> None:
    rig = make_rig()
    known = prompt(7, 33)
    asked = [*known, *prompt(8, 20)]
    runs = run_beside_evictions(rig, known, asked, WORDS)
    assert runs.cached == (32, 0, 0)
    found = runs.output_ids
    assert found == greedy_words(model[1], asked, found) and len(found) == WORDS
    rig.tree.evict(EvictParams(num_tokens=10_000, mamba_num=100))
    assert rig.tree.mamba_slots()["used_mamba_slots"] == rig.tree.total_size() == 0


def test_windows_that_leave_first_leave_their_pages(
    make_rig: Any, model: tuple[Path, PreTrainedModel]
) -> None:
    """A longer prompt needs the pages of a shorter one, whose window may go alone."""
    rig = make_rig()
    short, long = prompt(7, 9), prompt(7, 9) + prompt(8, 16)
    for tokens in (short, long, long):
        rig.generate([tokens], 1)
    tokens_kept = rig.tree.total_size()
    gone = rig.tree.evict(EvictParams(mamba_num=1))
    assert (gone.mamba_num_evicted, gone.num_tokens_evicted) == (1, 0)
    rig.run(rig.request("long", [*long, 5], greedy(WORDS)))
    assert rig.results["long"].cached == (24, 0, 0), "pages before the short one's end"
    rig.run(rig.request("short", [*short, 5], greedy(1)))
    assert rig.results["short"].cached == (0, 0, 0), "no window, no hit"
    assert rig.tree.total_size() >= tokens_kept
    found = rig.results["long"].output_ids
    assert found == greedy_words(model[1], [*long, 5], found)
    rig.run(rig.request("again", [*short, 5], greedy(1)))
    assert rig.results["again"].cached == (8, 0, 0), "computing the prompt left its window"
    rig.check()


def test_words_are_right_after_retractions(make_rig: Any, words: list[list[int]]) -> None:
    rig = make_rig(pool_tokens=80, num_states=6, schedule_conservativeness=0.1)
    for _ in range(3):
        assert rig.generate(PROMPTS, WORDS) == words
    assert rig.scheduler.state.counters.retractions > 0
