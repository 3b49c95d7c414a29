"""Store nodes that stop, die and return for minutes, too long for the quick tests."""

from __future__ import annotations

import random
import time

import pytest

from rigs.caches.cache_rig import CacheRig, Reused
from rigs.caches.storage_rigs import StorageRigs, counts
from rigs.running_clock import RunningClock
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=240, suite="nightly-test-cpu", nightly=True)

pytestmark = pytest.mark.timeout(900)

SOAK_S = 150.0
CALL_S = 60.0
"""Seconds that Mooncake waits for a node that does not answer, for each key of a call."""


def test_c7_pages_come_back_when_the_call_returns_by_itself() -> None:
    """The node never resumes. A client without a session with it requests one key first."""
    prompt = [*range(160), 7]
    with (
        MooncakeCluster(segment_size="64mb") as cluster,
        StorageRigs.on(cluster, prefetch_timeout_max=1.0) as rigs,
    ):
        writer = rigs.make()
        writer.run(prompt)
        writer.settle()
        reader = rigs.make()
        cluster.nodes[0].suspend()
        began = time.monotonic()
        with RunningClock() as clock:
            assert reader.run(prompt) == Reused()
            assert clock() < 2.0
        while reader.tree.is_busy():
            reader.tick()
            reader.tree.check_integrity()
            assert time.monotonic() - began < CALL_S + 20, reader.tree.is_busy()
            time.sleep(0.2)
        assert time.monotonic() - began > CALL_S / 2
        reader.flush()
        assert reader.hi.host_pool.available_size() == reader.hi.host_pool.size
        cluster.nodes[0].resume()


def test_nodes_that_stop_die_and_come_back_under_load() -> None:
    """Requests always finish in time with right bytes, and at the end L3 serves again."""
    rng = random.Random(1)
    prompts = [[family * 1000 + i for i in range(160)] + [7] for family in range(20)]
    with (
        MooncakeCluster(
            num_nodes=3, segment_size="32mb", master_flags={"client_ttl": 2}
        ) as cluster,
        StorageRigs.on(cluster, prefetch_timeout_max=1.0) as rigs,
        RunningClock() as clock,
    ):
        pair = [rigs.make(l1_pages=60, hicache_ratio=2.0) for _ in range(2)]
        ends = time.monotonic() + SOAK_S
        slowest, asked, stopped = 0.0, 0, None
        while time.monotonic() < ends:
            if asked % 150 == 149:
                node = rng.choice(cluster.nodes)
                if stopped is not None:
                    stopped.resume()
                    stopped = None
                elif rng.random() < 0.5:
                    node.suspend()
                    stopped = node
                else:
                    node.restart()
            rig = rng.choice(pair)
            began = clock()
            rig.run([*rng.choice(prompts)[: rng.randrange(40, 160)], asked])
            slowest = max(slowest, clock() - began)
            rig.tick()
            asked += 1
            if asked % 10 == 0:
                rig.tree.check_integrity()
            time.sleep(0.01)
        assert slowest < 1.0 + 1.0, slowest
        if stopped is not None:
            stopped.resume()

        def serves() -> bool:
            fresh = [rng.randrange(10**6) for _ in range(160)] + [7]
            for rig in pair:
                wait_idle(rig)
                rig.flush()
            pair[0].run(fresh)
            wait_idle(pair[0])
            return pair[1].run(fresh).storage == 160

        deadline = time.monotonic() + 120
        while not serves():
            assert time.monotonic() < deadline, [counts(r.hi.metrics.pages) for r in pair]


def wait_idle(rig: CacheRig) -> None:
    deadline = time.monotonic() + 180
    while rig.tree.is_busy():
        assert time.monotonic() < deadline
        rig.tick()
        time.sleep(0.05)
