"""Near choices of rows and experts; a cold engine and a search know of them and of no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rigs.layers import exchange_search, near_choices
from rigs.layers.exchange_search import TextLogits
from rigs.layers.near_choices import Exchange, exchanged
from rigs.mixed import cold_engine
from rigs.mixed.cold_engine import TOLERANCES, ColdEngine, _differences, _Run
from rigs.mixed.mixed_scheduler import cold_engine as engine_of
from rigs.models.model_oracle import prompt
from rigs.models.tiny_models import save_tiny_checkpoint
from sglang.srt.layers.attention import dsa_backend
from sglang.srt.layers.moe import sparse_moe
from sglang.srt.layers.moe.sparse_moe import RouterOptions
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=11, suite="base-a-test-cpu")

WIDE = 0.05


def test_near_rows_are_exchanged() -> None:
    scores = torch.tensor([[4.0, 1.0, 1.00001, 0.2], [4.0, 3.0, 1.0, -torch.inf]])
    with exchanged() as near:
        chosen = dsa_backend.choose_tokens(scores, 2)
    assert chosen.tolist() == [[0, 2], [0, 1]] and list(near) == [Exchange(0, 0, 2, 1)]
    assert list(near.values()) == pytest.approx([1e-5 / 4], rel=0.05)
    with exchanged(near):
        assert dsa_backend.choose_tokens(scores, 2).tolist() == [[0, 1], [0, 1]]


def test_near_experts_are_exchanged_with_weights_of_their_own() -> None:
    options = RouterOptions(num_experts=4, top_k=2, scoring="sigmoid", renormalize=False)
    logits, bias = torch.tensor([[0.0, 2.0, 1.0, -3.0]]), torch.zeros(4)
    bias[0] = logits[0, 2].sigmoid() - 0.5
    with exchanged() as near:
        _, ids = sparse_moe.select_experts(logits, options, bias)
    assert ids.tolist() == [[1, 0]] and list(near) == [Exchange(0, 0, 0, 2)]
    with exchanged(near):
        weights, ids = sparse_moe.select_experts(logits, options, bias)
    assert ids.tolist() == [[1, 2]] and torch.equal(weights, logits.sigmoid()[:, [1, 2]])


@pytest.mark.parametrize("family", ["deepseek_v4", "glm5_next"])
def test_words_by_a_near_choice_are_right_and_by_another_are_wrong(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    engine, said = ColdEngine(engine_of(family, "auto").path, "auto"), prompt(80, 3)
    (words,) = engine._rig.generate([said], 10)
    plain = engine._run(said, words, frozenset())
    with monkeypatch.context() as context:
        context.setattr(near_choices, "NEAR_SHARE", WIDE)
        near = engine._run(said, words, frozenset()).near
    runs = (engine._run(said, words, frozenset([one])) for one in near)
    # The words stay the likeliest, and their log probabilities change.
    other = next(
        run for run in runs
        if max(_differences(run, of(run))) == 0.0 and max(_differences(plain, of(run))) > 0.01
    )  # fmt: skip
    assert engine.assert_words(said, words, of(plain)) <= TOLERANCES["auto"]
    with pytest.raises(AssertionError, match="none explains it"):
        engine.assert_words(said, words, of(other))
    engine._known.clear()
    monkeypatch.setattr(cold_engine, "_MOST_RUNS", 1 + len(near))
    monkeypatch.setattr(near_choices, "NEAR_SHARE", WIDE)
    assert engine.assert_words(said, words, of(other)) <= TOLERANCES["auto"]


def of(run: _Run) -> list[float]:
    """The words' log probabilities."""
    return [logprob for logprob, _ in run.expected]


def test_a_log_probability_that_is_no_number_is_wrong(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "qwen3", eos_token_id=None)
    engine = ColdEngine(tmp_path, "auto")
    run = engine._run([5, 6, 7], [9], frozenset())
    assert _differences(run, [float("nan")]) == [float("inf")]


def test_logits_are_explained_by_near_choices_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_checkpoint(tmp_path, "deepseek_v4", max_position_embeddings=128)
    text, places = TextLogits(tmp_path, prompt(40, 3)), range(9, 40, 10)

    def logits_of(*exchanges: Exchange) -> dict[int, torch.Tensor]:
        logits = text._run(frozenset(exchanges)).logits
        return {at: logits[at] for at in places}

    plain = logits_of()
    assert text.assert_explained(plain) == frozenset()
    assert text.assert_explained(plain | {39: plain[39] + 0.9e-3}) == frozenset()
    text._runs.clear()
    monkeypatch.setattr(near_choices, "NEAR_SHARE", WIDE / 5)
    monkeypatch.setattr(exchange_search, "MOST_RUNS", 25)

    def next_of(moved: list[bool], *exchanges: Exchange) -> Exchange:
        """A further choice that moves the logits at these places."""
        base = logits_of(*exchanges)
        for one in text._run(frozenset(exchanges)).near:
            others = logits_of(*exchanges, one)
            if [not torch.allclose(others[at], base[at], atol=0.005) for at in places] == moved:
                return one
        raise AssertionError("none of the near choices does")

    early = next_of([True, True, True, False])
    late = next_of([False, False, False, True], early)
    both = logits_of(early, late)
    text._runs.clear()
    assert text.assert_explained(both) == {early, late}
    assert len(text._runs) < 20, "it goes on from the run that agrees the longest"
    wrong = both | {29: both[29] + 0.002 * both[29].abs().max()}
    for got in (wrong, plain | {19: torch.full_like(plain[19], torch.nan)}):
        with pytest.raises(AssertionError, match=r"after token .9 are .* 25 runs .* none explains"):
            text.assert_explained(got)
    monkeypatch.undo()
    text._runs.clear()
    with pytest.raises(AssertionError, match="1 runs differ"):
        text.assert_explained(both)
