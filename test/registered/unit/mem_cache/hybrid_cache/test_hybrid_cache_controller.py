"""Pages of extra pools that move with the primary pool's; copies of pools with own slots."""

from __future__ import annotations

import pytest
import torch

from rigs.caches.marks_pool import marks_of
from rigs.caches.state_pools import TRAILING, StatePools
from rigs.stores.host_pools import device_bytes, page_slots
from sglang.srt.mem_cache.device.pool_transfer import join_transfers
from sglang.srt.mem_cache.hicache_storage import (
    PoolName,
    PoolTransfer,
    SidecarPoolSpec,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    _resolve_shared_pool_transfers,
)
from sglang.srt.mem_cache.l2 import cache_controller
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

KV, INDEXER, MAMBA = PoolName.KV, PoolName.INDEXER, PoolName.MAMBA
HOST, DEVICE = torch.arange(4), torch.arange(8, 12)


# -- slots that pools share ----------------------------------------------------------------------


def test_an_auxiliary_pool_moves_the_pages_of_its_owner_under_the_same_keys() -> None:
    primary = PoolTransfer(KV, HOST, DEVICE, ["ns/a"])
    state = PoolTransfer(MAMBA, HOST[:1], DEVICE[:1], ["ns/a"], TRAILING)
    resolved = _resolve_shared_pool_transfers([primary, state], [SidecarPoolSpec(INDEXER, KV)])
    assert resolved[:2] == [primary, state]
    (auxiliary,) = resolved[2:]
    assert auxiliary.name is INDEXER
    assert auxiliary.host_indices is HOST
    assert auxiliary.device_indices is DEVICE
    assert (auxiliary.keys, auxiliary.hit_policy) == (
        ["ns/a"],
        SidecarPoolSpec(INDEXER, KV).hit_policy,
    )


def test_a_transfer_that_names_its_owner_takes_its_slots() -> None:
    asked = PoolTransfer(INDEXER, indices_from_pool=KV)
    for auxiliary_pools in ([], [SidecarPoolSpec(INDEXER, KV)]):
        primary, auxiliary = _resolve_shared_pool_transfers(
            [PoolTransfer(KV, HOST, DEVICE), asked], auxiliary_pools
        )
        assert auxiliary.host_indices is primary.host_indices is HOST
    with pytest.raises(ValueError, match="indexer: takes its slots from kv"):
        _resolve_shared_pool_transfers([asked], [])


def test_an_auxiliary_pool_stays_where_its_owner_does() -> None:
    state = PoolTransfer(MAMBA, HOST[:1], DEVICE[:1])
    assert _resolve_shared_pool_transfers([state], [SidecarPoolSpec(INDEXER, KV)]) == [state]


def test_operations_are_joined_pool_by_pool() -> None:
    first = [PoolTransfer(KV, HOST, DEVICE), PoolTransfer(MAMBA, HOST[:1], DEVICE[:1], ["a"])]
    second = [PoolTransfer(KV, HOST + 4, DEVICE + 4)]
    third = [PoolTransfer(KV, HOST + 8, DEVICE), PoolTransfer(MAMBA, HOST[1:2], DEVICE[:1], ["c"])]
    kv, state = join_transfers([first, second, third])
    assert kv.host_indices is not None and kv.host_indices.tolist() == [*range(12)]
    assert state.host_indices is not None and state.host_indices.tolist() == [0, 1]
    assert (kv.keys, state.keys) == (None, ["a", "c"])
    assert join_transfers([first]) is first


# -- copies of states ----------------------------------------------------------------------------


@pytest.mark.parametrize("on_cpu_first", [False, True])
def test_a_state_is_written_and_loaded_with_its_pages(
    monkeypatch: pytest.MonkeyPatch, on_cpu_first: bool
) -> None:
    monkeypatch.setattr(MHATokenToKVPoolHost, "prefers_cpu_slots", lambda *_: on_cpu_first)
    monkeypatch.setattr(cache_controller, "_PAGES_AT_ONCE", 1)
    pools = StatePools()
    controller, on_device = pools.controller, page_slots([4, 2, 7])
    written = pools.state()
    operation = controller.write(on_device, [written])
    assert operation is not None and written.host_indices is not None
    while not controller.ack_write_queue:
        controller.start_writing()
    pools.finish_copies()
    wanted = device_bytes(pools.kv, on_device)
    for buffer in (*pools.kv.k_buffer, *pools.kv.v_buffer, pools.states.marks):
        buffer.zero_()
    loaded = PoolTransfer(MAMBA, written.host_indices, torch.tensor([3]))
    controller.load(operation.host_indices, on_device, [loaded])
    controller.layer_done_counter.set_consumer(controller.start_loading())
    controller.layer_done_counter.wait_until(3)
    assert marks_of(pools.states, torch.tensor([3])) == [50, 51]
    assert device_bytes(pools.kv, on_device) == wanted
    pools.finish_copies()
    controller.reset()
    assert pools.state_host.available_size() == 12
    controller.shutdown()


def test_a_write_takes_host_pages_in_all_pools_or_in_none() -> None:
    pools = StatePools()
    taken = pools.state_host.alloc(12)
    kv_free = pools.group.primary.available_size()
    state = pools.state()
    assert pools.controller.write(page_slots([1]), [state]) is None
    assert pools.group.primary.available_size() == kv_free
    assert state.host_indices is None
    # The pool's own eviction makes room.
    missing: list[int] = []

    def evict(slots: int) -> None:
        missing.append(slots)
        assert taken is not None
        pools.state_host.free(taken[:2])

    pools.group.entries[MAMBA].host_evict_fn = evict
    assert pools.controller.write(page_slots([1]), [state]) is not None
    assert (missing, pools.state_host.available_size()) == ([1], 1)
    # The primary pool has no room: nothing is taken of the other either.
    pools.group.primary.alloc(pools.group.primary.available_size())
    assert pools.controller.write(page_slots([1]), [pools.state()]) is None
    assert pools.state_host.available_size() == 1
    pools.controller.start_writing(is_urgent=True)
    pools.finish_copies()
    pools.controller.shutdown()
