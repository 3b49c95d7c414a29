"""Row C9: the master of the store dies, returns, or is absent at the start."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rigs.caches.cache_rig import CacheRig, Reused
from rigs.caches.storage_rigs import StorageRigs, attached_store_of, counts
from rigs.running_clock import RunningClock
from rigs.servers.engine_server import EXACT
from rigs.servers.forked_servers import ForkedServer
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.mem_cache.l3.circuit_breaker import _LONGEST_PAUSE_S
from sglang.srt.mem_cache.l3.storage_backup import _CHECK_EVERY
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.srt.utils.network import get_free_port, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=14, suite="base-b-test-cpu")

TIMEOUT_S = 0.5
EPSILON_S = 3.0
"""Slack for a busy machine. A call without a master takes longer than `TIMEOUT_S + EPSILON_S`."""
PAGE = 64
FLAGS = (
    "--hicache-storage-backend", "mooncake", "--hicache-storage-prefetch-policy", "timeout",
    "--enable-metrics", "--max-total-tokens", "8192", *EXACT,
)  # fmt: skip


def test_c9_requests_go_on_without_the_master_and_l3_resumes_by_itself() -> None:
    """Each call blocks for 4.3 s without the master, but no request waits as long."""
    prompt = [*range(160), 7]
    with MooncakeCluster(segment_size="64mb") as cluster:
        times = {"prefetch_timeout_base": TIMEOUT_S, "prefetch_timeout_per_ki_token": 0.0}
        with StorageRigs.on(cluster, **times) as rigs:
            writer = rigs.make(hicache_storage_prefetch_policy="timeout")
            reader = rigs.make(hicache_storage_prefetch_policy="timeout")
            writer.run(prompt)
            writer.settle()
            cluster.master.kill()
            slowest = 0.0
            with RunningClock() as clock:
                for step in range(6):
                    began = clock()
                    # Read and write in turn, so that both threads meet the dead master.
                    assert reader.run([*range(1000 * step, 1000 * step + 160), 7]).storage == 0
                    slowest = max(slowest, clock() - began)
            assert slowest < TIMEOUT_S + EPSILON_S
            reader.settle()
            assert attached_store_of(reader).breaker.is_open
            why = counts(reader.hi.metrics.prefetch_outcomes)
            waited = sum(why.get(one, 0) for one in ("failed", "late", "overtaken"))
            assert waited >= 1
            # The open breaker skips the store, so that requests do not wait.
            assert waited + why["unavailable"] == 6

            cluster.master.start()

            def resumed() -> bool:
                for rig in (writer, reader):
                    rig.flush()
                writer.run(prompt)
                writer.settle()
                return reader.run(prompt) == Reused(storage=160)

            wait_for(resumed, _LONGEST_PAUSE_S)
            assert not attached_store_of(reader).breaker.is_open
            reader.settle()


@pytest.mark.parametrize("is_noticed", [False, True])
def test_c9_what_a_restart_of_the_master_took_is_written_again(is_noticed: bool) -> None:
    """The master restarts before the engine's next call, and the hot prompt is in L1.

    The next call of a client fails, because its connection is the old one, so that the engine
    notices the restart. It does not if the test makes that call (`is_noticed` False), or if the
    client repeats the call itself, as that of Mooncake 0.3.14 does.
    """
    prompt = [*range(160), 7]
    with MooncakeCluster(segment_size="64mb") as cluster, StorageRigs.on(cluster) as rigs:
        writer, reader = rigs.make(), rigs.make()
        writer.run(prompt)
        writer.settle()
        keys = sorted(cluster.master.keys())
        assert len(keys) == 40
        capacity = cluster.capacity_bytes()
        cluster.master.restart()
        assert wait_until(lambda: cluster.capacity_bytes() == capacity, 30), "the node is back"
        # The first call of a client fails; then it connects to the new master.
        for rig in (reader,) if is_noticed else (reader, writer):
            assert wait_until(partial(knows_the_master, rig), 30)
        assert cluster.master.keys() == []

        uses = use_until(writer, prompt, lambda: sorted(cluster.master.keys()) == keys)
        if is_noticed and attached_store_of(writer).reconnects:
            assert attached_store_of(writer).reconnects == 1
        else:
            assert uses <= _CHECK_EVERY + 1
            assert attached_store_of(writer).reconnects == 0, "no error revealed the restart"
            assert counts(writer.hi.metrics.pages)["check/miss"] == 1
        assert reader.run(prompt) == Reused(storage=160)

        # A single object that the store has evicted.
        assert raw_client(reader).remove(keys[3], True) == 0
        attached_store_of(writer).reads._check_at = 0.0
        use_until(writer, prompt, lambda: len(cluster.master.keys()) == 40)
        reader.flush()
        assert reader.run(prompt) == Reused(storage=160)
        for rig in (writer, reader):
            rig.settle()


def raw_client(rig: CacheRig) -> Any:
    """Mooncake's own client of a rig."""
    store = attached_store_of(rig).client
    assert isinstance(store, MooncakeStore)
    return store._client.store


