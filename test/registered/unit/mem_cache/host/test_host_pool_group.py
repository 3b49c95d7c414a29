"""Several pools that move together: copies, the signals of layers, what a group says of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rigs.caches.marks_pool import MarksPool, MarksPoolHost, marks_of, page_marks
from rigs.stores.host_pools import (
    PAGE,
    device_bytes,
    make_device_pool,
    make_host_pool,
    page_slots,
)
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.mem_cache.device.state_spec import PoolHitPolicy
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer, SidecarPoolSpec
from sglang.srt.mem_cache.host.page_checksums import NO_CHECKSUM
from sglang.srt.mem_cache.host.page_copier import PageLoad
from sglang.srt.mem_cache.memory_pool_host import HostPoolGroup, PoolEntry
from sglang.srt.utils.parts import do_all
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


class Pools:
    """KV in model layers 0 and 2 to 3, a mark a page in layers 1 and 2; layer 4 has no state."""

    def __init__(self) -> None:
        self.kv = make_device_pool()
        self.marks = MarksPool(page_marks(1, 2), self.kv.size, PAGE)
        self.group = HostPoolGroup(
            [
                PoolEntry(
                    PoolName.INDEXER,
                    MarksPoolHost(self.marks, 2.0, 0, PAGE, "page_first"),
                    self.marks,
                    {1: 0, 2: 1}.get,
                ),
                PoolEntry(
                    PoolName.KV,
                    make_host_pool(self.kv, "page_first"),
                    self.kv,
                    {0: 0, 2: 1, 3: 2}.get,
                    is_primary_index_anchor=True,
                ),
            ],
            num_layers=5,
        )
        self.host = self.group.primary.alloc(2 * PAGE)
        self.on_device = page_slots([4, 2])
        self.marks.marks[:, [4, 2]] = torch.tensor([[10, 11], [20, 21]])

    def transfers(self) -> list[PoolTransfer]:
        names = (PoolName.KV, PoolName.INDEXER)
        return [PoolTransfer(name, self.host, self.on_device) for name in names]


class Recorded:
    """A step's event: what the pools had loaded by then."""

    def __init__(self, order: list[int], done: list[str]) -> None:
        self._order, self._done = order, done

    def record(self) -> None:
        self._order.append(len(self._done))

    def query(self) -> bool:
        raise NotImplementedError

    wait = synchronize = record


@pytest.mark.parametrize("name", [PoolName.KV, PoolName.INDEXER])
def test_backups_want_their_slots_on_the_cpu_if_one_pool_does(name: PoolName) -> None:
    group = Pools().group
    assert not group.prefers_cpu_slots("direct")
    vars(group.get_pool(name))["prefers_cpu_slots"] = lambda pool, io: io == "direct"
    assert group.prefers_cpu_slots("direct")
    assert not group.prefers_cpu_slots("kernel")


def test_a_group_moves_the_pages_of_all_pools() -> None:
    pools = Pools()
    none = torch.empty(0, dtype=torch.int64)
    assert not pools.group.backup([PoolTransfer(PoolName.KV, none, none)], "direct")
    pools.group.backup(pools.transfers(), "direct")
    before = device_bytes(pools.kv, pools.on_device)
    for buffer in (*pools.kv.k_buffer, *pools.kv.v_buffer, pools.marks.marks):
        buffer.zero_()
    steps = pools.group.load_steps(pools.transfers(), "direct")
    done = [device_runtime("cpu").make_event() for _ in steps.issued]
    pools.group.load(pools.transfers(), steps, done, "direct")
    assert device_bytes(pools.kv, pools.on_device) == before
    assert marks_of(pools.marks, pools.on_device) == [10, 11, 20, 21]
    do_all(pools.group.integrity_parts())
    pools.group.clear()
    assert pools.group.primary.available_size() == pools.group.primary.size


class WatchedLoad(PageLoad):
    def __init__(self, load: PageLoad, name: str, copies: list[str]) -> None:
        self.load, self.name, self.copies = load, name, copies

    def issue(self, layer: int) -> None:
        self.load.issue(layer)
        self.copies.append(f"{self.name} {layer}")


