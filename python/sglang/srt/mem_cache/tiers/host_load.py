"""L2 to L1: host pages that a request needs get device slots and are copied there.

Threads: the scheduler's only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglang.srt.mem_cache.tiers.device_copy import DeviceCopy, num_reached
from sglang.srt.mem_cache.tree.base_prefix_cache import InitLoadBackParams
from sglang.srt.mem_cache.tree.tier_flow import TierFlow
from sglang.srt.mem_cache.tree.tree_node import TreeNode, parts_of
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hybrid_cache.cache_controller import HiCacheController
    from sglang.srt.mem_cache.tiers.host_pages import HostPages
    from sglang.srt.mem_cache.tree.ballot import Progress
    from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree

logger = logging.getLogger(__name__)


class HostLoad(TierFlow):
    """Loads of one tree.

    While a load runs, its device pages are locked and its host pages are pinned.

    Args:
        tree: Whose nodes.
        host: L2's books.
        controller: Copies.
        evict: Frees device slots, at least as many tokens as asked for if it can.
        metrics: Counts what happened.
    """

    def __init__(
        self,
        tree: PrefixTree,
        host: HostPages,
        controller: HiCacheController,
        *,
        evict: Callable[[int], int],
        metrics: HiCacheMetrics,
    ) -> None:
        self._tree = tree
        self._host = host
        self._controller = controller
        self._evict = evict
        self._metrics = metrics
        self._say = RateLimitedLogger(logger)
        self._loading: dict[int, DeviceCopy] = {}

    def busy(self) -> dict[str, int]:
        return {"loads": len(self._loading)} if self._loading else {}

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, TreeNode]:
        """As `BasePrefixCache.init_load_back`."""
        chain: list[TreeNode] = []
        node = params.best_match_node
        while node.value is None and node.parent is not None:
            chain.append(node)
            node = node.parent
        above = node
        chain.reverse()
        if params.mem_quota is not None:
            while chain and sum(len(n.key) for n in chain) > params.mem_quota:
                chain.pop()
        slots = self._reserve(chain, above)
        if slots is None:
            return self._tree.values_of([]), above
        hosts = [n.host_value for n in chain if n.host_value is not None]
        operation = self._controller.load(torch.cat(hosts), slots)
        done = 0
        for node in chain:
            self._tree.put_on_device(node, slots[done : done + len(node.key)].clone())
            done += len(node.key)
        last = chain[-1]
        self._tree.lock(last)
        self._loading[operation.operation_id] = DeviceCopy(last, done, operation.host_indices)
        self._metrics.load_back.inc(done)
        return slots, last

    def _reserve(self, chain: list[TreeNode], above: TreeNode) -> torch.Tensor | None:
        """Device slots for `chain`, whose host pages stay pinned; None: nothing or no room."""
        if not chain:
            return None
        needed = sum(len(node.key) for node in chain)
        for node in chain:
            node.protect_host()
        # Evicting to make room must not take what the chain hangs on.
        self._tree.lock(above)
        allocator = self._tree.allocator
        missing = needed - allocator.available_size()
        if missing > 0:
            self._evict(missing)
        slots = allocator.alloc(needed)
        self._tree.unlock(above)
        if slots is None:
            for node in chain:
                self._host.unpin(node)
            self._say.info("l1-full", "no room in L1 to load %d tokens back from L2", needed)
        return slots

    def report(self, progress: Progress) -> None:
        progress.loads = num_reached(self._controller.ack_load_queue)

    def act_on(self, agreed: Progress) -> None:
        for _ in range(agreed.loads):
            ack = self._controller.ack_load_queue.popleft()
            self._metrics.load_back_seconds.observe(time.monotonic() - ack.started)
            for operation_id in ack.operation_ids:
                self._settle(self._loading.pop(operation_id))

    def _settle(self, copy: DeviceCopy) -> None:
        for node, _, _ in parts_of(copy.node, copy.length):
            self._host.unpin(node)
        self._tree.unlock(copy.node)
