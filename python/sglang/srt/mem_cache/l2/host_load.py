"""Flow from L2 to L1: copies host pages that a request needs to device slots.

Threads: the scheduler's only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import torch

from sglang.srt.mem_cache.l2.device_copy import DeviceCopy, num_reached
from sglang.srt.mem_cache.tree.base_prefix_cache import InitLoadBackParams
from sglang.srt.mem_cache.tree.tier_flow import TierFlow
from sglang.srt.mem_cache.tree.tree_node import TreeNode, parts_of
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from sglang.srt.mem_cache.l2.cache_controller import HiCacheController
    from sglang.srt.mem_cache.tree.component import TreeComponent
    from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
    from sglang.srt.mem_cache.tree.pool_tier import DeviceTier
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree
    from sglang.srt.mem_cache.tree.tick_sync import Progress

logger = logging.getLogger(__name__)


class HostLoad(TierFlow):
    """Loads of one tree.

    While a load runs, its device pages are locked and its host pages are pinned. States at the end
    of the prefix are loaded with the pages, or alone if they are on the device.

    Args:
        tree: Tree of the nodes.
        controller: Controller of copies.
        evict_from: Frees slots of a pool in L1: at least so many if possible, and returns how many.
        metrics: Metrics of the tiers.
    """

    def __init__(
        self,
        tree: PrefixTree,
        controller: HiCacheController,
        *,
        evict_from: Callable[[DeviceTier, int], int],
        metrics: HiCacheMetrics,
    ) -> None:
        self._tree = tree
        self._controller = controller
        self._evict_from = evict_from
        self._metrics = metrics
        self._log = RateLimitedLogger(logger)
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
        while chain and not self._may_end(chain, params.mem_quota):
            chain.pop()
        last = chain[-1] if chain else above
        missing = {
            component: slot
            for component in self._tree.components
            if component.of(last).value is None
            and (slot := component.of(last).host_value) is not None
        }
        slots = None
        if (chain or missing) and not (missing and params.mamba_quota == 0):
            slots = self._load(chain, last, above, missing)
        if slots is None:
            return self._tree.values_of([]), self._end_on_device(above)
        return slots, last

    def _may_end(self, chain: list[TreeNode], quota: int | None) -> bool:
        """True if a prefix may end with `chain`, whose tokens must not exceed `quota`."""
        fits = quota is None or sum(len(node.key) for node in chain) <= quota
        return fits and self._tree.can_end(chain[-1])

    def _end_on_device(self, node: TreeNode) -> TreeNode:
        """The last node up to `node` at which a prefix may end now. `node` is on the device."""
        while node.parent is not None and any(state.value is None for state in node.states):
            node = node.parent
        return node

    def _load(
        self,
        chain: list[TreeNode],
        last: TreeNode,
        above: TreeNode,
        missing: Mapping[TreeComponent, torch.Tensor],
    ) -> torch.Tensor | None:
        """Queue a load of pages, states or both; return its device slots, empty if only states are
        loaded. None: there is no room.

        Args:
            chain: The nodes whose pages are loaded, from the top; may be empty.
            last: The end of the prefix.
            above: The last node on the device before `chain`.
            missing: Host slots of the states of `last` that are loaded, by kind.
        """
        pinned = chain or [last]
        for node in pinned:
            node.protect_host()
        reserved = self._reserve(sum(len(node.key) for node in chain), above, missing)
        if reserved is None:
            for node in pinned:
                self._tree.host.unpin(node)
            return None
        slots, states = reserved
        none = torch.empty(0, dtype=torch.int64)
        hosts = [none, *(node.host_value for node in chain if node.host_value is not None)]
        extra = [component.transfer(slot, states[component]) for component, slot in missing.items()]
        operation = self._controller.load(torch.cat(hosts), slots, extra)
        done = 0
        for node in chain:
            self._tree.device.put(node, slots[done : done + len(node.key)].clone())
            done += len(node.key)
        self._tree.lock(last)
        for component, slot in states.items():
            component.device.put(last, slot)
            component.device.lock(last)
        length = sum(len(node.key) for node in pinned)
        copy = DeviceCopy(last, length, operation.host_indices, missing)
        self._loading[operation.operation_id] = copy
        self._metrics.load_back.inc(done)
        return slots

    def _reserve(
        self, tokens: int, above: TreeNode, missing: Collection[TreeComponent]
    ) -> tuple[torch.Tensor, dict[TreeComponent, torch.Tensor]] | None:
        """Allocate device slots for pages, and for the states of `missing`; None: no room for all
        of them."""
        # The eviction must not take the nodes to load or their ancestors.
        self._tree.lock(above)
        states = {}
        for component in missing:
            if (slot := self._alloc_state(component)) is not None:
                states[component] = slot
        short = tokens - self._tree.allocator.available_size()
        if short > 0:
            self._evict_from(self._tree.device, short)
        slots = self._tree.allocator.alloc(tokens) if len(states) == len(missing) else None
        self._tree.unlock(above)
        if slots is not None:
            return slots, states
        for component, slot in states.items():
            component.device.free(slot)
        self._log.info("l1-full", "no room in L1 to load %d tokens back from L2", tokens)
        return None

    def _alloc_state(self, component: TreeComponent) -> torch.Tensor | None:
        """A free device slot for a state, int64 `[1]` on the CPU; evicts for it."""
        if not component.pool.available_size():
            self._evict_from(component.device, 1)
        taken = component.pool.take(1)
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
        for component in copy.host_states:
            component.device.unlock(copy.node)
        for node, _, _ in parts_of(copy.node, copy.length):
            self._tree.host.unpin(node)
        self._tree.unlock(copy.node)
