"""Half an hour of a whole system under chaos: see `sglang.test.chaos.__main__`.

The seed is drawn, so that each night sees another agenda; it is printed first.
"""

from __future__ import annotations

import os
import sys

import pytest

import rigs.disaggregation.nixl_package  # noqa: F401 - finds the package
from sglang.test.chaos.__main__ import main
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2100, suite="nightly-test-cpu", nightly=True, alone=True)


@pytest.mark.timeout(3000)
def test_half_an_hour_of_chaos_breaks_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # Servers find NIXL too.
    assert main(["--minutes", "30"]) == 0
