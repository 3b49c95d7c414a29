"""Lists of plain copies, carried out by memmove; and the pools that they are made of."""

from __future__ import annotations

import ctypes

from rigs.caches.mla_pools import make_mla_pool
from rigs.stores.host_pools import make_device_pool, make_host_pool
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool, PagedDevicePool
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.device.mla_pool import MLATokenToKVPool
from sglang.srt.mem_cache.host.copy_runs import CopyGrids, CopyRuns, PartRows, part_rows
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.host.pool_kinds import MLATokenToKVPoolHost

LAYERS = 3
ROW = 2 * 4 * 2  # heads, dim, bf16
LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_first_kv_split"]


def unlike_heads(seed: int = 0) -> PagedDevicePool:
    return make_device_pool(v_head_dim=6, seed=seed)


KINDS = [make_device_pool, unlike_heads, make_mla_pool]


def host_of(device: PagedDevicePool, layout: str) -> HostKVCache:
    if isinstance(device, MLATokenToKVPool):
        return MLATokenToKVPoolHost.make(device, page_num=32, layout=layout)
    assert isinstance(device, MHATokenToKVPool)
    return make_host_pool(device, layout)


def parts_of(host: HostKVCache, device: BaseDevicePool) -> list[PartRows]:
    pools = host._paired_with(device)
    return [part_rows(*part) for part in zip(pools.host, pools.device, strict=True)]


def do(runs: CopyRuns) -> None:
    for numbers in (runs.destinations, runs.sources, runs.sizes):
        assert numbers.flags.c_contiguous, "the driver reads one number after the other"
    for to, source, size in zip(
        runs.destinations.tolist(), runs.sources.tolist(), runs.sizes.tolist(), strict=True
    ):
        ctypes.memmove(to, source, size)


def do_grids(grids: list[CopyGrids]) -> None:
    for grid in grids:
        for source, to in zip(grid.sources.tolist(), grid.destinations.tolist(), strict=True):
            for run in range(grid.runs):
                begin = source + run * grid.source_stride
                ctypes.memmove(to + run * grid.destination_stride, begin, grid.run_bytes)
