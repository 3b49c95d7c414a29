"""Checksums of pages: the same from the device, from the host pool and from xxhash."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash

from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.device.mla_pool import MLATokenToKVPool
from sglang.srt.mem_cache.host.host_layout import HostLayout
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.host.page_checksums import NO_CHECKSUM, PageChecksums, as_rows
from sglang.srt.mem_cache.host.pool_kinds import MHATokenToKVPoolHost, MLATokenToKVPoolHost
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

PAGE, PAGES = 4, 8


def make_device_pool(kind: str) -> BaseDevicePool:
    pool: BaseDevicePool
    if kind == "keys and values":
        pool = MHATokenToKVPool(
            PAGE * PAGES, PAGE, torch.bfloat16, head_num=2, head_dim=8, layer_num=3, device="cpu"
        )
    else:
        pool = MLATokenToKVPool(
            PAGE * PAGES, PAGE, torch.bfloat16, kv_lora_rank=24, qk_rope_head_dim=8, layer_num=3,
            device="cpu",
        )  # fmt: skip
    for part in pool.parts:
        for layer in part:
            raw = layer.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    return pool


def make_host_pool(kind: str, device: BaseDevicePool, layout: str) -> HostKVCache:
    made = MHATokenToKVPoolHost if kind == "keys and values" else MLATokenToKVPoolHost
    return made.make(device, page_num=PAGES, layout=layout)


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("kind", ["keys and values", "latent rows"])
def test_the_device_hashes_what_the_host_stores(kind: str, layout: str) -> None:
    device = make_device_pool(kind)
    host = make_host_pool(kind, device, layout)
    slots = torch.cat([torch.arange(PAGE) + page * PAGE for page in (3, 1, 6)])
    to = torch.arange(3 * PAGE)
    host.backup_from_device_all_layer(device, to, slots, "direct")
    hasher = host.hasher_of(device)
    assert hasher is not None
    (digests,) = hasher.digests(slots).wait()
    flat = torch.empty(3, host.page_bytes, dtype=torch.uint8)
    host.gather_pages(to, flat)
    expected = [xxhash.xxh3_128_digest(page.numpy().tobytes()) for page in flat]
    assert digests is not None
    assert [bytes(row.tolist()) for row in digests] == expected


def test_only_known_checksums_differ() -> None:
    checksums = PageChecksums(4)
    pages = np.array([2, 0, 3])
    mine = as_rows([bytes([n]) * 16 for n in (1, 2, 3)])
    checksums.keep(pages[:2], mine[:2])
    assert checksums.have(pages).tolist() == [True, True, False]
    assert checksums.differ(pages, mine).tolist() == [False, False, False]
    assert checksums.differ(pages, mine[[0, 2, 1]]).tolist() == [False, True, False]
    checksums.forget(pages[:1])
    assert checksums.of(pages) == [NO_CHECKSUM, b"\2" * 16, NO_CHECKSUM]


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("bit", [0, 7, 4095])
def test_every_flipped_bit_differs(layout: str, bit: int) -> None:
    device = make_device_pool("keys and values")
    host = make_host_pool("keys and values", device, layout)
    slots = torch.arange(PAGE, 2 * PAGE)
    to = torch.arange(PAGE)
    host.backup_from_device_all_layer(device, to, slots, "direct")
    host.checksums.keep(np.array([0]), digests_of(host, device, slots))
    raw = host.kv_buffer[0].view(-1).view(torch.uint8)
    flat = torch.empty(1, host.page_bytes, dtype=torch.uint8)
    host.gather_pages(to, flat)
    flat[0, bit // 8 % host.page_bytes] ^= 1 << bit % 8
    host.scatter_pages(to, flat)
    assert raw.numel()
    back = torch.arange(5 * PAGE, 6 * PAGE)
    for layer in range(3):
        host.load_to_device_per_layer(device, to, back, layer, "direct")
    assert host.checksums.differ(np.array([0]), digests_of(host, device, back)).tolist() == [True]


def digests_of(
    host: HostKVCache, device: BaseDevicePool, slots: torch.Tensor
) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    hasher = host.hasher_of(device)
    assert hasher is not None
    (digests,) = hasher.digests(slots).wait()
    assert digests is not None
    found: np.ndarray[tuple[int, int], np.dtype[np.uint8]] = digests.numpy()
    return found
