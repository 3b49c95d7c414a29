"""Windows or recurrent states, items of groups of tokens and unfinished groups in every tier: words
as transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rigs.models.model_oracle import GreedyOracle
from rigs.schedulers.scheduler_rig import (
    SchedulerRig,
    greedy,
    prompt,
    rig_that_knows,
    run_beside_evictions,
    stored_in_files,
    watch_repeats,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=25, suite="base-a-test-cpu")

PAGE = 16
WORDS = 24
PROMPTS = [prompt(1, 77), prompt(2, 45), prompt(1, 77)[:50] + prompt(3, 19)]
STORED: dict[str, Any] = {**stored_in_files(PAGE), "hicache_ratio": 3.0}
"""Settings with all tiers."""


FAMILIES: dict[str, dict[str, Any]] = {
    # The first pages end within the window.
    "deepseek_v4": {"sliding_window": 40},
    "glm5_next": {},
}


@pytest.fixture(scope="module", name="oracle", params=FAMILIES)
def make_oracle(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> GreedyOracle:
    path = tmp_path_factory.mktemp("compressed")
    return GreedyOracle(path, request.param, **FAMILIES[request.param])


@pytest.fixture(name="make_rig")
def rig_maker(oracle: GreedyOracle) -> Iterator[Any]:
    made = []

    def make(**args: Any) -> SchedulerRig:
        settings = {"page_size": PAGE, "num_states": 14, "chunked_prefill_size": 32, **args}
        made.append(SchedulerRig(oracle.path, **settings))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def has_recurrent_state(oracle: GreedyOracle) -> bool:
    return str(oracle.hf.config.model_type) != "deepseek_v4"


def assert_answers(rig: SchedulerRig, oracle: GreedyOracle) -> None:
    for tokens, words in zip(PROMPTS, rig.generate(PROMPTS, WORDS), strict=True):
        oracle.assert_words(tokens, words, WORDS)


def test_an_answer_is_continued_from_its_last_page(make_rig: Any, oracle: GreedyOracle) -> None:
    rig = make_rig(mamba_track_interval=PAGE)
    assert_answers(rig, oracle)
    longer = [*PROMPTS[1], *oracle.words(PROMPTS[1], WORDS), 5, 6, 7]
    rig.run(rig.request("next", longer, greedy(WORDS)))
    oracle.assert_words(longer, rig.results["next"].output_ids, WORDS)
    assert rig.results["next"].cached == (64, 0, 0), "the last snapshot of decoding"
    rig.check()


@pytest.mark.parametrize("tier", ["L1", "L2", "L3"])
@pytest.mark.parametrize("hit", [16, 32, 48, 64])
def test_a_hit_that_ends_at_any_page_is_continued(
    make_rig: Any, oracle: GreedyOracle, hit: int, tier: str
) -> None:
    """At the first two of these pages the window is not full; no group comes before the first."""
    known = prompt(7, hit + 1)
    rig = rig_that_knows(known, tier, make_rig, STORED)
    asked = [*known[:hit], known[hit] ^ 1, *prompt(8, 30)]
    rig.run(rig.request("fork", asked, greedy(WORDS)))
    assert rig.results["fork"].cached == tuple(
        hit if one == tier else 0 for one in ("L1", "L2", "L3")
    )
    oracle.assert_words(asked, rig.results["fork"].output_ids, WORDS)
    rig.check()


@pytest.mark.parametrize("tier", ["L1", "L2", "L3"])
def test_a_whole_prompt_computes_its_last_token_unless_a_state_is_recurrent(
    make_rig: Any, oracle: GreedyOracle, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """The token is the last of a group, and of a page: its state ends both."""
    known = prompt(7, 64)
    rig = rig_that_knows(known, tier, make_rig, STORED)
    contexts = watch_repeats(monkeypatch)
    # The first prompt leaves a state behind all of it, too.
    for number, tokens in enumerate((known, [*known, 5], [*known, 5], known)):
        rig.run(rig.request(f"{number}", tokens, greedy(WORDS)))
        oracle.assert_words(tokens, rig.results[f"{number}"].output_ids, WORDS)
    is_recurrent = has_recurrent_state(oracle)
    assert contexts == ([] if is_recurrent else [64, 64])
    hit = 48 if is_recurrent else 63
    cached = [rig.results[f"{number}"].cached for number in range(4)]
    assert cached[0] == tuple(hit if one == tier else 0 for one in ("L1", "L2", "L3"))
    assert cached[1:] == [(64, 0, 0), (64, 0, 0), (hit, 0, 0)]
    rig.check()


def test_samples_of_a_whole_prompt_compute_its_last_token(
    make_rig: Any, oracle: GreedyOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    contexts, known = watch_repeats(monkeypatch), prompt(7, 32)
    samples = [rig.request(f"s{i}", known, greedy(WORDS), sample_of="s0") for i in (1, 2)]
    rig.run(rig.request("s0", known, greedy(WORDS)), *samples)
    for sample in range(3):
        oracle.assert_words(known, rig.results[f"s{sample}"].output_ids, WORDS)
    assert contexts == ([] if has_recurrent_state(oracle) else [32, 32])


def test_words_are_right_after_retractions(make_rig: Any, oracle: GreedyOracle) -> None:
    rig = make_rig(pool_tokens=208, num_states=8, schedule_conservativeness=0.1)
    for _ in range(3):
        assert_answers(rig, oracle)
    assert rig.scheduler.state.counters.retractions > 0
    rig.check()


def test_a_request_keeps_its_prefix_while_all_others_are_evicted(
    make_rig: Any, oracle: GreedyOracle
) -> None:
    known = prompt(7, 65)
    asked = [*known, *prompt(8, 20)]
    found = run_beside_evictions(make_rig(), known, asked, WORDS)
    assert found.cached == (64, 0, 0)
    oracle.assert_words(asked, found.output_ids, WORDS)


def test_pages_of_an_open_group_are_not_published(make_rig: Any) -> None:
    """The cached part of a prompt ends at its last whole page, which is the end of a group."""
    rig = make_rig()
    rig.generate([prompt(9, 47)], 1)
    assert rig.tree.total_size() == 32
    rig.check()  # No slot of the last page is left behind.
    rig.run(rig.request("again", [*prompt(9, 47), 3], greedy(1)))
    assert rig.results["again"].cached == (32, 0, 0)
    rig.check()
