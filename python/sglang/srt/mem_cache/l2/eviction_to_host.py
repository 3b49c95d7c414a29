"""Eviction from L1 with L2 below it: pages and states leave for the host, or are dropped.

Threads: the scheduler's only.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from sglang.srt.mem_cache.tree.hicache_metrics import Decision
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from sglang.srt.mem_cache.l2.cache_controller import HiCacheController
    from sglang.srt.mem_cache.l2.host_backup import HostBackup
    from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
    from sglang.srt.mem_cache.tree.pool_tier import DeviceTier
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree

logger = logging.getLogger(__name__)


class _Leaving:
    """Nodes written back in one round of an eviction, and the device slots that they leave."""

    def __init__(self) -> None:
        self.nodes: list[TreeNode] = []
        self.slots: dict[DeviceTier, list[torch.Tensor]] = {}

    def take_off(self, tier: DeviceTier, node: TreeNode) -> None:
        """Take the slots of `node` off the device; they are freed after the copy."""
        self.slots.setdefault(tier, []).append(tier.take_off(node))

    def count(self, tier: DeviceTier) -> int:
        """Slots of `tier` that are freed after the copies."""
        return sum(map(len, self.slots.get(tier, ())))


class EvictionToHost:
    """Evicts from L1. Slots with a host copy leave it; others are written back or dropped.

    Args:
        backup: Copies pages to the host; its write policy says whether eviction does.
    """

    def __init__(
        self,
        tree: PrefixTree,
        controller: HiCacheController,
        backup: HostBackup,
        metrics: HiCacheMetrics,
    ) -> None:
        self._tree = tree
        self._controller = controller
        self._backup = backup
        self._metrics = metrics
        self._log = RateLimitedLogger(logger)

    def evict(self, tier: DeviceTier, num: int) -> int:
        """Free at least `num` slots of `tier` if possible; return the freed slots.

        Under `write_back` the call waits for the copies of leaves, so that their slots are free on
        return. A state without a host copy that is not of a leaf is lost.
        """
        freed = 0
        while freed < num and (more := self._evict_round(tier, num - freed)):
            freed += more
        return freed

    def _evict_round(self, tier: DeviceTier, num: int) -> int:
        """Free the slots that can be freed now: a node above one that is being written back must
        wait."""
        before = tier.pool.available_size()
        leaving = _Leaving()
        kept: list[TreeNode] = []
        freed = 0
        while freed < num and (node := tier.next_to_leave(num - freed)) is not None:
            if not self._leave(tier, node, leaving):
                kept.append(node)
            freed = tier.pool.available_size() - before + leaving.count(tier)
        self._finish_write_back(leaving)
        for node in kept:
            tier.heap.offer(node)
        return tier.pool.available_size() - before

    def _leave(self, tier: DeviceTier, node: TreeNode, leaving: _Leaving) -> bool:
        """Take the slots of `node`, and what cannot be without them, off the device. False: they
        stay."""
        is_leaf = node.lock_ref == 0 and node.device_children == 0
        are_pages = tier is self._tree.device
        if self._backup.write_policy == "write_back":
            is_owed = node.has_unsaved_state or not node.backuped
        else:
            # The children have host pages, so the node stays in the tree.
            is_owed = are_pages and bool(node.children) and not node.backuped
            is_owed = is_owed and not self._tree.host_is_buffer
        if is_leaf and is_owed and self._write_back(node, leaving):
            return True
        if are_pages and not node.backuped:
            return self._drop(node)
        # If no tier has its state then, the node goes with its last child or pin.
        tier.drop(node)
        self._tree.prune(node)
        if are_pages and node.parent is None:
            self._note_lost(len(node.key))
        return True

    def _write_back(self, node: TreeNode, leaving: _Leaving) -> bool:
        """Queue the copy of a node, and take the node off the device."""
        # Eviction from the host must not evict the node itself.
        self._tree.host.pin(node)
        copy = self._backup.queue_copy(node)
        if copy is None and node.children:
            copy = self._backup.queue_copy(node, with_states=False)
        if copy is None:
            self._tree.host.release(node)
            return False
        # Set before the bytes land. No reader sees that, since `evict` waits for them.
        if not node.backuped:
            self._tree.host.put(node, copy.host_indices, is_stored=True)
        for component, slot in copy.host_states.items():
            component.host.put(node, slot)
            leaving.take_off(component.device, node)
        leaving.take_off(self._tree.device, node)
        leaving.nodes.append(node)
        return True

    def _finish_write_back(self, leaving: _Leaving) -> None:
        """Wait for the copies, and free their device slots."""
        if not leaving.nodes:
            return
        self._controller.start_writing(is_urgent=True)
        self._controller.ack_write_queue[-1].finish_event.synchronize()
        for ack in self._controller.ack_write_queue:
            self._controller.keep_checksums(ack)
        for tier, slots in leaving.slots.items():
            tier.free(torch.cat(slots))
        for node in leaving.nodes:
            self._tree.host.unpin(node)
        # Leaves were taken first; L3 needs parents first.
        self._backup.on_landed([node for node in leaving.nodes[::-1] if node.is_in_tree])

    def _drop(self, node: TreeNode) -> bool:
        """Delete a node without host pages, and the host pages below it. False: a node below is
        pinned, and the node stays. From a buffer it leaves: writes to L3, which may hang, keep
        their host pages alone."""
        below = [node]
        for at in below:
            below.extend(at.children.values())
        lost = sum(len(at.key) for at in below)
        if self._tree.host_is_buffer:
            lost = 0 if self._backup.is_saved(node) else len(node.key)
            for child in list(node.children.values()):
                self._tree.condemn(child, 0)
            below = [node]
        elif any(at.host_ref_counter for at in below):
            return False
        self._tree.device.drop(node)
        for at in reversed(below):
            self._tree.host.drop(at)
            self._tree.prune(at)
        if lost:
            self._note_lost(lost)
        return True

    def _note_lost(self, tokens: int) -> None:
        self._metrics.dropped.labels("unwritten").inc(tokens)
        self._metrics.decisions.note(Decision.DROPPED, "no copy in L2", tokens)
        self._log.info("drop", "%d tokens left L1 without a copy in L2", tokens)
