"""Row F7 with all faulty models, including the quick ones of `test_faults_f7.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rigs.servers.spoiled_models import CASES, Case, start_refused
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=200, suite="nightly-test-cpu", nightly=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_f7_one_clear_line(case: Case, tmp_path: Path) -> None:
    start_refused(case, tmp_path).check(case)
