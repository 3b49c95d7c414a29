"""A short run of `rigs.disaggregation.pd_attacks`: strangers at all ports."""

from __future__ import annotations

from rigs.disaggregation.pd_attacks import run_attacks
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=16, suite="base-b-test-cpu")

AT_PORTS = ("flood", "endless", "idle", "bombs")


def test_honest_requests_succeed_beside_strangers() -> None:
    """Without a secret, which would keep most of it out."""
    report = run_attacks(10.0, 4.0, AT_PORTS, has_secret=False)
    assert report.is_good, "\n".join(report.lines())
    assert len(report.attacked) == 40
