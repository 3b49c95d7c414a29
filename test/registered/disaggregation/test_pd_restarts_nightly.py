"""Fifty restarts with Mooncake's store and Transfer Engine in one process: see
`rigs.disaggregation.pd_restarts`."""

from __future__ import annotations

import pytest

from rigs.disaggregation.pd_restarts import assert_good, run_restarts
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=180, suite="nightly-test-cpu", nightly=True)

TIMES = 50


@pytest.mark.timeout(1100)
def test_fifty_restarts_lose_no_request() -> None:
    outcome = run_restarts(TIMES)
    print(outcome)
    assert_good(outcome, TIMES)
