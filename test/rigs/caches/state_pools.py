"""Two device pools with slots of their own and the tiers below them, without a tree.

KV in layers 0 to 2; states, one mark per layer, in layers 1 and 3 of four.
"""

from __future__ import annotations

import torch

from rigs.caches.marks_pool import MarksPool, prefix_marks
from rigs.stores.host_pools import PAGE, make_device_pool
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.device.pool_registry import ModelPools
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_stack
from sglang.srt.mem_cache.l2.cache_controller import HiCacheController

TRAILING = PoolHitPolicy.TRAILING_PAGES


class StatePools:
    """One engine's pools of both kinds, and the controller of their copies."""

    def __init__(self) -> None:
        self.kv = make_device_pool()
        self.states = MarksPool(prefix_marks(1, 3), 6, 1)
        pools = ModelPools.of([self.kv, self.states], 4)
        io_backend, self.group = build_kv_host_stack(
            pools, ratio=2.0, size_gb=0, io_backend="auto", layout="auto", has_storage=True
        )
        self.controller = HiCacheController(
            PagedTokenToKVPoolAllocator(self.kv.size, PAGE, self.kv.dtype, "cpu", self.kv),
            self.group,
            PAGE,
            io_backend=io_backend,
        )
        self.state_host = self.group.get_pool(PoolName.MAMBA)
        self.states.marks[:, 5] = torch.tensor([50, 51])

    def state(self, slot: int = 5) -> PoolTransfer:
        """The state in a device slot, to be written."""
        device = torch.tensor([slot])
        return PoolTransfer(PoolName.MAMBA, device_indices=device, hit_policy=TRAILING)

    def finish_copies(self) -> None:
        """Wait for all copies under way."""
        controller = self.controller
        for acks in (controller.ack_write_queue, controller.ack_load_queue):
            while acks:
                acks.popleft().finish_event.synchronize()