def test_a_step_is_signalled_when_every_pool_that_has_its_layer_has_loaded_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools = Pools()
    pools.group.backup(pools.transfers(), "direct")
    copies: list[str] = []
    for name, entry in pools.group.entries.items():
        begin = entry.host_pool.begin_load

        def watched(
            *args: Any, name: str = name, begin: Callable[..., PageLoad] = begin
        ) -> PageLoad:
            return WatchedLoad(begin(*args), name, copies)

        monkeypatch.setattr(entry.host_pool, "begin_load", watched)

    def load(transfers: list[PoolTransfer]) -> tuple[tuple[int, ...], list[int]]:
        copies.clear()
        order: list[int] = []
        steps = pools.group.load_steps(transfers, "direct")
        done = [Recorded(order, copies) for _ in steps.issued]
        pools.group.load(transfers, steps, done, "direct")
        return steps.step_of, order

    assert load(pools.transfers()) == ((0, 1, 2, 3, 3), [1, 2, 4, 5])
    assert copies == ["kv 0", "indexer 0", "kv 1", "indexer 1", "kv 2"]
    assert load(pools.transfers()[:1]) == ((0, 0, 1, 2, 2), [1, 2, 3]), "nothing of layer 1"
    # The first layer waits for an empty step, and so for the loads before.
    assert load(pools.transfers()[1:]) == ((0, 1, 2, 2, 2), [0, 1, 2])


def test_pages_with_other_contents_have_no_checksums_in_any_pool_of_their_slots() -> None:
    pools = Pools()
    all_of = [entry.host_pool.checksums for entry in pools.group.entries.values()]
    pages = np.arange(pools.group.primary.page_num)
    for checksums in all_of:
        checksums.keep(pages, np.full((len(pages), len(NO_CHECKSUM)), 7, np.uint8))
    pools.group.forget_checksums(pools.transfers()[:1])
    assert pools.host is not None
    forgotten = sorted(pools.host[::PAGE] // PAGE)
    assert len(forgotten) == 2
    for checksums in all_of:
        assert np.flatnonzero(~checksums.have(pages)).tolist() == forgotten


def test_what_a_group_says_of_all_its_pools() -> None:
    pools = Pools()
    group = pools.group
    kv, marks = group.get_pool("kv"), group.get_pool("indexer")
    assert kv is group.primary
    assert group.extra_pools == {"indexer": marks}
    assert group.auxiliary_pools == (SidecarPoolSpec(PoolName.INDEXER, PoolName.KV),)
    assert [(one.name, one.hit_policy.value) for one in group.extra_queries] == [
        ("indexer", "all_pages")
    ]
    assert (group.page_bytes, marks.page_bytes) == (kv.page_bytes + 16, 16)
    assert group.nbytes == 32 * group.page_bytes
    pools.marks.spec = replace(pools.marks.spec, hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert group.page_bytes == kv.page_bytes, "a prefix has no page of it for each of its own"


def test_a_group_needs_one_anchor_known_names_and_equal_slots() -> None:
    pools = Pools()
    indexer, kv = pools.group.entries.values()
    with pytest.raises(ValueError, match="one primary pool, got 0"):
        HostPoolGroup([indexer])
    with pytest.raises(ValueError, match="repeat"):
        HostPoolGroup([indexer, indexer, kv])
    with pytest.raises(ValueError, match=r"mamba.*indexer, kv"):
        pools.group.get_pool("mamba")
    with pytest.raises(ValueError, match="needs host_indices"):
        pools.group.backup([PoolTransfer(PoolName.KV)], "direct")
    with pytest.raises(ValueError, match=r"mamba.*indexer, kv"):
        pools.group.load_steps([PoolTransfer(PoolName.MAMBA)], "direct")
    small = MarksPoolHost(pools.marks, 1.0, 0, PAGE, "page_first")
    with pytest.raises(ValueError, match=r"indexer shares.*kv.*16 pages of 4, not 32 of 4"):
        HostPoolGroup([replace(indexer, host_pool=small), kv])
