"""The stderr of a process that uses a Mooncake Store: each fact once per period, no flood."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from sglang.srt.environ import child_environment
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.stores.mooncake_cluster import MooncakeCluster

register_cpu_ci(est_time=15, suite="base-b-test-cpu")

CALLS = 300
"""Puts of a page of 768 KB, of which a store of 16 MB has room for 20."""
BY_MOONCAKE = re.compile(r"[IWEF]\d{4} ")
MEANINGLESS = "Local segment descriptor not found"


@pytest.fixture(scope="module")
def log_and_counts() -> tuple[list[str], dict[str, int]]:
    with MooncakeCluster(segment_size="16mb") as cluster:
        module = "sglang.test.stores.full_store"
        done = subprocess.run(
            [sys.executable, "-m", module, cluster.master.address, str(CALLS)],
            env=child_environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    return done.stderr.splitlines(), json.loads(done.stdout)


def test_a_full_store_is_logged_once_per_period(
    log_and_counts: tuple[list[str], dict[str, int]],
) -> None:
    lines, counts = log_and_counts
    refused = counts["set_no_room_pages"]
    assert refused > CALLS // 2
    full = [line for line in lines if "Mooncake Store is full" in line]
    assert "--eviction_high_watermark_ratio" in full[0]
    assert len(full) < refused / 10
    assert [line for line in lines if "BatchPut failed" in line] == []


def test_the_meaningless_error_of_mooncake_at_start_is_explained(
    log_and_counts: tuple[list[str], dict[str, int]],
) -> None:
    lines, _ = log_and_counts
    by_mooncake = [line for line in lines if BY_MOONCAKE.match(line)]
    assert all(MEANINGLESS in line for line in by_mooncake)
    explained = [line for line in lines if "means nothing" in line]
    assert len(explained) == 1 and MEANINGLESS in explained[0]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
