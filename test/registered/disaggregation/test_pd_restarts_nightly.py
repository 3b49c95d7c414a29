"""Fifty restarts with Mooncake's store and Transfer Engine in one process: see
`rigs.disaggregation.pd_restarts`."""

from __future__ import annotations

import pytest

from rigs.disaggregation.nixl_package import needs_nixl
from rigs.disaggregation.pd_restarts import assert_good, run_restarts
from sglang.srt.arg_groups.disaggregation import TransferBackend
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=360, suite="nightly-test-cpu", nightly=True)

TIMES = 50


@pytest.mark.timeout(1100)
@pytest.mark.parametrize(
    "over",
    [TransferBackend.MOONCAKE_TCP, pytest.param(TransferBackend.NIXL, marks=needs_nixl)],
)
def test_fifty_restarts_lose_no_request(over: TransferBackend) -> None:
    outcome = run_restarts(TIMES, over)
    print(outcome)
    assert_good(outcome, TIMES)
