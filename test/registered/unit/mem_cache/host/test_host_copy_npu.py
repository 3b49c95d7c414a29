"""`kernel_ascend`: which bytes go where. The device pool is in CPU memory: torch copies alike."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from rigs.caches.cache_rig import RIG_DEVICE, CacheRig, HiCacheSettings
from rigs.caches.mla_pools import make_mla_pool
from rigs.stores.host_pools import (
    PAGE,
    copy_to_host,
    device_bytes,
    make_device_pool,
    make_host_pool,
    page_slots,
)
from sglang.srt.hardware_backend.cpu.runtime import CpuRuntime
from sglang.srt.mem_cache.device.base_device_pool import PagedDevicePool
from sglang.srt.mem_cache.host import host_layout, page_copier
from sglang.srt.mem_cache.host.host_copy_npu import NpuPageCopier, _runs
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.host.page_copier import PoolPair
from sglang.srt.mem_cache.host.pool_kinds import MLATokenToKVPoolHost
from sglang.test.ci.ci_register import register_cpu_ci, register_npu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")
register_npu_ci(est_time=3, suite="base-a-test-npu")

LAYOUTS = ["page_first_kv_split", "page_first_direct"]
PAGES, INTO = [5, 2, 9, 3, 12], [3, 1, 7, 8, 14]
IO = "kernel_ascend"


@pytest.fixture
def as_npu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes pools in CPU memory copy as an NPU's do, this many bytes of K at once."""

    def use(buffer_bytes: int) -> None:
        def make(pools: PoolPair) -> NpuPageCopier:
            return NpuPageCopier(pools, buffer_bytes=buffer_bytes)

        monkeypatch.setattr(page_copier, "CpuPageCopier", make)

    return use


