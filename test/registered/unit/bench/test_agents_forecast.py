"""The forecast of agents' conversations: small loads by hand."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import pytest

from benchmark.gpu_hicache.agents_forecast import Forecast, forecast, serve
from benchmark.gpu_hicache.agents_rates import Rates
from benchmark.simulate import agents_runs
from rigs.bench.multiturn import Conversations
from sglang.planning.served_costs import Costs, ServerSizes
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

TALK = Conversations(
    clients=1, rounds=2, shared_len=60, first_len=40, request_len=50, output_len=10
)
COSTS = Costs(linear=1.0, by_pair=0.0, step=0.5, by_context=0.0)
SIZES = ServerSizes(page_size=10, l1=1000, l2=1000, threshold=10)


def ttfts(found: Forecast) -> list[float]:
    (run,) = found.runs
    return [one.ttft for one in run.requests]


def test_one_session_on_one_server_computes_only_new_tokens() -> None:
    found = forecast(TALK, COSTS, SIZES, servers=1, orders=1)
    # 100 tokens; then 50, the answer's last token, and the nine that fill no page.
    assert ttfts(found) == [100.0, 60.0]
    assert found.of("seconds") == (169.0, 169.0, 169.0)
    assert found.of("hit_rate")[0] == 100 / (100 + 160)
    assert found.hit_rates() == [0.0, 100 / 160] and found.ttfts() == [100.0, 60.0]


def test_a_server_without_a_store_computes_what_another_has() -> None:
    found = forecast(TALK, COSTS, SIZES, servers=2, orders=1)
    assert ttfts(found) == [100.0, 160.0]


def test_a_server_with_a_store_reads_what_another_has_written() -> None:
    found = forecast(TALK, replace(COSTS, read=0.1), SIZES, servers=2, orders=1)
    assert ttfts(found) == pytest.approx([100.0, 10.0 + 60.0])


def test_a_client_takes_time_for_each_token_of_a_prompt() -> None:
    run = serve(TALK, replace(COSTS, by_prompt_token=0.1), SIZES, servers=1, seed=1)
    first, second = (one.ttft for one in run.requests)
    assert 105 < first < 115 and 60 + 8 < second < 60 + 24
    assert run.requests != serve(TALK, COSTS, SIZES, servers=1, seed=1).requests


def test_sessions_have_their_own_pages_behind_the_shared_ones() -> None:
    talk = replace(TALK, clients=2, rounds=1)
    run = serve(talk, COSTS, replace(SIZES, chunk=100), servers=1, seed=0)
    assert [one.device for one in run.requests] == [0, 60]


def test_costs_give_the_times_that_were_measured() -> None:
    costs = Costs(
        linear=2e-5, by_pair=1e-9, by_before=3e-6, step=0.01, by_request=0.002, by_context=1e-7,
        read=1e-4, write=2e-4, copied=8e-5, load=1e-6, by_prompt_token=1e-6,
    )  # fmt: skip
    rates = Rates(
        probe=4000,
        chunk=2000,
        prefill=4000e-6 + costs.prefill(2000, 0) + costs.prefill(2000, 2000),
        turn_prefill=4250e-6 + costs.prefill(250, 4000),
        quarter_prefill=1000e-6 + costs.prefill(1000, 0),
        repeated=4000e-6 + 0.012,
        step=0.012,
        long_step=0.012 + 4000e-7,
        together=3,
        joint_step=0.016,
        read=1e-4,
        both_read=16e-5,
        write=2e-4,
        load=1e-6,
    )
    found = rates.costs()
    for name in Costs.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(costs, name)), name


def lines(**rates: float) -> list[str]:
    """A run of servers with L3, and a last one that did not end."""
    about = {"arguments": {"answer": 300, "sessions": 12}}
    measured: list[dict[str, Any]] = [
        {"metric": "start", "value": 1.0, "case": {"servers": "with L3 0, with L3 1"}},
        {"metric": "prefill", "value": 1000.0, "case": {"l3": True, "tokens": 32768}},
        {"metric": "prefill", "value": 150.0, "case": {"l3": True, "tokens": 8192}},
        {"metric": "step", "value": 2.5, "case": {"l3": True, "context": 64}},
        {"metric": "step", "value": 4.0, "case": {"l3": True, "context": 32768}},
        *({"metric": name, "value": value, "case": {"l3": True}} for name, value in rates.items()),
        {"metric": "hit_rate", "value": 0.5, "case": {"servers": "with L3", "turn": "1"}},
        *(
            {"metric": name, "value": 0.9, "case": {"servers": "with L3"}}
            for name in ("hit_rate", "mean_ttft", "median_ttft", "output_throughput")
        ),
        {"metric": "start", "value": 1.0, "case": {"servers": "without 0, without 1"}},
    ]
    return [json.dumps({**about, **one}) for one in measured]


OPTIONS = argparse.Namespace(copied=0.75, load_gb_s=147.456, before_us=1.2, prompt_token_us=1.0)


def test_lines_without_rates_of_flows_get_them_from_options() -> None:
    (run,) = agents_runs.read_runs(lines(read_rate=1.47456))
    assert run.figures["hit_rate"] == 0.9
    rates = agents_runs.rates_of(run, OPTIONS)
    assert (rates.prefill, rates.quarter_prefill, rates.step) == (1.0, 0.15, 0.0025)
    # 100 us a token until the first token, 1 of the load and 1 of client and server.
    assert rates.read == rates.write == pytest.approx(98e-6)
    assert rates.costs().copied == pytest.approx(0.75 * 98e-6)
    assert rates.costs().by_prompt_token == pytest.approx(1e-6)


def test_lines_with_rates_of_flows_are_taken_as_they_are() -> None:
    flows = {"read_rate": 1.47456, "both_read_rate": 0.73728, "write_rate": 2.94912}
    (run,) = agents_runs.read_runs(lines(**flows, load_rate=14.7456))
    rates = agents_runs.rates_of(run, OPTIONS)
    found = rates.read, rates.both_read, rates.write, rates.load
    assert found == pytest.approx((100e-6, 200e-6, 50e-6, 10e-6))


def test_a_recorded_run_without_a_store_is_as_forecast() -> None:
    run = agents_runs.read_runs(agents_runs.RUNS.read_text().splitlines())[1]
    rates = agents_runs.rates_of(run, OPTIONS)
    assert rates.read is None
    size = agents_runs.size_of(run)
    sizes = ServerSizes(page_size=size.page_size, l1=size.l1, l2=size.l1, chunk=size.chunk)
    said = forecast(size.talk, rates.costs(1.2e-6), sizes, servers=2, orders=3)
    for metric in ("hit_rate", "mean_ttft", "output_throughput"):
        assert said.of(metric)[0] == pytest.approx(run.figures[metric], rel=0.1), metric
