"""The tests of test_named_faults.py with a Mooncake store: cold, full, without its master, and
shared by servers that differ."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from rigs.servers.engine_server import ADMIN_KEY, EXACT, EngineServer
from rigs.servers.forked_servers import ForkedServer, InRank
from rigs.servers.spoiled_models import perturbed_model
from rigs.stores.mooncake_cluster import MooncakeCluster
from rigs.views import planted_faults
from rigs.views.alert_rules import differing_labels, firing, scrape
from sglang import hicache_top
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=13, suite="base-b-test-cpu")

PAGE: Final = 64
PAGES: Final = 6
LONG_PAGES: Final = 40
OTHER_VERSION: Final = "9.9.9"


_BACKUPS: Final = 'sglang:hicache_queue_length{queue="backups"}'
_ENDED_BACKUPS: Final = "sglang:hicache_backup_total{"


def prompt(seed: int, pages: int = PAGES) -> list[int]:
    return [300 + (seed * 37 + i * 11) % 1000 for i in range(pages * PAGE)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[MooncakeCluster]:
    # Each page of the model takes 128 KB.
    flags = {"default_kv_lease_ttl": 5000}
    with MooncakeCluster(segment_size="128mb", master_flags=flags) as running:
        yield running


def server_on(
    cluster: MooncakeCluster,
    *more: str,
    model: str | None = None,
    in_rank: InRank = planted_faults.asks_often,
) -> AbstractContextManager[EngineServer]:
    return ForkedServer(
        "--enable-metrics", "--hicache-storage-backend", "mooncake", "--page-size", str(PAGE),
        "--hicache-storage-prefetch-policy", "wait_complete", "--served-model-name", "served",
        "--max-total-tokens", str(2 * LONG_PAGES * PAGE), *EXACT, *more,
        env=cluster.engine_env(), model=model, in_rank=in_rank,
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(cluster: MooncakeCluster) -> Iterator[EngineServer]:
    with server_on(cluster) as running:
        yield running


def alerts(cluster: MooncakeCluster, server: EngineServer, work: Callable[[], object]) -> set[str]:
    """The alerts that fire after `work` and the writes to the store."""
    before = scrape(server)
    work()
    assert wait_until(lambda: server.metrics()[_BACKUPS] == 0, 60)
    # A scrape shows the answer of the store to the one before.
    name = "sglang:hicache_storage_used_bytes"
    truth = partial(cluster.master.metric, "master_allocated_bytes")
    assert wait_until(lambda: server.metrics()[name] == truth(), 60)
    return set(firing(before, scrape(server)))


def ask(server: EngineServer, *seeds: int, pages: int = PAGES) -> None:
    for seed in seeds:
        server.generate(prompt(seed, pages), max_new_tokens=1)


def test_a_cold_store_raises_its_alert_once(cluster: MooncakeCluster, server: EngineServer) -> None:
    assert alerts(cluster, server, lambda: ask(server, 1, 2)) == {"StoreCold"}
    server.flush()
    assert alerts(cluster, server, lambda: ask(server, 1, 2)) == set()

    def reads() -> dict[str, int]:
        found: dict[str, int] = hicache_top.ask(server.url, ADMIN_KEY)["store"]["reads"]
        return found

    # A view is a second old at most.
    assert wait_until(lambda: reads().get("landed") == 2, 30)
    assert reads()["miss"] == 2


def test_differing_servers_and_versions_raise_their_alerts(
    cluster: MooncakeCluster, server: EngineServer, tmp_path: Path
) -> None:
    cold = server.generate(prompt(1), max_new_tokens=8).output_ids
    server.flush()
    others: list[tuple[tuple[str, ...], str | None, set[str]]] = [
        (("--page-size", "32"), None, {"namespace", "page_size"}),
        ((), str(perturbed_model(tmp_path)), {"namespace", "weights"}),
    ]
    for flags, model, differ in others:
        with server_on(cluster, *flags, model=model) as other:
            assert other.generate(prompt(1), 1).meta_info["cached_tokens"] == 0
            both = scrape(server, other)
            assert "NamespacesDiffer" in firing(both, both)
            assert differing_labels(both, "sglang:hicache_storage_info") == differ
    # The version of the engine is no part of the namespace.
    renamed = partial(planted_faults.has_version, OTHER_VERSION)
    with server_on(cluster, in_rank=renamed) as same:
        answer = same.generate(prompt(1), max_new_tokens=8)
        assert answer.output_ids == cold
        assert answer.cached["storage"] == PAGES * PAGE - 1
        both = scrape(server, same)
        assert "NamespacesDiffer" not in firing(both, both)
        assert differing_labels(both, "sglang:hicache_storage_info") == set()


def test_a_full_store_raises_its_alert(cluster: MooncakeCluster, server: EngineServer) -> None:
    assert cluster.master.metric("master_allocated_bytes") < 0.5 * cluster.capacity_bytes()

    seeds = iter(range(100, 200))

    def ended_backups() -> float:
        found = server.metrics().items()
        return sum(value for name, value in found if name.startswith(_ENDED_BACKUPS))

    def add_one() -> None:
        ended = ended_backups()
        ask(server, next(seeds), pages=LONG_PAGES)
        # The answer comes before the backup is in the queue.
        assert wait_until(lambda: ended_backups() > ended, 60)
        assert wait_until(lambda: server.metrics()[_BACKUPS] == 0, 60)

    def fill(name: str, above: float) -> None:
        while cluster.master.metric(name) <= above:
            add_one()

    quiet = {"StoreNearlyFull", "StoreEvicts"}
    assert not quiet & alerts(cluster, server, lambda: ask(server, 1))
    share = 0.86 * cluster.capacity_bytes()
    fill_most = partial(fill, "master_allocated_bytes", share)
    assert "StoreNearlyFull" in alerts(cluster, server, fill_most)

    # Afterwards less is in use again. Some keys may have gone before the alerts' first sample.
    def evict() -> None:
        fill("master_evicted_key_count", cluster.master.metric("master_evicted_key_count"))

    assert "StoreEvicts" in alerts(cluster, server, evict)


def test_a_dead_master_raises_its_alert(cluster: MooncakeCluster, server: EngineServer) -> None:
    assert "StoreLeftAlone" not in alerts(cluster, server, lambda: ask(server, 1))
    cluster.master.kill()
    seeds = iter(range(300, 400))

    def is_left_alone() -> bool:
        ask(server, next(seeds))
        return server.metrics()["sglang:hicache_breaker_open"] == 1

    assert wait_until(is_left_alone, 60)
    now = scrape(server)
    assert "StoreLeftAlone" in firing(now, now)
    # A view is a second old at most.
    assert wait_until(lambda: hicache_top.ask(server.url, ADMIN_KEY)["store"]["is_left_alone"], 30)


UNLIKE: Final = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
store.setup("127.0.0.1", "P2PHANDSHAKE", 32 << 20, 16 << 20, "rdma", "", sys.argv[1])
sys.stdin.read()
"""
"""A store node over another protocol. On a host without RDMA devices Mooncake takes TCP in place of
it, and the master tells what was asked for."""


