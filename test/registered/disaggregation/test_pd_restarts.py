"""Mooncake's store and Transfer Engine in one process that ends and starts: see
`rigs.disaggregation.pd_restarts`."""

from __future__ import annotations

from rigs.disaggregation.pd_restarts import assert_good, run_restarts
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-b-test-cpu")

TIMES = 4


def test_restarts_lose_no_request() -> None:
    assert_good(run_restarts(TIMES), TIMES)
