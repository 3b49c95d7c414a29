"""The kernel that moves tokens between the host and the device: whole rows, and columns of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rigs.models.triton_device import triton_device
from rigs.stores.host_pools import PAGE, device_bytes, fill_with_random_bits, page_slots
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.mem_cache.device.base_device_pool import PagedDevicePool
from sglang.srt.mem_cache.device.fp8_rows import FP8
from sglang.srt.mem_cache.device.mla_pool import MLATokenToKVPool
from sglang.srt.mem_cache.host.host_copy_cuda import CudaPageCopier, EngineUse
from sglang.srt.mem_cache.host.host_layout import HostLayout
from sglang.srt.mem_cache.host.pool_kinds import MHATokenToKVPoolHost, MLATokenToKVPoolHost
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=20, suite="base-b-test-1-gpu-large")

DEVICE = triton_device()
PAGES, INTO = [3, 1, 8], [2, 7, 4]


def heads(seed: int) -> PagedDevicePool:
    return filled(MHATokenToKVPool(8 * PAGE, PAGE, torch.bfloat16, 2, 4, 3, DEVICE), seed)


def latent_rows(seed: int) -> PagedDevicePool:
    return filled(MLATokenToKVPool(8 * PAGE, PAGE, torch.bfloat16, 16, 8, 3, DEVICE), seed)


def odd_rows(seed: int) -> PagedDevicePool:
    """Latent vectors of 16 bytes that lie 18 bytes apart: moved by two bytes, not by eight."""
    return filled(MLATokenToKVPool(8 * PAGE, PAGE, torch.bfloat16, 8, 1, 3, DEVICE), seed)


def fp8_rows(seed: int) -> PagedDevicePool:
    """Rows of 36 bytes and of 16, moved by four."""
    return filled(MLATokenToKVPool(8 * PAGE, PAGE, FP8, 32, 8, 3, DEVICE), seed)


def filled(pool: PagedDevicePool, seed: int) -> PagedDevicePool:
    fill_with_random_bits(pool, seed)
    return pool


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("make", [heads, latent_rows, odd_rows, fp8_rows])
def test_tokens_go_to_the_host_and_come_back_bit_for_bit(
    make: Callable[[int], PagedDevicePool], layout: HostLayout
) -> None:
    source, target = make(0), make(1)
    is_latent = isinstance(source, MLATokenToKVPool)
    host_class = MLATokenToKVPoolHost if is_latent else MHATokenToKVPoolHost
    host = host_class.make(source, page_num=8, layout=layout)
    back, forth = (CudaPageCopier(host._paired_with(pool)) for pool in (source, target))
    for copier in (back, forth):
        copier.engine_use["kernel"] = EngineUse(load=False, backup=False)
    slots = page_slots([5, 0, 6])
    untouched = page_slots([page for page in range(9) if page not in INTO])
    before = device_bytes(target, untouched)
    back.backup(slots, page_slots(PAGES).to(DEVICE), "kernel")
    load = forth.begin_load(slots, page_slots(INTO).to(DEVICE), "kernel")
    for layer in range(3):
        load.issue(layer)
    done = device_runtime(DEVICE).make_event()
    done.record()
    done.synchronize()
    assert device_bytes(target, page_slots(INTO)) == device_bytes(source, page_slots(PAGES))
    assert device_bytes(target, untouched) == before
