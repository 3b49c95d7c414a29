"""Conversations in rounds without a server: hits by the engine's trees, times by hand."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.__main__ import parse_options
from benchmark.command import Refused
from benchmark.gpu_hybrid import turns
from benchmark.report import Report
from benchmark.simulate import rounds
from benchmark.simulate.rounds import BatchCosts, Talked, add_talk_figures, exchanges, h200_costs
from benchmark.simulate.talk import Exchange
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

COSTS = BatchCosts(
    by_pass=1.0, linear=0.01, by_pair=0.0, load=0.05, step=0.5, by_request=0.25, by_context=0.0,
    read=None,
)  # fmt: skip
NEW = Exchange(0, 100, 0, 0)


def timed(*found: list[Exchange], l1: int = 1000, rate: float = float("inf")) -> Talked:
    return rounds.timed(found, COSTS, l1=l1, output_len=3, request_rate=rate)


def times(talked: Talked) -> list[tuple[float, float]]:
    """TTFT and latency of all requests."""
    return [(one.ttft, one.latency) for turn in talked.rounds for one in turn]


def small(*words: str) -> argparse.Namespace:
    """Four clients, four rounds of 128 new tokens and 128 of an answer, in 2,048 tokens of L1."""
    return parse_options(turns.COMMAND, "turns", "", ["--quick", *words])


def by_round(args: argparse.Namespace, *, l2: bool) -> list[tuple[int, int]]:
    """Tokens from L1 and from L2."""
    found = exchanges(args, l2=l2)
    return [(sum(one.device for one in turn), sum(one.host for one in turn)) for turn in found]


def test_requests_that_wait_share_a_pass_and_steps() -> None:
    # A pass of 1 s and two prompts of 1 s; two steps, each of 0.5 s and 0.25 s a request.
    talked = timed([NEW, NEW])
    assert times(talked) == [(3.0, 5.0)] * 2 and talked.seconds == 5.0


def test_a_request_without_room_waits_for_the_end_of_another() -> None:
    assert times(timed([NEW, NEW], l1=205)) == [(2.0, 3.5), (5.5, 7.0)]
    assert times(timed([NEW, NEW], l1=206)) == times(timed([NEW, NEW]))
    # At 0, 2.5 and 5 s. The first ends at 5.75 s, while the second decodes.
    assert times(timed([NEW] * 3, l1=250, rate=0.4)) == [(2.0, 5.75), (2.25, 6.25), (2.75, 4.5)]


def test_cached_tokens_cost_only_their_load() -> None:
    assert times(timed([Exchange(0, 100, 40, 20)]))[0] == pytest.approx((1 + 0.4 + 1.0, 3.9))


def test_long_prompts_take_several_passes() -> None:
    long = Exchange(0, rounds.CHUNK + 1, 0, 0)
    assert times(timed([long]))[0][0] == pytest.approx(2 + 0.01 * long.prompt)


def test_requests_are_sent_at_the_rate_and_late_ones_at_once() -> None:
    # At 0 and 10 s; the second round begins at 13.5 s, before the times of its requests.
    talked = timed([NEW, NEW], [NEW, NEW], rate=0.1)
    assert times(talked) == [(2.0, 3.5)] * 4 and talked.seconds == 33.5
    # At 0 and 1 s, and both of the second round after 7 s.
    assert times(timed([NEW, NEW], [NEW, NEW], rate=1.0))[2:] == [(3.0, 5.0)] * 2


def test_answers_come_back_up_to_their_last_snapshot() -> None:
    # Every 64 tokens, and the last token of an answer is not computed: 64 of 128 tokens. L1 holds
    # what is asked in the first two rounds.
    plain, tiered = (by_round(small(), l2=l2) for l2 in (False, True))
    assert plain[:2] == tiered[:2] == [(0, 0), (4 * (128 + 64), 0)]
    assert [sum(found) for found in tiered] == [
        4 * turn * 256 - 4 * 64 * bool(turn) for turn in range(4)
    ]
    assert all(not host for _, host in plain) and sum(plain[3]) < sum(tiered[3])


def test_requests_that_run_together_take_room_from_those_that_wait() -> None:
    """1,408 is what a server gave; one after the other, requests would find 1,664."""
    assert by_round(small(), l2=True)[2] == (1408, 384)


def test_a_conversation_has_to_fit_into_l1() -> None:
    with pytest.raises(Refused, match=r"--l1 2048: .* a conversation of 2304; lower --rounds"):
        exchanges(small("--rounds", "9"), l2=False)


@pytest.mark.parametrize(
    ("layers", "ms"), [(12, {128: 9.4, 8192: 40.4, 32768: 179}), (8, {8192: 25.5})]
)
def test_costs_are_those_that_were_measured(layers: int, ms: dict[int, float]) -> None:
    costs = h200_costs(layers)
    for tokens, measured in ms.items():
        passes = -(-tokens // rounds.CHUNK) * (costs.by_pass - 2e-3)
        assert 1e3 * (passes + costs.prefill(tokens, 0)) == pytest.approx(measured, rel=0.1)
    decode = {12: 0.741, 8: 0.5}[layers]
    assert 1e3 * (costs.step + costs.by_request) == pytest.approx(decode, rel=0.1)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_figures_stand_beside_those_of_the_forecast(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    report = Report("gpu-hybrid turns", {}, "cpu", path)
    forecast = [[Exchange(0, 100, 50, 0)]]
    said = rounds.timed(forecast, COSTS, l1=1000, output_len=3)
    add_talk_figures(report, "+ L2", timed([NEW]), said)
    blind = rounds.timed(forecast, None, l1=1000, output_len=3)
    add_talk_figures(report, "TP 2", timed([NEW]), blind)
    found = {
        (one["case"]["server"], one["case"]["round"], one["metric"]): one for one in lines(path)
    }
    for number in (1, "all"):
        hits = found["+ L2", number, "hit_rate"]
        assert (hits["value"], hits["expected"]) == (0.0, 0.5)
        mean = found["+ L2", number, "mean_ttft"]
        assert (mean["value"], mean["expected"], mean["details"]) == (2000, 1500, {"raw": [2000.0]})
        assert found["TP 2", number, "hit_rate"]["expected"] == 0.5
        assert "expected" not in found["TP 2", number, "mean_ttft"]
    rate = found["+ L2", "all", "output_throughput"]
    assert (rate["value"], rate["expected"]) == pytest.approx((3 / 3.5, 3 / 3.0), rel=1e-5)
    assert "expected" not in found["TP 2", "all", "duration"]
