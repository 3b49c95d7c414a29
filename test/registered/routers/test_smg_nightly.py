"""Tests of servers behind a router hold behind `smg` too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from sglang.embedded_router import SMG
from sglang.srt.environ import child_environment, envs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=500, suite="nightly-test-cpu", nightly=True)

REGISTERED: Final = Path(__file__).resolve().parents[1]
FILES: Final = (
    "disaggregation/test_pd_reports.py",
    "disaggregation/test_pd_requests.py",
    "disaggregation/test_pd_rolling_restart_nightly.py",
    "disaggregation/test_pd_router.py",
    "disaggregation/test_pd_server_faults.py",
    "disaggregation/test_pd_topologies.py",
    "disaggregation/test_tls_router.py",
    "entrypoints/agents/test_agents_behind_router.py",
    "entrypoints/test_rolling_restart.py",
)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", FILES)
def test_files_about_routers_pass_behind_smg(file: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(REGISTERED / file)],
        env=child_environment({envs.SGLANG_TEST_ROUTER.name: SMG}),
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
