"""A quarter of an hour of `rigs.disaggregation.pd_attacks`, with and without a secret, and over
NIXL."""

from __future__ import annotations

import pytest

from rigs.disaggregation.nixl_package import needs_nixl
from rigs.disaggregation.pd_attacks import run_attacks
from sglang.srt.arg_groups.disaggregation import TransferBackend
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1300, suite="nightly-test-cpu", nightly=True)


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("has_secret", "backend"),
    [
        (False, TransferBackend.MOONCAKE),
        (True, TransferBackend.MOONCAKE),
        pytest.param(False, TransferBackend.NIXL, marks=needs_nixl),
    ],
)
def test_honest_requests_succeed_beside_ten_minutes_of_strangers(
    has_secret: bool, backend: TransferBackend
) -> None:
    report = run_attacks(300.0, has_secret=has_secret, backend=backend)
    print("\n".join(report.lines()))
    assert report.is_good
