"""A Mooncake Store for the tests of a file, a client of it, and how its tiny pages move."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rigs.stores.mooncake_bench import Bench, Clients, connect
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.mem_cache.hicache_storage import CacheOutcome
from sglang.srt.mem_cache.storage.mooncake_store import page_batches
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore


@pytest.fixture
def moving_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move pages in place; the tiny pages of these tests would all be staged."""
    monkeypatch.setattr(page_batches, "SHORT_PAGE_BYTES", 0)


@pytest.fixture(params=["staged", "in place"])
def moves(request: pytest.FixtureRequest) -> None:
    """Runs a test with staged pages, and with pages that move in place."""
    if request.param == "in place":
        request.getfixturevalue("moving_in_place")


@pytest.fixture(scope="module")
def shared(cluster: MooncakeCluster) -> Iterator[MooncakeStore]:
    store = connect(cluster)
    yield store
    store.close()
    store.close()


@pytest.fixture(scope="module")
def clients(cluster: MooncakeCluster) -> Iterator[Clients]:
    """Makes further clients, which are closed behind the last test of the file, all at once:
    Mooncake takes a second for each."""
    made: list[MooncakeStore] = []

    def make(namespace: str = "ns", *, verify_checksum: bool = True) -> MooncakeStore:
        made.append(connect(cluster, namespace, verify_checksum=verify_checksum))
        return made[-1]

    yield make
    with ThreadPoolExecutor() as closing:
        list(closing.map(MooncakeStore.close, made))


@pytest.fixture
def bench(shared: MooncakeStore) -> Bench:
    shared.clear()
    made = Bench(shared)
    assert made.put() == [CacheOutcome.LANDED] * 3
    return made
