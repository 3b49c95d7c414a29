"""Ten minutes of `rigs.disaggregation.pd_attacks`, half of them with a secret."""

from __future__ import annotations

import pytest

from rigs.disaggregation.pd_attacks import run_attacks
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=900, suite="nightly-test-cpu", nightly=True)


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("has_secret", [False, True])
def test_honest_requests_succeed_beside_ten_minutes_of_strangers(has_secret: bool) -> None:
    report = run_attacks(300.0, has_secret=has_secret)
    print("\n".join(report.lines()))
    assert report.is_good
