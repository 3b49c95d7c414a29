"""Ten minutes of the soak with kills and stops: see `rigs.disaggregation.pd_soak`.

The seed is drawn, so that each night sees another one; it is printed first.
"""

from __future__ import annotations

import secrets

import pytest

from rigs.disaggregation.pd_soak import draw_transport, run_soak
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=600, suite="nightly-test-cpu", nightly=True)


@pytest.mark.timeout(1100)
def test_ten_minutes_of_kills_and_stops() -> None:
    seed = secrets.randbits(31)
    over = draw_transport(seed)
    print(f"seed {seed}, {over}")
    outcome = run_soak(590.0, seed, over)
    print("\n".join(f"{n:10} {what}" for what, n in sorted(outcome.counts.items())))
    assert not outcome.wrong and not outcome.hung
    for mode in ("prefill", "decode"):
        for what in ("killed", "stopped", "failed", "aborted"):
            assert outcome.counts[f"{mode}: {what}"] > 5, f"{mode}: {what}"
        assert outcome.counts[f"{mode}: right"] > 500