def load(host: HostKVCache, pool: PagedDevicePool, slots: torch.Tensor) -> None:
    begun = host.begin_load(pool, slots, page_slots(INTO), IO)
    for layer in range(pool.layer_num):
        begun.issue(layer)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("v_head_dim", [4, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("buffer_bytes", [1, 500, 1 << 20])
def test_pages_go_to_the_host_and_come_back_bit_exact(
    as_npu: Callable[[int], None],
    layout: str,
    v_head_dim: int,
    dtype: torch.dtype,
    buffer_bytes: int,
) -> None:
    source = make_device_pool(dtype=dtype, v_head_dim=v_head_dim)
    target = make_device_pool(dtype=dtype, v_head_dim=v_head_dim, seed=1)
    rest = page_slots([page for page in range(17) if page not in INTO])
    untouched = device_bytes(target, rest)
    as_npu(buffer_bytes)
    host = make_host_pool(source, layout)
    host.alloc(2 * PAGE)
    slots = host.alloc(5 * PAGE)
    assert slots is not None
    # Runs of two and of one page, and back to front.
    slots = slots.view(5, PAGE)[[3, 4, 1, 0, 2]].reshape(-1)
    host.backup_from_device_all_layer(source, slots, page_slots(PAGES), IO)
    load(host, target, slots)
    assert device_bytes(target, page_slots(INTO)) == device_bytes(source, page_slots(PAGES))
    assert device_bytes(target, rest) == untouched


@pytest.mark.parametrize("layout", LAYOUTS)
def test_latent_rows_whole_or_cut_in_two_come_back_bit_exact(
    as_npu: Callable[[int], None], layout: str
) -> None:
    source, target = make_mla_pool(), make_mla_pool(1)
    rest = page_slots([page for page in range(17) if page not in INTO])
    untouched = device_bytes(target, rest)
    as_npu(500)
    host = MLATokenToKVPoolHost.make(source, page_num=8, layout=layout)
    slots = page_slots([6, 7, 1, 0, 4])
    host.backup_from_device_all_layer(source, slots, page_slots(PAGES), IO)
    load(host, target, slots)
    assert device_bytes(target, page_slots(INTO)) == device_bytes(source, page_slots(PAGES))
    assert device_bytes(target, rest) == untouched


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_host_has_the_bytes_that_other_devices_write(
    as_npu: Callable[[int], None], layout: str
) -> None:
    pool = make_device_pool()
    plain = make_host_pool(pool, layout)
    slots = copy_to_host(pool, plain, PAGES)
    as_npu(1 << 20)
    host = make_host_pool(pool, layout)
    same = host.alloc(len(slots))
    assert same is not None
    assert torch.equal(same, slots)
    host.backup_from_device_all_layer(pool, slots, page_slots(PAGES), IO)
    for got, want in zip(
        host.get_hybrid_pool_buffer(), plain.get_hybrid_pool_buffer(), strict=True
    ):
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


def test_neighbours_on_the_host_are_copied_together(
    as_npu: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(_runs(np.array([4, 5, 6, 1, 0, 8]))) == [(0, 4, 3), (3, 1, 1), (4, 0, 1), (5, 8, 1)]
    assert list(_runs(np.array([0, 1]))) == [(0, 0, 2)]
    assert list(_runs(np.array([], dtype=np.int64))) == []
    copies: list[int] = []

    def count(self: NpuPageCopier, to: torch.Tensor, source: torch.Tensor) -> None:
        copies.append(len(to))
        to.copy_(source)

    monkeypatch.setattr(NpuPageCopier, "_copy", count)
    as_npu(1 << 20)
    pool = make_device_pool()
    host = make_host_pool(pool, "page_first_kv_split")
    slots = host.alloc(5 * PAGE)
    assert slots is not None
    host.backup_from_device_all_layer(pool, slots, page_slots(PAGES), IO)
    assert copies == [5, 5]  # K and V, all layers
    copies.clear()
    load(host, pool, slots)
    assert copies == [5, 5]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_host_pool_of_one_page_works(as_npu: Callable[[int], None], layout: str) -> None:
    as_npu(1 << 20)
    source, target = make_device_pool(1), make_device_pool(1, seed=1)
    host = make_host_pool(source, layout, ratio=1.0)
    assert host.page_num == 1
    slots, page = page_slots([0]), page_slots([1])
    host.backup_from_device_all_layer(source, slots, page, IO)
    host.load_to_device_per_layer(target, slots, page, 0, IO)
    assert device_bytes(target, page) == device_bytes(source, page)


@pytest.mark.skipif(RIG_DEVICE != "cpu", reason="takes pools in CPU memory for an NPU's")
@pytest.mark.parametrize("layout", ["auto", *LAYOUTS])
def test_a_prefix_that_left_the_device_is_loaded_by_it(
    as_npu: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Two tiers on what the engine takes for an NPU, with the settings that it chooses there."""
    as_npu(1 << 20)
    monkeypatch.setitem(host_layout._LAYOUTS_FOR, "cpu", host_layout._LAYOUTS_FOR["npu"])
    for case in [key for key in host_layout._PREFERENCE if key[0] == "cpu"]:
        monkeypatch.setitem(host_layout._PREFERENCE, case, ())
    rig = CacheRig(l1_pages=12, settings=HiCacheSettings(hicache_mem_layout=layout))
    assert rig.hi.cache_controller.io_backend == IO
    prompt = range(40)
    rig.run(prompt)
    rig.settle()
    for first in (1000, 2000):
        rig.run(range(first, first + 40))
        rig.settle()
    assert rig.run(prompt).host > 0
    rig.settle()
    rig.close()


def test_an_index_on_the_device_is_kept_and_one_on_the_cpu_is_staged(
    as_npu: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    staged: list[int] = []

    def keep(_: CpuRuntime, tensor: torch.Tensor) -> None:
        kept.append(len(tensor))

    def stage(_: CpuRuntime, tensor: torch.Tensor) -> torch.Tensor:
        staged.append(len(tensor))
        return tensor

    monkeypatch.setattr(CpuRuntime, "keep_for_current_stream", keep)
    monkeypatch.setattr(CpuRuntime, "stage_to_device", stage)
    as_npu(1 << 20)
    pool = make_device_pool()
    host = make_host_pool(pool, "page_first_direct")
    host.backup_from_device_all_layer(pool, page_slots([1, 2]), page_slots([3, 4]), IO)
    assert (kept, staged) == ([2 * PAGE], [2 * PAGE])


def test_what_cannot_be_copied_is_refused(as_npu: Callable[[int], None]) -> None:
    as_npu(1 << 20)
    pool = make_device_pool()
    host = make_host_pool(pool, "page_first_kv_split")
    good = page_slots([1])
    for slots, there, io_backend, message in (
        (good + 800, good, IO, "leave the pool"),
        (good, page_slots([1, 2]), IO, "4 host_indices for 8 device_indices"),
        (good, good + 1, IO, "not whole pages"),
        (good, good, "direct", "NPU pools copy with kernel_ascend"),
    ):
        with pytest.raises(ValueError, match=message):
            host.begin_load(pool, slots, there, io_backend)
        with pytest.raises(ValueError, match=message):
            host.backup_from_device_all_layer(pool, slots, there, io_backend)
    for layout in ("layer_first", "page_first"):
        other = make_host_pool(pool, layout)
        with pytest.raises(ValueError, match="use --hicache-mem-layout page_first_kv_split or"):
            other.begin_load(pool, good, good, IO)
