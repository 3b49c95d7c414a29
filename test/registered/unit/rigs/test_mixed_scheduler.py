"""A slice of the runs that mix features, the plan of all of them, and proof that they can fail.

The night's runs are `test_mixed_scheduler_nightly.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
import torch

from rigs.mixed.held_copies import HeldCopies
from rigs.mixed.mixed_scheduler import FEATURES, NEVER_TOGETHER, MixedScheduler, run_seed
from rigs.mixed.plan import Mix, all_mixes, covering_mixes
from sglang.srt.layers.vocab_parallel_embedding import VocabLogits
from sglang.srt.mem_cache.l2.layer_done_counter import LayerDoneCounter
from sglang.srt.mem_cache.tree.kv_events import BlockRemoved, KVEventLog
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

PLAIN = Mix(
    family="deepseek_v3",
    kv_cache_dtype="auto",
    num_drafts=0,
    max_requests=8,
    tiers=1,
    is_buffer=False,
    damages_l2=False,
    is_small=False,
    overlap=False,
    page_size=4,
    chunk_tokens=-1,
    eviction="lru",
)


def test_each_pair_of_settings_that_is_possible_is_in_the_plan() -> None:
    plan = covering_mixes()
    found = Counter(pair for mix in plan for pair in mix.pairs())
    possible = {pair for mix in all_mixes() for pair in mix.pairs()}
    assert found.keys() == possible
    assert len(plan) <= 35
    assert all(mix.is_possible for mix in plan)


@pytest.mark.parametrize("seed", range(len(covering_mixes())))
def test_mixed_work_gives_right_words(seed: int) -> None:
    outcome = run_seed(seed, steps=20)
    assert outcome.counts["ended by length"]


def test_only_what_excludes_each_other_need_not_meet() -> None:
    pairs = {frozenset(two) for two in itertools.combinations(FEATURES, 2)}
    assert not NEVER_TOGETHER - pairs


def test_a_wrong_log_probability_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = MixedScheduler(1, PLAIN)
    forward = ModelRunner.forward

    def warmer(runner: ModelRunner, batch: Any) -> Any:
        output = forward(runner, batch)
        if runner is run.rig.worker._runner:
            output.logits = VocabLogits.of(output.logits.part * 1.01)
        return output

    monkeypatch.setattr(ModelRunner, "forward", warmer)
    with pytest.raises(AssertionError, match="with log probability"):
        run.run(40)


def test_an_event_that_is_not_told_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    note = KVEventLog._note

    def forgetful(log: KVEventLog, event: Any) -> None:
        if not isinstance(event, BlockRemoved):
            note(log, event)

    monkeypatch.setattr(KVEventLog, "_note", forgetful)
    with pytest.raises(AssertionError, match=r"stored twice|the mirror has blocks that are gone"):
        MixedScheduler(1, PLAIN).run(200)


def test_a_byte_that_changes_in_the_tree_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The byte is the last of a number, so that no word shows it."""
    run = MixedScheduler(1, PLAIN)
    forward = ModelRunner.forward

    def spoiling(runner: ModelRunner, batch: Any) -> Any:
        output = forward(runner, batch)
        if runner is run.rig.worker._runner:
            slots = run.rig.tree.all_values_flatten()
            runner.token_to_kv_pool.parts[0][0].view(torch.uint8)[slots[-1:], ..., 0] ^= 1
        return output

    monkeypatch.setattr(ModelRunner, "forward", spoiling)
    with pytest.raises(AssertionError, match=r"bytes of .* changed: kv"):
        run.run(200)


def test_a_step_that_does_not_wait_for_its_load_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads would mostly load in time."""
    run = MixedScheduler(1, dataclasses.replace(PLAIN, tiers=2))
    run._copies = HeldCopies()
    monkeypatch.setattr(LayerDoneCounter, "wait_until", lambda *_: None)
    with pytest.raises(AssertionError, match="log probability"):
        run.run(200)
