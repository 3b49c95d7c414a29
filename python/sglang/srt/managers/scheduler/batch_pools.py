"""The pools from which batches get rows and slots, and to which ended requests return theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang.srt.hardware_backend.device_runtime import device_runtime, on_device
from sglang.srt.managers.scheduler.policy import ceil_to_page
from sglang.srt.managers.scheduler.requests.req import Req
from sglang.srt.managers.scheduler.requests.slots import NO_SLOTS

if TYPE_CHECKING:
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.device.memory_pool import KVCache, ReqToTokenPool
    from sglang.srt.mem_cache.tree.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.tree.radix_key import TokenArray


@dataclass(slots=True, kw_only=True)
class BatchPools:
    """Pools from which batches get their rows and slots."""

    req_to_token_pool: ReqToTokenPool
    allocator: BaseTokenToKVPoolAllocator
    token_to_kv_pool: KVCache
    device: torch.device

    def int64(self, values: Sequence[int]) -> torch.Tensor:
        """`values` as an int64 tensor on the device, in order with the current stream."""
        return on_device(values, self.device, torch.int64)

    def columns(self, *columns: Sequence[int] | TokenArray) -> tuple[torch.Tensor, ...]:
        """Each column as `int64` gives it, all in one upload: on a GPU each upload costs the CPU
        0.05 ms. The tensors share memory and must not be written to."""
        ids = np.concatenate([np.asarray(column, dtype=np.int64) for column in columns])
        lengths = [len(column) for column in columns]
        staged = device_runtime(self.device).stage_to_device(torch.from_numpy(ids))
        return tuple(staged.split_with_sizes(lengths))


def release_slots(req: Req, tree: BasePrefixCache, pools: BatchPools) -> None:
    """Give back all that a request holds on the device. The tree gets its slots (the slots of a
    probe are freed), the pool gets its row.

    Slots of a decode step in flight are freed too. That is no race: their next use is queued behind
    that step.
    """
    rows, allocator = pools.req_to_token_pool, pools.allocator
    slots, progress = req.slots, req.progress
    begin = ceil_to_page(progress.kv_committed_len, allocator.page_size)
    end = progress.next_seq_len
    if begin < end:
        allocator.free_in_order(rows.req_to_token[slots.row, begin:end].to(torch.int64))
    tree.cache_finished_req(slots, is_insert=not req.is_probe)
    rows.free(slots)
    slots.history.forget()
    progress.kv_committed_len = 0
    slots.prefix_indices = NO_SLOTS