def knows_the_master(rig: CacheRig) -> bool:
    return bool(raw_client(rig).is_exist("anything") == 0)


def use_until(rig: CacheRig, prompt: list[int], condition: Callable[[], bool]) -> int:
    """Use `prompt`, which is in L1, until `condition` holds. Returns the number of uses."""
    uses = 0
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"not after {uses} uses"
        assert rig.run(prompt) == Reused(device=160)
        rig.settle()
        uses += 1
    return uses


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s"
        time.sleep(0.2)


def tokens(seed: int, count: int = 600) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 2000) for _ in range(count)]


def extra(**settings: str) -> tuple[str, str]:
    return "--hicache-storage-backend-extra-config", json.dumps(settings)


def test_c9_a_server_degrades_resumes_and_degrades_again() -> None:
    """The server starts without the store (`degrade`); then the store starts, dies and restarts."""
    with MooncakeCluster(segment_size="128mb") as cluster:
        env = cluster.engine_env()
        cluster.master.kill()
        with ForkedServer(*FLAGS, *extra(on_unreachable="degrade"), env=env) as server:
            prompt = tokens(9)
            cold = server.generate(prompt).output_ids
            cluster.master.start()

            def comes_from_the_store() -> bool:
                server.flush()
                again = server.generate(prompt)
                assert again.output_ids == cold
                return bool(again.cached["storage"] == 576)

            wait_for(comes_from_the_store, 2 * _LONGEST_PAUSE_S)
            cluster.master.kill()
            server.flush()
            for seed in (9, 10, 11):
                answer = server.generate(tokens(seed))
                assert answer.cached["storage"] == 0
                if seed == 9:
                    assert answer.output_ids == cold
            assert server.request("GET", "/health").status == 200
            wait_for(lambda: server.metrics()["sglang:hicache_breaker_open"] == 1, 30)
            cluster.master.start()
            wait_for(comes_from_the_store, 2 * _LONGEST_PAUSE_S)
            assert server.metrics()["sglang:hicache_breaker_open"] == 0
            assert server.stop() == 0


def test_c9_a_server_exits_at_once_where_the_master_is_missing() -> None:
    env = {
        "MOONCAKE_MASTER": f"127.0.0.1:{get_free_port()}",
        "MOONCAKE_PROTOCOL": "tcp",
    }
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"status [1-9]") as ended:
        ForkedServer(*FLAGS, env=env).start()
    assert time.monotonic() - began < 80, "not Mooncake's own 90 seconds"
    assert "MOONCAKE_MASTER" in str(ended.value)
    assert "Traceback" not in str(ended.value)


def test_c9_a_server_waits_for_the_master() -> None:
    with MooncakeCluster(segment_size="128mb") as cluster:
        capacity = cluster.capacity_bytes()
        cluster.master.kill()
        server = ForkedServer(*FLAGS, *extra(on_unreachable="wait"), env=cluster.engine_env())
        failed: list[Exception] = []

        def start() -> None:
            try:
                server.start()
            except (RuntimeError, TimeoutError) as error:
                failed.append(error)

        starting = threading.Thread(target=start)
        starting.start()
        try:
            # Long enough for the server to look for the master and not find it.
            starting.join(8)
            assert starting.is_alive() and not failed
            cluster.master.start()
            starting.join(60)
            assert not failed
            # The node reconnects to the new master by itself, earlier or later than the server.
            assert wait_until(lambda: cluster.capacity_bytes() == capacity, 30)
            prompt = tokens(12)
            server.generate(prompt)
            server.flush()
            assert server.generate(prompt).cached["storage"] == 576
        finally:
            starting.join(120)
            server.kill()
