"""L3 through a stand-alone `mooncake_client`: real master, real client process, shared memory."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rigs.caches.mamba_pools import (
    STATE_DTYPES,
    make_mamba_pool,
    mamba_spec,
    recurrent_states,
)
from rigs.caches.mla_pools import (
    INDEXER_KEYS,
    LATENT_ROWS,
    make_indexer_pool,
    make_mla_pool,
)
from rigs.stores.host_pools import (
    AnyDevicePool,
    copy_to_host,
    make_device_pool,
    make_host_pool,
    page_keys,
    round_trip,
    storage_config,
)
from rigs.stores.mooncake_standalone import connect, some_pages
from rigs.stores.store_processes import ObservedMaster, StandaloneClient
from sglang.srt.mem_cache.hicache_storage import (
    CacheOutcome,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    StorageUnavailable,
    StorageUnreachable,
)
from sglang.srt.mem_cache.host.host_layout import HostLayout
from sglang.srt.mem_cache.host.host_memory import MooncakeHostTensorAllocator
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.l3.store_presence import StorePresence
from sglang.srt.mem_cache.memory_pool_host import (
    MambaPoolHost,
    MLATokenToKVPoolHost,
    NSAIndexerPoolHost,
)
from sglang.srt.mem_cache.storage.mooncake_store import client as mooncake_client
from sglang.srt.mem_cache.storage.mooncake_store import page_batches
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-b-test-cpu", alone=True)

LANDED = CacheOutcome.LANDED


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedMaster]:
    master = ObservedMaster(tmp_path_factory.mktemp("master"))
    try:
        master.start()
        yield master
    finally:
        master.kill()


@pytest.fixture(scope="module")
def client(
    master: ObservedMaster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StandaloneClient]:
    folder = tmp_path_factory.mktemp("mooncake")
    process = StandaloneClient(master, folder, segment_bytes=128 << 20)
    try:
        process.start()
        yield process
    finally:
        process.kill()


@pytest.fixture(scope="module")
def shared(client: StandaloneClient) -> Iterator[MooncakeStore]:
    """One client for all tests that neither close it nor break it."""
    made = connect(client)
    yield made
    made.close()


@pytest.fixture
def store(shared: MooncakeStore) -> MooncakeStore:
    shared.clear()
    return shared


def test_servers_count_each_other_by_notes(shared: MooncakeStore) -> None:
    stores, servers = [shared, shared], [StorePresence(), StorePresence()]
    for _ in range(5):
        for store, server in zip(stores, servers, strict=True):
            assert server.look(store)
    assert [server.servers for server in servers] == [2, 2]


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("short_page_bytes", [0, page_batches.SHORT_PAGE_BYTES])
def test_round_trip_is_bit_exact(
    store: MooncakeStore, monkeypatch: pytest.MonkeyPatch, layout: str, short_page_bytes: int
) -> None:
    monkeypatch.setattr(page_batches, "SHORT_PAGE_BYTES", short_page_bytes)
    round_trip(store, layout, page_keys(3), [5, 2, 9], allocator_type="mooncake")


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.usefixtures("moves")
def test_pages_of_a_second_pool_come_back_bit_for_bit(store: MooncakeStore, layout: str) -> None:
    for kind in (LATENT_ROWS, INDEXER_KEYS):
        round_trip(store, layout, page_keys(3), [5, 2, 9], allocator_type="mooncake", kind=kind)


@pytest.mark.parametrize("layout", MambaPoolHost.LAYOUTS)
@pytest.mark.parametrize("dtypes", STATE_DTYPES)
@pytest.mark.usefixtures("moves")
def test_recurrent_states_come_back_bit_for_bit(
    store: MooncakeStore, dtypes: tuple[torch.dtype, torch.dtype], layout: str
) -> None:
    states = recurrent_states(mamba_spec(dtypes))
    round_trip(store, layout, page_keys(3), [5, 2, 9], allocator_type="mooncake", kind=states)


@pytest.mark.usefixtures("moves")
def test_pages_keys_and_states_move_in_one_call(store: MooncakeStore) -> None:
    layout, trailing = "page_first_direct", PoolHitPolicy.TRAILING_PAGES
    rows, keys, states = make_mla_pool(), make_indexer_pool(), make_mamba_pool()
    devices: list[AnyDevicePool] = [rows, keys, states]
    hosts: list[HostKVCache] = [
        MLATokenToKVPoolHost.make(rows, page_num=32, layout=layout, allocator_type="mooncake"),
        NSAIndexerPoolHost.make(keys, page_num=32, layout=layout, allocator_type="mooncake"),
        MambaPoolHost.make(states, page_num=32, layout=layout, allocator_type="mooncake"),
    ]
    names, pages = (PoolName.KV, PoolName.INDEXER, PoolName.MAMBA), page_keys(3)
    moves, wanted = [], []
    for name, device, host in zip(names, devices, hosts, strict=True):
        store.register_mem_host_pool_v2(host, name)
        some = [6, 1] if name is PoolName.MAMBA else [5, 2, 9]
        slots = copy_to_host(device, host, some)
        policy = trailing if name is PoolName.MAMBA else PoolHitPolicy.ALL_PAGES
        moves.append(PoolTransfer(name, slots, keys=pages[-len(some) :], hit_policy=policy))
        wanted.append(host_pages(host, slots))
    landed = {"kv": [LANDED] * 3, "indexer": [LANDED] * 3, "mamba": [LANDED] * 2}
    assert store.batch_set_v2(moves) == landed
    for host in hosts:
        for buffer in host.get_hybrid_pool_buffer():
            buffer.view(torch.uint8).zero_()
    asked = [PoolTransfer(PoolName.INDEXER), PoolTransfer(PoolName.MAMBA, hit_policy=trailing)]
    assert store.batch_exists_v2(pages, asked).kv_hit_pages == 3
    assert store.batch_get_v2(moves) == landed
    assert [
        host_pages(host, move.host_indices) for host, move in zip(hosts, moves, strict=True)
    ] == wanted


def host_pages(host: HostKVCache, slots: torch.Tensor | None) -> list[bytes]:
    """The bytes of each of the pages at `slots`."""
    assert slots is not None
    return [b"".join(views) for views in host.get_page_views(slots)]


def test_objects_outlive_the_engine_that_wrote_them(client: StandaloneClient) -> None:
    store = connect(client)
    store.clear()
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
    store: MooncakeStore, monkeypatch: pytest.MonkeyPatch, short_page_bytes: int
) -> None:
    monkeypatch.setattr(page_batches, "SHORT_PAGE_BYTES", short_page_bytes)
    monkeypatch.setattr(page_batches, "_MAX_BATCH_PAGES", 1)
    for _ in range(3):
        round_trip(
            store,
            "page_first_direct",
            page_keys(14),
            list(range(14)),
            allocator_type="mooncake",
        )


def test_a_failed_batch_beside_others_releases_its_memory(
    store: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_batches, "_MAX_BATCH_PAGES", 1)
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


def test_memory_that_is_not_shared_is_copied_or_refused_by_name(store: MooncakeStore) -> None:
    """Mooncake 0.3.14 copies such pages, and earlier releases refuse their memory."""
    device = make_device_pool()
    host = make_host_pool(device, "page_first_direct")
    refusal = ""
    try:
        store.register_mem_host_pool_v2(host, PoolName.KV)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert "restart the server with MOONCAKE_CLIENT" in refusal
        return
    slots = copy_to_host(device, host, list(range(3)))
    move = PoolTransfer(PoolName.KV, host_indices=slots, keys=page_keys(3, "ns/not_shared"))
    wanted = [b"".join(views) for views in host.get_page_views(slots)]
    assert store.batch_set_v2([move])["kv"] == [LANDED] * 3
    for buffer in host.get_hybrid_pool_buffer():
        buffer.zero_()
    assert store.batch_get_v2([move])["kv"] == [LANDED] * 3
    assert [b"".join(views) for views in host.get_page_views(slots)] == wanted


def minor_faults(pid: int) -> int:
    """Pages that a process has mapped at their first use so far."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def test_the_first_read_into_shared_memory_finds_it_mapped(
    master: ObservedMaster, client: StandaloneClient, shared: MooncakeStore
) -> None:
    """Counts pages that the client maps while it fills memory that no transfer has met."""
    size, key = 32 << 20, "mapped"
    first, second = (MooncakeHostTensorAllocator().allocate((size,), torch.uint8) for _ in range(2))
    torch.manual_seed(0)
    first.random_(0, 256)
    for tensor in (first, second):
        shared.register_buffer(tensor)
    raw = shared._client.store
    assert raw.batch_put_from_multi_buffers([key], [[first.data_ptr()]], [[size]]) == [0]
    before = minor_faults(client.pid)
    got = raw.batch_get_into_multi_buffers([key], [[second.data_ptr()]], [[size]])
    assert got == [size] and torch.equal(first, second)
    assert minor_faults(client.pid) - before < size // mmap.PAGESIZE // 8
    raw.remove(key, True)
    stored = master.keys()
    assert not [one for one in stored if one.startswith("map-ahead")]


def test_mapping_ahead_ends_when_its_time_is_over(
    client: StandaloneClient, shared: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_client, "_MAP_AHEAD_S", -60.0)
    monkeypatch.setattr(mooncake_client, "_BYTES_OF_TOUCH", 1)
    memory = MooncakeHostTensorAllocator().allocate((32 << 20,), torch.uint8)
    put = mock.Mock(wraps=shared._client.store)
    with mock.patch.object(shared._client, "store", put):
        shared.register_buffer(memory)
    assert put.batch_put_from_multi_buffers.call_count == 1


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
