"""Servers behind the real router are restarted one after the other, under load (row P14)."""

from __future__ import annotations

import pytest

from rigs.disaggregation.pd_servers import assert_restarts_cost_nothing
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=250, suite="nightly-test-cpu", nightly=True)


@pytest.mark.timeout(600)
def test_no_request_fails_while_decode_servers_are_restarted() -> None:
    assert_restarts_cost_nothing(1, 2, "decode")


@pytest.mark.timeout(600)
def test_no_request_fails_while_all_servers_are_restarted() -> None:
    assert_restarts_cost_nothing(2, 2, "")
