"""Flow from L2 to L1: copies host pages that a request needs to device slots.

Threads: the scheduler's only.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.l2.device_copy import DeviceCopy, num_reached
from sglang.srt.mem_cache.tree.base_prefix_cache import InitLoadBackParams
from sglang.srt.mem_cache.tree.radix_cache import states_of
from sglang.srt.mem_cache.tree.tier_flow import TierFlow
from sglang.srt.mem_cache.tree.tree_node import TreeNode, parts_of
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from sglang.srt.mem_cache.l2.cache_controller import HiCacheController
    from sglang.srt.mem_cache.l2.host_pages import HostPages
    from sglang.srt.mem_cache.tree.ballot import Progress
    from sglang.srt.mem_cache.tree.device_eviction import DeviceEviction
    from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree

logger = logging.getLogger(__name__)


class HostLoad(TierFlow):
    """Loads of one tree.

    While a load runs, its device pages are locked and its host pages are pinned. The state at the
    end of the prefix is loaded with the pages, or alone if they are on the device.

    Args:
        tree: Tree of the nodes.
        host: Books of L2.
        controller: Controller of copies.
        eviction: Eviction from L1, which makes room.
        metrics: Metrics of the tiers.
    """

    def __init__(
        self,
        tree: PrefixTree,
        host: HostPages,
        controller: HiCacheController,
        *,
        eviction: DeviceEviction,
        metrics: HiCacheMetrics,
    ) -> None:
        self._tree = tree
        self._states = states_of(tree)
        self._host = host
        self._controller = controller
        self._eviction = eviction
        self._metrics = metrics
        self._say = RateLimitedLogger(logger)
        self._loading: dict[int, DeviceCopy] = {}

    def busy(self) -> dict[str, int]:
        return {"loads": len(self._loading)} if self._loading else {}

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, TreeNode]:
        """See `BasePrefixCache.init_load_back`."""
        chain: list[TreeNode] = []
        node = params.best_match_node
        while node.value is None and node.parent is not None:
            chain.append(node)
            node = node.parent
        above = node
        chain.reverse()
        quota = params.mem_quota
        while chain and not self._is_usable(chain, quota):
            chain.pop()
        last = chain[-1] if chain else above
        needs_state = self._states is not None and last.has_state and last.mamba_value is None
        slots = None
        if (chain or needs_state) and not (needs_state and params.mamba_quota == 0):
            slots = self._load(chain, last, above, needs_state=needs_state)
        if slots is None:
            return self._tree.values_of([]), self._end_on_device(above)
        return slots, last

    def _is_usable(self, chain: list[TreeNode], quota: int | None) -> bool:
        """Whether a prefix may end with `chain`, whose tokens must not exceed `quota`."""
        if self._states is not None and not chain[-1].has_state:
            return False
        return quota is None or sum(len(node.key) for node in chain) <= quota

    def _end_on_device(self, node: TreeNode) -> TreeNode:
        """The last node up to `node` at which a prefix may end now. `node` is on the device."""
        while self._states is not None and node.parent is not None and node.mamba_value is None:
            node = node.parent
        return node

    def _load(
        self, chain: list[TreeNode], last: TreeNode, above: TreeNode, *, needs_state: bool
    ) -> torch.Tensor | None:
        """Queue a load of pages, a state or both; return its device slots, empty if only the state
        is loaded. None: there is no room.

        Args:
            chain: The nodes whose pages are loaded, from the top; may be empty.
            last: The end of the prefix.
            above: The last node on the device before `chain`.
            needs_state: Whether the state of `last` is loaded.
        """
        pinned = chain or [last]
        for node in pinned:
            node.protect_host()
        reserved = self._reserve(sum(len(node.key) for node in chain), above, needs_state)
        if reserved is None:
            for node in pinned:
                self._host.unpin(node)
            return None
        slots, state = reserved
        hosts = [node.host_value for node in chain if node.host_value is not None]
        extra = [] if state is None else [self._state_transfer(last, state)]
        none = torch.empty(0, dtype=torch.int64)
        operation = self._controller.load(torch.cat(hosts) if hosts else none, slots, extra)
        done = 0
        for node in chain:
            self._tree.put_on_device(node, slots[done : done + len(node.key)].clone())
            done += len(node.key)
        self._tree.lock(last)
        if state is not None and self._states is not None:
            self._states.put_on_device(last, state)
            self._states.lock(last)
        length = sum(len(node.key) for node in pinned)
        self._loading[operation.operation_id] = DeviceCopy(
            last, length, operation.host_indices, last.mamba_host_value if extra else None
        )
        self._metrics.load_back.inc(done)
        return slots

    def _state_transfer(self, node: TreeNode, slot: torch.Tensor) -> PoolTransfer:
        assert self._states is not None and node.mamba_host_value is not None
        return self._states.transfer(node.mamba_host_value, slot)

    def _reserve(
        self, tokens: int, above: TreeNode, needs_state: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Allocate device slots for pages, and one for a state if needed; None: no room for
        both."""
        # The eviction must not take the nodes to load or their ancestors.
        self._tree.lock(above)
        state = self._alloc_state() if needs_state else None
        allocator = self._tree.allocator
        missing = tokens - allocator.available_size()
        if missing > 0:
            self._eviction.evict(missing)
        slots = None
        if state is not None or not needs_state:
            slots = allocator.alloc(tokens)
        self._tree.unlock(above)
        if slots is not None:
            return slots, state
        if state is not None and self._states is not None:
            self._states.pool.free(state)
        self._say.info("l1-full", "no room in L1 to load %d tokens back from L2", tokens)
        return None

    def _alloc_state(self) -> torch.Tensor | None:
        """A free slot for a state on the device, int64 `[1]` on the CPU; evicts for it."""
        assert self._states is not None
        pool = self._states.pool
        if not pool.available_size():
            self._eviction.evict_states(1)
        taken = pool.take(1)
        return None if taken is None else torch.tensor(taken)

    def report(self, progress: Progress) -> None:
        progress.loads = num_reached(self._controller.ack_load_queue)

    def act_on(self, agreed: Progress) -> None:
        for _ in range(agreed.loads):
            ack = self._controller.ack_load_queue.popleft()
            self._metrics.load_back_seconds.observe(time.monotonic() - ack.started)
            for operation_id in ack.operation_ids:
                self._settle(self._loading.pop(operation_id))

    def _settle(self, copy: DeviceCopy) -> None:
        if copy.host_state is not None and self._states is not None:
            self._states.unlock(copy.node)
        for node, _, _ in parts_of(copy.node, copy.length):
            self._host.unpin(node)
        self._tree.unlock(copy.node)