def test_a_nodes_other_protocol_is_named_by_log_and_views() -> None:
    def seen() -> list[str]:
        usage = hicache_top.ask(running.url, ADMIN_KEY)["store"]["usage"]
        return [] if usage is None else list(usage["unlike_nodes"])

    with MooncakeCluster(segment_size="32mb") as both, server_on(both) as running:
        assert both.capacity_bytes() and not seen()
        command = [sys.executable, "-c", UNLIKE, both.master.address]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as node:
            assert wait_until(lambda: len(seen()) == 1, 30)
            (name,) = seen()
            assert name.endswith(" (rdma)")
            view = hicache_top.ask(running.url, ADMIN_KEY)
            shown = hicache_top._store(view["store"], view["words"]).plain
            assert f"store nodes with another protocol: {name}" in shown
            line = f"store node {name} has another protocol than this server"
            assert running.process.log_tail(500).count(line) == 1
            assert node.stdin is not None
            node.stdin.close()


def test_a_dead_node_is_named_by_log_alert_and_views() -> None:
    with (
        MooncakeCluster(2, segment_size="32mb", master_flags={"client_ttl": 2}) as cluster,
        server_on(cluster) as server,
    ):
        listed = 'sglang:hicache_store_node_up{node="'

        def nodes(up: float) -> list[str]:
            found = server.metrics().items()
            return [name for name, value in found if name.startswith(listed) and value == up]

        assert wait_until(lambda: len(nodes(1.0)) == 2, 30)
        before = scrape(server)
        assert "StoreNodeGone" not in firing(before, before)
        cluster.nodes[0].kill()
        assert wait_until(lambda: len(nodes(0.0)) == 1, 60)
        (gone,) = (name.removeprefix(listed).partition('"')[0] for name in nodes(0.0))
        now = scrape(server)
        assert [one["node"] for one in firing(now, now)["StoreNodeGone"]] == [gone]
        assert server.process.log_tail(500).count(f"store node {gone} is gone") == 1
        view: dict[str, bool] = {}

        def is_seen() -> bool:
            view.update(hicache_top.ask(server.url, ADMIN_KEY)["store"]["nodes"])
            return not view[gone]

        # A view is a second old at most.
        assert wait_until(is_seen, 30)
        assert sum(view.values()) == 1
