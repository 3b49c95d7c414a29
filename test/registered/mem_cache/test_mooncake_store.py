"""MooncakeStore against a real master and a real store node, over TCP on the loopback interface."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest
import torch

from rigs.stores.host_pools import (
    copy_to_host,
    keys_and_values,
    make_device_pool,
    make_host_pool,
    page_keys,
    page_slots,
    round_trip,
)
from rigs.stores.mooncake_bench import Bench, Clients, connect, sizes_moved
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.environ import child_environment
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.hicache_storage import (
    CacheOutcome,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.host.host_layout import HostLayout
from sglang.srt.mem_cache.l3.store_presence import StorePresence
from sglang.srt.mem_cache.storage.mooncake_store import page_batches
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.srt.mem_cache.storage.page_trailer import TRAILER_BYTES
from sglang.srt.mem_cache.storage.types import NOTE_BYTES
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=7, suite="base-b-test-cpu")

pytestmark = pytest.mark.usefixtures("moving_in_place")

LANDED, MISS, SHORT = CacheOutcome.LANDED, CacheOutcome.MISS, CacheOutcome.SHORT
DAMAGED, FAILED = CacheOutcome.DAMAGED, CacheOutcome.FAILED


# -- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("pages", [[5, 2, 9], [3, 4, 5]])
def test_round_trip_is_bit_exact(shared: MooncakeStore, layout: str, pages: list[int]) -> None:
    shared.clear()
    round_trip(shared, layout, page_keys(3), pages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("short_page_bytes", [0, 1 << 30])
def test_pages_of_two_buffers_are_one_object_in_place_and_staged(
    shared: MooncakeStore,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    short_page_bytes: int,
) -> None:
    monkeypatch.setattr(page_batches, "SHORT_PAGE_BYTES", short_page_bytes)
    shared.clear()
    round_trip(shared, "page_first_kv_split", page_keys(3), [5, 2, 9], kind=keys_and_values(dtype))
    with shared._client.using() as client:
        sizes = [len(client.get(f"{key}/kv")) for key in page_keys(3)]
    page_bytes = 2 * 2 * 4 * 3 * 4 * dtype.itemsize  # K and V, heads, dim, layers, tokens
    assert sizes == [page_bytes + TRAILER_BYTES] * 3


def test_layouts_of_one_byte_order_share_objects(shared: MooncakeStore) -> None:
    shared.clear()
    before = shared.get_stats()
    for layout in ("layer_first", "page_first_direct", "page_first_kv_split"):
        round_trip(shared, layout, page_keys(3), [5, 2, 9])
    now = shared.get_stats()
    assert now["set_present_pages"] - before.get("set_present_pages", 0) == 6


def test_an_object_is_one_key_with_page_and_trailer(bench: Bench) -> None:
    page = b"".join(bench.host.get_page_views(bench.slots)[1])
    assert bench.raw(1)[:-TRAILER_BYTES] == page
    assert bench.get() == [LANDED] * 3
    assert bench.host_is_intact()


@pytest.mark.parametrize("writer_stages", [False, True])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_staged_pages_give_the_same_objects(
    shared: MooncakeStore, monkeypatch: pytest.MonkeyPatch, layout: str, writer_stages: bool
) -> None:
    shared.clear()
    moved = sizes_moved(shared, monkeypatch)
    for stages, moves in ((writer_stages, "put"), (not writer_stages, "get")):
        limit = 1 << 30 if stages else 0
        monkeypatch.setattr(page_batches, "SHORT_PAGE_BYTES", limit)
        bench = Bench(shared, layout)
        assert (bench.put() if moves == "put" else bench.get()) == [LANDED] * 3
        assert bench.host_is_intact()
    pieces = [[len(sizes) for sizes in batch] for batch in moved]
    assert pieces == ([[1] * 3, [3] * 3] if writer_stages else [[3] * 3, [1] * 3])


def test_one_call_queries_several_prompts(bench: Bench) -> None:
    absent = page_keys(2, "absent")
    prompts = [bench.keys, absent, [], bench.keys[:1] + absent]
    found = bench.store.prompts_exist(prompts, [None] * len(prompts))
    assert [one.kv_hit_pages for one in found] == [3, 0, 0, 1]


@pytest.mark.parametrize("layout", ["page_first_kv_split", "layer_first"])
def test_more_pages_than_the_budget_and_the_batches_hold(clients: Clients, layout: str) -> None:
    store = clients()
    store.clear()
    bench = Bench(store, layout, count=1500)
    assert bench.put() == [LANDED] * 1500
    assert store.batch_exists_v2(bench.keys).kv_hit_pages == 1500
    assert bench.get() == [LANDED] * 1500
    assert bench.host_is_intact()
    stats = store.get_stats()
    assert 64 <= stats["slices_peak"] <= 1024
    assert stats["slices_in_flight"] == 0
    store.clear()


def test_a_get_and_a_set_at_once_share_one_budget(shared: MooncakeStore) -> None:
    store = shared
    store.clear()
    bench = Bench(store, count=1000)
    half = 500 * bench.host.page_size
    old = PoolTransfer(PoolName.KV, bench.slots[:half], keys=bench.keys[:500])
    new = PoolTransfer(PoolName.KV, bench.slots[half:], keys=bench.keys[500:])
    assert all(store.batch_set_v2([old])["kv"])
    bench.host.k_buffer[:500].zero_()
    results: dict[str, list[CacheOutcome]] = {}
    threads = [
        threading.Thread(target=lambda: results.update(got=store.batch_get_v2([old])["kv"])),
        threading.Thread(target=lambda: results.update(put=store.batch_set_v2([new])["kv"])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {"got": [LANDED] * 500, "put": [LANDED] * 500}
    assert bench.host_is_intact()
    assert bench.get() == [LANDED] * 1000
    assert bench.host_is_intact()
    assert store.get_stats()["slices_peak"] <= 1024
    store.clear()


def test_another_client_reads_the_pages(clients: Clients, bench: Bench) -> None:
    other = clients(verify_checksum=False)
    reader = Bench(other)
    assert reader.get() == [LANDED] * 3
    assert reader.host_is_intact()
    stranger = clients("other")
    assert stranger.batch_exists_v2(page_keys(3, "other")).kv_hit_pages == 0


# -- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
@pytest.mark.parametrize("offset", [0, 200, -40, -20, -1])
def test_a_flipped_byte_is_damage_and_heals(
    shared: MooncakeStore, layout: str, offset: int
) -> None:
    shared.clear()
    bench = Bench(shared, layout)
    bench.put()
    raw = bytearray(bench.raw(1))
    raw[offset] ^= 1
    bench.overwrite(1, bytes(raw))
    assert bench.get() == [LANDED, DAMAGED, SHORT]
    assert shared.batch_exists_v2(bench.keys).kv_hit_pages == 1
    again = Bench(shared, layout)
    assert again.put() == [LANDED] * 3
    assert again.get() == [LANDED] * 3
    assert again.host_is_intact()


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
def test_truncated_and_overlong_objects_are_damage(shared: MooncakeStore, layout: str) -> None:
    shared.clear()
    bench = Bench(shared, layout)
    bench.put()
    raw = bench.raw(0)
    for damaged in (raw[:-1], raw[:-TRAILER_BYTES], raw[:10], raw + b"x"):
        bench.put()
        bench.overwrite(0, damaged)
        assert bench.get() == [DAMAGED, SHORT, SHORT]
        bench = Bench(shared, layout)


def test_a_truncated_object_alone_is_not_a_broken_store(shared: MooncakeStore) -> None:
    shared.clear()
    bench = Bench(shared, count=1)
    bench.put()
    bench.overwrite(0, bench.raw(0)[:-5])
    assert bench.get() == [DAMAGED]
    assert bench.get() == [MISS]


def test_swapped_objects_are_damage(bench: Bench) -> None:
    first, second = bench.raw(1), bench.raw(2)
    bench.overwrite(1, second)
    bench.overwrite(2, first)
    # The key's digest reveals both, in any order.
    assert bench.get() == [LANDED, DAMAGED, DAMAGED]


def test_a_missing_page_ends_the_prefix(bench: Bench) -> None:
    assert bench.store._client.store.remove(bench.object_key(1), True) == 0
    assert bench.store.batch_exists_v2(bench.keys).kv_hit_pages == 1
    assert bench.get() == [LANDED, MISS, SHORT]


# -- extra pools ---------------------------------------------------------------------------------


def test_pages_and_states_of_extra_pools_move_together(bench: Bench) -> None:
    store, trailing = bench.store, PoolHitPolicy.TRAILING_PAGES
    indexer = make_host_pool(make_device_pool(head_dim=2), "page_first")
    states = make_device_pool(page_size=1)
    state_host = make_host_pool(states, "layer_first")
    store.register_mem_host_pool_v2(indexer, PoolName.INDEXER)
    store.register_mem_host_pool_v2(state_host, PoolName.MAMBA)
    slots = copy_to_host(states, state_host, [6, 1])
    moves = [
        bench.move,
        PoolTransfer(PoolName.INDEXER, bench.slots, keys=bench.keys),
        PoolTransfer(PoolName.MAMBA, slots, keys=bench.keys[1:], hit_policy=trailing),
    ]
    assert {name: all(one) for name, one in store.batch_set_v2(moves).items()} == {
        "kv": True,
        "indexer": True,
        "mamba": True,
    }
    asked = [PoolTransfer(PoolName.INDEXER), PoolTransfer(PoolName.MAMBA, hit_policy=trailing)]
    assert store.batch_exists_v2(bench.keys, asked).kv_hit_pages == 3
    # The object of one pool vanishes between exists and get.
    client = store._client.store
    assert client.remove(bench.object_key(2, "indexer"), True) == 0
    got = store.batch_get_v2(moves)
    assert got == {"kv": [LANDED] * 3, "indexer": [LANDED, LANDED, MISS], "mamba": [LANDED] * 2}
    result = store.batch_exists_v2(bench.keys, asked)
    assert result.kv_hit_pages == 2
    assert result.extra_pool_hit_pages == {"indexer": 2, "mamba": 3}
    assert client.remove(bench.object_key(1, "mamba"), True) == 0
    assert store.batch_exists_v2(bench.keys, asked).kv_hit_pages == 0
    assert store.batch_get_v2(moves[2:]) == {"mamba": [MISS, LANDED]}


# -- limits --------------------------------------------------------------------------------------


def test_a_full_store_fails_the_page_and_keeps_the_rest() -> None:
    # A refused put makes the master evict, now and then before this reads what was put.
    with MooncakeCluster(num_nodes=0, master_flags={"eviction_ratio": 0.0}) as small:
        store = connect(small, segment="16mb")
        device = MHATokenToKVPool(32 * 64, 64, torch.bfloat16, 4, 512, 4, "cpu")
        for index, buffer in enumerate((*device.k_buffer, *device.v_buffer)):
            buffer.fill_(index + 1)
        host = make_host_pool(device, "page_first_direct", ratio=1.0)
        store.register_mem_host_pool_v2(host, PoolName.KV)
        slots = copy_to_host(device, host, list(range(32)))
        move = PoolTransfer(PoolName.KV, slots, keys=page_keys(32))
        assert host.page_bytes == 2 << 20
        outcomes = store.batch_set_v2([move])["kv"]
        landed = outcomes.index(FAILED)
        assert 1 <= landed <= 8
        assert not any(outcomes[landed:])
        prefix = PoolTransfer(PoolName.KV, slots[: landed * 64], keys=move.keys[:landed])  # type: ignore[index]
        host.k_buffer.zero_()
        assert store.batch_get_v2([prefix])["kv"] == [LANDED] * landed
        assert torch.equal(
            host.get_data_page(0).view(2, 4, -1)[0, 3], device.k_buffer[3][:64].reshape(-1)
        )
        # A full store is not broken.
        assert store.probe()
        store.close()


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
def test_slots_outside_the_pool_never_reach_the_store(shared: MooncakeStore, layout: str) -> None:
    shared.clear()
    bench = Bench(shared, layout)
    bench.put()
    for slots in (page_slots([32]), page_slots([-1]), page_slots([3]) + 1):
        outside = PoolTransfer(PoolName.KV, slots, keys=page_keys(9)[8:])
        for call in (shared.batch_get_v2, shared.batch_set_v2):
            with pytest.raises(ValueError, match="host_indices"):
                call([outside])
    # All borrowed rows were released.
    assert bench.get() == [LANDED] * 3


@pytest.mark.parametrize("key", ["../../x", "a b\n", "k" * 4000, "ключ", "x/%s%n"])
def test_hostile_keys_are_ordinary_names(shared: MooncakeStore, key: str) -> None:
    value = torch.arange(10, dtype=torch.uint8)
    assert shared.get(f"ns/{key}") is None
    assert shared.set(f"ns/{key}", value)
    assert shared.exists(f"ns/{key}")
    got = shared.get(f"ns/{key}", torch.zeros(10, dtype=torch.uint8))
    assert got is not None
    assert torch.equal(got, value)


@pytest.fixture(scope="module")
def neighbour(clients: Clients) -> MooncakeStore:
    return clients("nXs")


@pytest.mark.parametrize("namespace", ["n.s", "a+b(c)[d]", "w-1:bf16^$"])
def test_clear_removes_this_namespace_only(
    clients: Clients, neighbour: MooncakeStore, namespace: str
) -> None:
    mine = clients(namespace)
    value = torch.zeros(4)
    for store, key in (
        (mine, f"{namespace}/x"),
        (neighbour, "nXs/x"),
        (neighbour, f"x{namespace}/x"),
    ):
        assert store.set(key, value)
    mine.clear()
    mine.clear()
    assert not mine.exists(f"{namespace}/x")
    assert neighbour.batch_exists(["nXs/x", f"x{namespace}/x"]) == 2


def test_servers_of_a_namespace_count_each_other_by_notes(
    clients: Clients, neighbour: MooncakeStore
) -> None:
    stores = [clients("shared by two"), clients("shared by two"), neighbour]
    servers = [StorePresence() for _ in stores]

    def look(times: int) -> list[int | None]:
        for _ in range(times):
            for store, server in zip(stores, servers, strict=True):
                assert server.look(store)
        return [server.servers for server in servers]

    assert look(5) == [2, 2, 1]
    stores[0].clear()
    assert look(1) == [2, 2, 1]
    note = bytes(NOTE_BYTES)
    neighbour.set_note("of its own", note)
    assert neighbour.get_notes(["of its own", "absent"]) == [note, None]
    assert stores[0].get_notes(["of its own"]) == [None]


def test_clear_without_a_namespace_is_refused(clients: Clients) -> None:
    with pytest.raises(ValueError, match="namespace"):
        clients("").clear()


def test_a_store_by_itself_with_a_pool_of_a_third_party(cluster: MooncakeCluster) -> None:
    """In a process of its own, on a host with a CPU alone, and no device set."""
    done = subprocess.run(
        [sys.executable, "-m", "rigs.stores.lone_store", cluster.master.address],
        env=child_environment({"CUDA_VISIBLE_DEVICES": ""}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (
        said["staged"]
        == said["in place"]
        == {
            "before": 0,
            "set": [True, True],
            "exists": [2, False],
            "get": [True, True],
            "equal": True,
            "set v2": {"kv": ["landed", "landed"]},
            "exists v2": 2,
            "get v2": {"kv": ["landed", "landed"]},
            "equal v2": True,
            "set by address": True,
            "equal by address": True,
        }
    )


def test_the_usage_is_that_of_the_whole_store(
    shared: MooncakeStore, cluster: MooncakeCluster
) -> None:
    shared.clear()
    empty = shared.get_usage()
    assert empty is not None
    assert empty.total_bytes == cluster.capacity_bytes() > 0
    round_trip(shared, "page_first_direct", page_keys(3), [3, 4, 5])
    full = shared.get_usage()
    assert full is not None
    assert empty.used_bytes is not None
    assert full.used_bytes is not None
    assert full.used_bytes > empty.used_bytes
    assert empty.num_objects is not None
    assert full.num_objects == empty.num_objects + 3
    assert full.num_evicted == 0
