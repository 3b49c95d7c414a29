"""One round of the soak with kills and stops: see `rigs.disaggregation.pd_soak`."""

from __future__ import annotations

from rigs.disaggregation.pd_soak import run_soak
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=9, suite="base-b-test-cpu")


def test_a_round_of_kills_and_stops() -> None:
    outcome = run_soak(1.0, seed=9)  # One round, with two faults a second.
    print(outcome)
    assert not outcome.wrong and not outcome.hung
    counts = outcome.counts
    assert counts["rounds with faults"] > 0
    assert sum(counts[f"{mode}: {how}"] for mode in ("prefill", "decode") for how in
               ("killed", "stopped")) > 3  # fmt: skip
    assert counts["decode: right"] > 20
