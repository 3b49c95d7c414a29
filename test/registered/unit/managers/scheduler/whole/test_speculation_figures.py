"""Figures of speculation: how many tokens a verification gave, by request and by tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rigs.drafts.guesses import guessed
from rigs.drafts.replayed_graphs import replayed_graphs
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.messages.io_struct import (
    CachedTokensDetails,
    GetCacheViewReq,
    GetMetricsReq,
    RequestOutput,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

IDS = prompt(3, 20)
NEW_TOKENS = 25
"""The prefill gives one; six verifications of three drafts give the others."""
SPECULATES: dict[str, Any] = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3}


@pytest.fixture(name="model", scope="module")
def make_model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("deepseek_v3", eos_token_id=None, mtp=True)


@pytest.fixture(name="text", scope="module")
def make_text(model: Path) -> list[int]:
    """The prompt and what the model says."""
    return IDS + SchedulerRig(model).generate([IDS], NEW_TOKENS)[0]


def metrics_of(rig: SchedulerRig) -> str:
    rig.step(GetMetricsReq(req_id="metrics"))
    text = rig.answers[-1].data["text"]
    assert isinstance(text, str)
    return text


def speculation_view(rig: SchedulerRig) -> Any:
    rig.step(GetCacheViewReq(req_id="view"))
    return rig.answers[-1].data["speculation"]


def last(rig: SchedulerRig, rid: str) -> RequestOutput:
    output = rig.results[rid].last
    assert output is not None
    return output


def test_figures_are_counted_by_request_and_tier(model: Path, text: list[int]) -> None:
    rig = SchedulerRig(model, **SPECULATES)
    with guessed([text], 1.0):
        rig.run(rig.request("cold", IDS, greedy(NEW_TOKENS)))
        rig.run(rig.request("again", IDS, greedy(NEW_TOKENS)))
    for rid in ("cold", "again"):
        figures = last(rig, rid).verifications
        assert figures is not None
        assert (figures.count, figures.accepted) == (6, 18)
        assert figures.accept_length == 4.0
    with guessed([text], 0.0):
        rig.run(rig.request("wrong", IDS, greedy(NEW_TOKENS)))
    figures = last(rig, "wrong").verifications
    assert figures is not None
    assert (figures.count, figures.accepted) == (24, 0)
    assert figures.accept_length == 1.0
    shown = metrics_of(rig)
    for line in (
        "sglang:spec_accept_length 2.0",  # 72 tokens of 36 verifications
        "sglang:spec_accept_rate 0.3333333333333333",  # 36 of 108
        'sglang:spec_verifications_total{tier="none"} 6.0',
        'sglang:spec_accepted_drafts_total{tier="none"} 18.0',
        'sglang:spec_drafts_total{tier="none"} 18.0',
        'sglang:spec_verifications_total{tier="device"} 30.0',
        'sglang:spec_accepted_drafts_total{tier="device"} 18.0',
        'sglang:spec_drafts_total{tier="device"} 90.0',
        'sglang:spec_verifications_total{tier="storage"} 0.0',
    ):
        assert f"{line}\n" in shown, line
    assert "mean accepted length 2.00" in str(rig.scheduler.state.recent)
    view = speculation_view(rig)
    assert view["num_drafts"] == 3
    assert view["tiers"]["none"] == {"count": 6, "accepted": 18}
    assert view["tiers"]["device"] == {"count": 30, "accepted": 18}


@pytest.mark.settled
@pytest.mark.parametrize("overlaps", [False, True])
def test_drafts_after_the_end_do_not_count(model: Path, text: list[int], overlaps: bool) -> None:
    """The last of two verifications accepts three drafts, and the request ends after one of them.
    Overlapping steps add a third verification, in vain."""
    with replayed_graphs(), guessed([text], 1.0):
        rig = SchedulerRig(model, overlap=overlaps, **SPECULATES)
        rig.scheduler._draft_policy.always = False  # The policy measures.
        rig.run(rig.request("short", IDS, greedy(7)))
    assert rig.scheduler.state.counters.decode_steps == 2 + overlaps
    figures = last(rig, "short").verifications
    assert figures is not None
    assert (figures.count, figures.accepted) == (2, 4)
    (size,) = speculation_view(rig)["sizes"]
    assert size["tokens"] == 3.0, "the policy counts the same tokens: four and two"
    assert rig.results["short"].output_ids == text[20:27]


@pytest.mark.parametrize(("interval", "pieces"), [(1, [1, *[4] * 6]), (6, [1, 8, 8, 8])])
def test_a_stream_gets_the_tokens_of_a_verification_together(
    model: Path, text: list[int], interval: int, pieces: list[int]
) -> None:
    rig = SchedulerRig(model, stream_interval=interval, **SPECULATES)
    with guessed([text], 1.0):
        rig.run(rig.request("stream", IDS, greedy(NEW_TOKENS), stream=True))
    assert rig.results["stream"].pieces == pieces
    assert rig.results["stream"].output_ids == text[20:]


def test_without_speculation_there_are_no_figures(model: Path) -> None:
    rig = SchedulerRig(model)
    rig.run(rig.request("plain", IDS))
    assert last(rig, "plain").verifications is None
    assert "sglang:spec_" not in metrics_of(rig)
    assert "accepted" not in str(rig.scheduler.state.recent)
    assert speculation_view(rig) is None


def test_the_lowest_tier_is_the_last_that_contributed() -> None:
    assert CachedTokensDetails().lowest_tier == "none"
    assert CachedTokensDetails(device=8).lowest_tier == "device"
    assert CachedTokensDetails(device=8, host=1).lowest_tier == "host"
    assert CachedTokensDetails(device=8, storage=1).lowest_tier == "storage"
