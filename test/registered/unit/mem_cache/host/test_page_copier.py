"""Loads that know themselves by an object, and which device has a copier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rigs.stores.host_pools import page_slots
from sglang.srt.hardware_backend.cpu.runtime import CpuRuntime
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.device.pool_registry import ModelPools
from sglang.srt.mem_cache.host import page_copier
from sglang.srt.mem_cache.host.host_page_list import whole_pages
from sglang.srt.mem_cache.host.page_copier import (
    PageCopier,
    PageLoad,
    PoolPair,
    check_has_copier,
    make_page_copier,
)
from sglang.srt.mem_cache.host.pool_kinds import MHATokenToKVPoolHost
from sglang.srt.mem_cache.host.staged_copy import LoadTuning
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_stack
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

LAYERS = 3
PAGE = 4


@pytest.fixture
def device() -> MHATokenToKVPool:
    """Eight pages; every element of layer n is its slot plus 1000 n, values negative."""
    pool = MHATokenToKVPool(8 * PAGE, PAGE, torch.float32, 1, 2, LAYERS, "cpu")
    for layer in range(LAYERS):
        slots = torch.arange(9 * PAGE, dtype=torch.float32).view(-1, 1, 1)
        pool.k_buffer[layer].copy_((slots + 1000 * layer).expand(-1, 1, 2))
        pool.v_buffer[layer].copy_(-pool.k_buffer[layer])
    return pool


@pytest.fixture
def host(device: MHATokenToKVPool) -> MHATokenToKVPoolHost:
    return MHATokenToKVPoolHost(device, 1.0, 0, PAGE, "page_first_direct")


def test_a_load_looks_at_its_slots_once(
    device: MHATokenToKVPool, host: MHATokenToKVPoolHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, here = page_slots([2, 5], PAGE), page_slots([1, 3], PAGE)
    host.backup_from_device_all_layer(device, slots, here, "direct")
    looks: list[int] = []

    def count(indices: torch.Tensor, page_size: int, page_num: int) -> np.ndarray:
        looks.append(len(indices))
        return whole_pages(indices, page_size, page_num)

    monkeypatch.setattr(page_copier, "whole_pages", count)
    load = host.begin_load(device, slots, page_slots([7, 8], PAGE), "direct")
    for layer in range(LAYERS):
        load.issue(layer)
    assert looks == [8, 8]
    for layer in range(LAYERS):
        got = device.k_buffer[layer][page_slots([7, 8], PAGE), 0, 0]
        assert got.tolist() == [1000 * layer + slot for slot in here.tolist()]
        assert device.v_buffer[layer][page_slots([7, 8], PAGE), 0, 0].tolist() == (-got).tolist()


def test_page_numbers_are_the_callers_own() -> None:
    slots = torch.tensor([3, 1])
    pages = whole_pages(slots, 1, 4)
    slots.fill_(0)
    assert pages.tolist() == [3, 1]
    for outside in (4, -1):
        with pytest.raises(ValueError, match="leave the pool of 4 slots"):
            whole_pages(torch.tensor([outside]), 1, 4)


def test_two_loads_with_the_same_slots_are_two_loads(
    device: MHATokenToKVPool, host: MHATokenToKVPoolHost
) -> None:
    slots, there = page_slots([0], PAGE), page_slots([6], PAGE)
    host.backup_from_device_all_layer(device, slots, page_slots([1], PAGE), "direct")
    first = host.begin_load(device, slots, there, "direct")
    first.issue(0)
    second = host.begin_load(device, slots, there, "direct")
    second.issue(2)
    first.issue(1)
    seen = [int(device.k_buffer[layer][6 * PAGE, 0, 0]) for layer in range(LAYERS)]
    assert seen == [4, 1004, 2004]
    assert int(device.k_buffer[0][7 * PAGE, 0, 0]) == 28


def test_one_layer_alone_is_a_load_of_one_layer(
    device: MHATokenToKVPool, host: MHATokenToKVPoolHost
) -> None:
    slots, there = page_slots([0], PAGE), page_slots([6], PAGE)
    host.backup_from_device_all_layer(device, slots, page_slots([1], PAGE), "direct")
    host.load_to_device_per_layer(device, slots, there, 1, "direct")
    seen = [int(device.k_buffer[layer][6 * PAGE, 0, 0]) for layer in range(LAYERS)]
    assert seen == [24, 1004, 2024]


@pytest.mark.parametrize("there", [[7, 8], [8, 6]], ids=["run", "any order"])
@pytest.mark.parametrize("here", [[2, 3], [4, 1]], ids=["run", "any order"])
def test_a_copy_without_memory_for_a_buffer_goes_page_by_page(
    device: MHATokenToKVPool,
    host: MHATokenToKVPoolHost,
    monkeypatch: pytest.MonkeyPatch,
    here: list[int],
    there: list[int],
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("Unable to allocate 64. B")

    monkeypatch.setattr(page_copier, "_gathered", refuse)
    slots = page_slots([5, 2], PAGE)
    host.backup_from_device_all_layer(device, slots, page_slots(here, PAGE), "direct")
    load = host.begin_load(device, slots, page_slots(there, PAGE), "direct")
    for layer in range(LAYERS):
        load.issue(layer)
        got = device.k_buffer[layer][page_slots(there, PAGE), 0, 0]
        assert got.tolist() == [1000 * layer + at for at in page_slots(here, PAGE).tolist()]
        assert device.v_buffer[layer][page_slots(there, PAGE), 0, 0].tolist() == (-got).tolist()


def test_wrong_slots_are_refused_when_a_load_begins(
    device: MHATokenToKVPool, host: MHATokenToKVPoolHost
) -> None:
    good = page_slots([1], PAGE)
    for slots, there, io_backend, message in (
        (good + 800, good, "direct", "leave the pool"),
        (good, page_slots([1, 2], PAGE), "direct", "4 host_indices for 8 device_indices"),
        (good, good + 1, "direct", "not whole pages"),
        (good, good, "kernel", "copies with direct only"),
    ):
        with pytest.raises(ValueError, match=message):
            host.begin_load(device, slots, there, io_backend)


@pytest.mark.parametrize(
    ("step_bytes", "ranges"), [(1, [range(1), range(1, 2), range(2, 3)]), (1 << 20, [range(3)])]
)
def test_a_load_of_a_cuda_pool_stages_its_slots_once_and_launches_a_step_at_a_time(
    device: MHATokenToKVPool,
    monkeypatch: pytest.MonkeyPatch,
    step_bytes: int,
    ranges: list[range],
) -> None:
    """Without a device: the pools are in host memory, and the kernel is one that takes notes."""
    pytest.importorskip("triton")
    from sglang.srt.mem_cache.host.host_copy_cuda import CudaPageCopier
    from sglang.srt.mem_cache.host.token_copy import TokenCopy

    launched: list[tuple[range, list[int], list[int]]] = []
    staged: list[int] = []

    def launch(
        _: TokenCopy, to: object, pages: torch.Tensor, slots: torch.Tensor, layers: range
    ) -> None:
        launched.append((layers, pages.tolist(), slots.tolist()))

    def stage(_: CpuRuntime, tensor: torch.Tensor) -> torch.Tensor:
        staged.append(len(tensor))
        return tensor

    monkeypatch.setattr(TokenCopy, "copy", launch)
    monkeypatch.setattr(TokenCopy, "compile", lambda _: None)
    monkeypatch.setattr(CpuRuntime, "stage_to_device", stage)
    host = MHATokenToKVPoolHost(device, 1.0, 0, PAGE, "page_first")
    copier = CudaPageCopier(host._paired_with(device))
    copier.tuning_of_loads = LoadTuning(step_bytes=step_bytes)
    slots, there = page_slots([2], PAGE), page_slots([5], PAGE)
    first = copier.begin_load(slots, there, "kernel")
    second = copier.begin_load(slots, there + PAGE, "kernel")
    for layer in range(3):
        first.issue(layer)
    second.issue(0)
    # Four slots on the device for each load, then one page on the host with the first step.
    assert staged == [4, 4, 1, 1]
    assert launched == [
        *((layers, [2], [20, 21, 22, 23]) for layers in ranges),
        (ranges[0], [2], [24, 25, 26, 27]),
    ]
    assert not copier.prefers_cpu_slots("kernel")
    with pytest.raises(ValueError, match="CUDA pools copy with kernel or direct"):
        copier.begin_load(slots, there, "kernel_ascend")


class NoCopier(PageCopier):
    def __init__(self, pools: PoolPair) -> None:
        self.pools = pools

    def backup(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
        staged: torch.Tensor | None = None,
    ) -> None:
        raise AssertionError

    def begin_load(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
        staged: torch.Tensor | None = None,
        steps: Sequence[range] | None = None,
    ) -> PageLoad:
        raise AssertionError

    def load_steps(self, num_pages: int, io_backend: str, load_bytes: int) -> tuple[range, ...]:
        raise AssertionError


def test_a_device_without_a_copier_is_refused_until_it_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for device in ("xpu:0", torch.device("meta")):
        with pytest.raises(ValueError, match=r"no copies on (xpu|meta) yet, only on cpu, cuda, n"):
            check_has_copier(device)
    for device in ("cuda:1", "npu:0"):
        check_has_copier(device)
    pools = PoolPair((), ((torch.empty(1, device="meta"),),), 1, 1, 1)
    with pytest.raises(ValueError, match="start without --enable-hierarchical-cache"):
        make_page_copier(pools)
    pool = MHATokenToKVPool(8 * PAGE, PAGE, torch.float32, 1, 2, LAYERS, "meta")
    with pytest.raises(ValueError, match="has no copies on meta yet"):
        build_kv_host_stack(
            ModelPools.of([pool]),
            ratio=1.0,
            size_gb=0,
            io_backend="auto",
            layout="auto",
            has_storage=False,
        )
    monkeypatch.setitem(page_copier._COPIERS, "meta", (__name__, "NoCopier"))
    copier = make_page_copier(pools)
    assert isinstance(copier, NoCopier)
    assert copier.pools is pools
    assert not copier.prefers_cpu_slots("direct")
