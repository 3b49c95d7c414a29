"""Free slots that hold no numbers, so that a read of a slot without an owner shows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Protocol

import torch

from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool, PagedDevicePool
from sglang.srt.mem_cache.device.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.device.request_pool import RequestPool

_NAN_BYTE = 0xFF
"""Each float type, fp8 too, reads bytes of ones as NaN."""


class _Owner(Protocol):
    """A runner or its worker."""

    token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator
    req_to_token_pool: ReqToTokenPool


def poison_free(pools: Iterable[BaseDevicePool], owner: _Owner) -> None:
    """Fill all free pages, states and rows of requests with NaN, between two steps. Does nothing on
    a GPU, whose last step may still run."""
    rows = owner.req_to_token_pool
    if rows.device.type != "cpu":
        return
    pages = torch.cat(list(owner.token_to_kv_pool_allocator.free_page_ids()))
    free_states = () if rows.mamba_pool is None else rows.mamba_pool.free_page_ids()
    for pool in pools:
        if isinstance(pool, PagedDevicePool):
            fill_with_nan(pool, pages, pool.page_items)
        elif isinstance(pool, RequestPool):
            fill_with_nan(pool, torch.tensor(rows._free_rows, dtype=torch.int64), 1)
        else:
            for states in free_states:
                fill_with_nan(pool, states, 1)  # All pools of states share their slots.


def fill_with_nan(pool: BaseDevicePool, ids: torch.Tensor, items: int) -> None:
    """Fill pages, states or rows with NaN.

    Args:
    ids: int64 `[n]`: pages of `items` items.
    """
    for layer in itertools.chain(*pool.parts):
        raw = layer.view(len(layer) // items, -1).view(torch.uint8)
        raw.index_fill_(0, ids, _NAN_BYTE)
