"""The stderr of a process that uses a Mooncake Store: each fact once per period, no flood."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.environ import child_environment
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=7, suite="base-b-test-cpu")

CALLS = 300
"""Puts of a page of 768 KB, of which a store of 16 MB has room for 20."""
BY_MOONCAKE = re.compile(r"[IWEF]\d{4} ")
MEANINGLESS = "Local segment descriptor not found"
KILLED_NODE = """
import os, signal, sys
from sglang.srt.mem_cache.hicache_storage import StorageUnavailable
from sglang.srt.utils.logging_utils import configure_logger
from rigs.stores.mooncake_bench import Bench
from rigs.stores.host_pools import storage_config
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

configure_logger("info")
master, node = sys.argv[1:]
extra = {"master_server_address": master, "protocol": "tcp", "global_segment_size": "0mb"}
bench = Bench(MooncakeStore(storage_config(**extra)), count=40)
bench.put()
assert all(bench.get())
os.kill(int(node), signal.SIGKILL)
try:
    bench.get()
except StorageUnavailable:
    print(len(bench.keys))
bench.store.close()
"""
"""Reads 40 pages of a node that has just died."""


@pytest.fixture(scope="module")
def log_and_counts() -> tuple[list[str], dict[str, int]]:
    with MooncakeCluster(segment_size="16mb") as cluster:
        module = "rigs.stores.full_store"
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


def test_the_meaningless_error_of_mooncake_at_start_is_left_out(
    log_and_counts: tuple[list[str], dict[str, int]],
) -> None:
    lines, _ = log_and_counts
    assert [line for line in lines if BY_MOONCAKE.match(line) or MEANINGLESS in line] == []


def test_a_killed_node_is_one_line_that_names_it() -> None:
    with MooncakeCluster(segment_size="64mb") as cluster:
        done = subprocess.run(
            [sys.executable, "-c", KILLED_NODE, cluster.master.address, str(cluster.nodes[0].pid)],
            env=child_environment({"MC_LOG_LEVEL": "ERROR"}),
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    assert done.stdout.split() == ["40"]
    by_mooncake = [line for line in done.stderr.splitlines() if "Mooncake, " in line]
    assert len(by_mooncake) == 1, done.stderr
    named = re.search(r"no connection to (127\.0\.0\.1:\d+) \(Connection refused\)", by_mooncake[0])
    assert named, by_mooncake
    assert "store node" in by_mooncake[0]
    assert not BY_MOONCAKE.search(done.stderr)
