"""L3 through a stand-alone `mooncake_client`: real master, real client process, shared memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang.embedded_mooncake import MooncakeMaster, StandaloneClient
from sglang.srt.mem_cache.hicache_storage import (
    CacheOutcome,
    PoolName,
    PoolTransfer,
    StorageUnavailable,
    StorageUnreachable,
)
from sglang.srt.mem_cache.host.host_layout import HostLayout
from sglang.srt.mem_cache.storage.mooncake_store import page_batches
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.srt.utils.network import get_free_port, wait_until
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.stores.host_pools import (
    copy_to_host,
    make_device_pool,
    make_host_pool,
    page_keys,
    round_trip,
    storage_config,
)

# Mooncake's client looks at its server once a second; it does not notice a faster restart.
register_cpu_ci(est_time=50, suite="base-b-test-cpu", alone=True)

LANDED = CacheOutcome.LANDED


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneClient]:
    folder = tmp_path_factory.mktemp("mooncake")
    master = MooncakeMaster(folder)
    process = StandaloneClient(master, folder, segment_bytes=128 << 20)
    try:
        master.start()
        process.start()
        yield process
    finally:
        process.kill()
        master.kill()


def connect(client: StandaloneClient) -> MooncakeStore:
    env = client.engine_env()
    return MooncakeStore(
        storage_config(
            master_server_address=env["MOONCAKE_MASTER"],
            client_server_address=env["MOONCAKE_CLIENT"],
            protocol="tcp",
            global_segment_size=0,
        )
    )


@pytest.fixture
def store(client: StandaloneClient) -> Iterator[MooncakeStore]:
    made = connect(client)
    made.clear()
    yield made
    made.close()


def some_pages(store: MooncakeStore, count: int = 3) -> PoolTransfer:
    """Pages in a host pool that is registered with `store`."""
    device = make_device_pool()
    host = make_host_pool(device, "page_first_direct", allocator_type="mooncake")
    slots = copy_to_host(device, host, list(range(count)))
    store.register_mem_host_pool_v2(host, PoolName.KV)
    return PoolTransfer(PoolName.KV, host_indices=slots, keys=page_keys(count))


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("short_page_bytes", [0, page_batches.SHORT_PAGE_BYTES])
def test_round_trip_is_bit_exact(
    store: MooncakeStore, monkeypatch: pytest.MonkeyPatch, layout: str, short_page_bytes: int
) -> None:
    monkeypatch.setattr(page_batches, "SHORT_PAGE_BYTES", short_page_bytes)
    round_trip(store, layout, page_keys(3), [5, 2, 9], allocator_type="mooncake")


def test_objects_outlive_the_engine_that_wrote_them(
    client: StandaloneClient, store: MooncakeStore
) -> None:
    assert store.batch_set_v2([some_pages(store)])["kv"] == [LANDED] * 3
    store.close()
    later = connect(client)
    try:
        assert later.batch_exists_v2(page_keys(3)).kv_hit_pages == 3
        assert later.batch_get_v2([some_pages(later)])["kv"] == [LANDED] * 3
    finally:
        later.close()


def test_a_damaged_object_is_detected(store: MooncakeStore) -> None:
    move = some_pages(store)
    assert store.batch_set_v2([move])["kv"] == [LANDED] * 3
    raw = store._client.store
    key = f"{page_keys(3)[1]}/kv"
    whole = bytes(raw.get(key))
    assert raw.remove(key, True) == 0
    assert raw.put(key, whole[:-40] + bytes(40)) == 0
    outcomes = store.batch_get_v2([move])["kv"]
    assert outcomes[:2] == [LANDED, CacheOutcome.DAMAGED]


@pytest.mark.parametrize("short_page_bytes", [0, page_batches.SHORT_PAGE_BYTES])
def test_concurrent_gets_put_each_batch_in_its_place(
    client: StandaloneClient, monkeypatch: pytest.MonkeyPatch, short_page_bytes: int
) -> None:
    monkeypatch.setattr(page_batches, "SHORT_PAGE_BYTES", short_page_bytes)
    monkeypatch.setattr(page_batches, "_MAX_BATCH_PAGES", 1)
    store = connect(client)
    store.clear()
    try:
        for _ in range(3):
            round_trip(
                store,
                "page_first_direct",
                page_keys(14),
                list(range(14)),
                allocator_type="mooncake",
            )
    finally:
        store.close()


def test_a_failed_batch_beside_others_releases_its_memory(
    client: StandaloneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_batches, "_MAX_BATCH_PAGES", 1)
    store = connect(client)
    store.clear()
    try:
        move = some_pages(store, 12)
        assert move.keys is not None
        assert store.batch_set_v2([move])["kv"] == [LANDED] * 12
        store._client.store.remove(f"{move.keys[5]}/kv", True)
        for _ in range(8):  # more often than there are rows
            outcomes = store.batch_get_v2([move])["kv"]
            assert outcomes[:6] == [LANDED] * 5 + [CacheOutcome.MISS]
            assert not any(outcomes[6:])
        transfer = store._transfer

        def failing(client: Any, batch: page_batches.PageBatch, *, is_get: bool) -> list[int]:
            if batch.keys[0].startswith(str(move.keys and move.keys[3])):
                raise StorageUnavailable("the client has gone")
            return transfer(client, batch, is_get=is_get)

        with monkeypatch.context() as broken:
            broken.setattr(store, "_transfer", failing)
            for _ in range(8):
                with pytest.raises(StorageUnavailable, match="has gone"):
                    store.batch_get_v2([move])
        assert store.batch_get_v2([move])["kv"][:5] == [LANDED] * 5
        assert store.get_stats()["slices_in_flight"] == 0
    finally:
        store.close()


def test_memory_that_cannot_be_shared_is_refused_by_name(store: MooncakeStore) -> None:
    device = make_device_pool()
    with pytest.raises(ValueError, match="restart the server with MOONCAKE_CLIENT"):
        store.register_mem_host_pool_v2(make_host_pool(device, "page_first"), PoolName.KV)


def test_an_absent_client_is_reported_at_once(client: StandaloneClient) -> None:
    nobody = f"127.0.0.1:{get_free_port()}"
    begun = time.monotonic()
    with pytest.raises(StorageUnreachable, match=f"MOONCAKE_CLIENT={nobody}"):
        MooncakeStore(
            storage_config(
                master_server_address=client.engine_env()["MOONCAKE_MASTER"],
                client_server_address=nobody,
                protocol="tcp",
            )
        )
    assert time.monotonic() - begun < 30, "Mooncake itself would try for longer"


def moves(store: MooncakeStore, move: PoolTransfer) -> bool:
    try:
        return all(store.batch_set_v2([move])["kv"]) and all(store.batch_get_v2([move])["kv"])
    except StorageUnavailable:
        return False


def test_a_killed_client_serves_again_after_a_restart(tmp_path: Path) -> None:
    master = MooncakeMaster(tmp_path)
    process = StandaloneClient(master, tmp_path, segment_bytes=64 << 20)
    try:
        master.start()
        process.start()
        store = connect(process)
        move = some_pages(store)
        assert store.batch_set_v2([move])["kv"] == [LANDED] * 3
        process.kill()
        with pytest.raises(StorageUnavailable):
            store.batch_get_v2([move])
        assert not store.probe()
        # Its engine checks it about once a second, and does not notice a faster restart.
        wait_until(lambda: store._client.store.health_check() != 0, timeout=30)
        process.start()
        assert wait_until(store.probe, timeout=60)
        # The master forgets the objects of the dead process after `client_ttl`.
        assert wait_until(lambda: moves(store, move), timeout=60)
        store.close()
    finally:
        process.kill()
        master.kill()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
