"""Eviction from L1 with L2 below it: pages and states leave for the host, or are dropped.

Threads: the scheduler's only.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sglang.srt.mem_cache.tree.device_eviction import DeviceEviction
from sglang.srt.mem_cache.tree.radix_cache import states_of
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from sglang.srt.mem_cache.l2.cache_controller import HiCacheController
    from sglang.srt.mem_cache.l2.host_backup import HostBackup
    from sglang.srt.mem_cache.l2.host_pages import HostPages
    from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Leaving:
    """Nodes written back in one round of an eviction, and the device slots that they leave."""

    nodes: list[TreeNode] = field(default_factory=list)
    slots: list[torch.Tensor] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)


class EvictionToHost(DeviceEviction):
    """Evicts from L1. Pages with a host copy leave it; others are written back or dropped.

    Args:
        tree: Tree of the nodes.
        host: Books of L2.
        controller: Controller of copies.
        backup: Copies pages to the host; its write policy says whether eviction does.
        metrics: Metrics of the tiers.
    """

    def __init__(
        self,
        tree: PrefixTree,
        host: HostPages,
        controller: HiCacheController,
        backup: HostBackup,
        metrics: HiCacheMetrics,
    ) -> None:
        super().__init__(tree, states_of(tree))
        self._host = host
        self._controller = controller
        self._backup = backup
        self._metrics = metrics
        self._say = RateLimitedLogger(logger)

    def evict(self, num_tokens: int) -> int:
        """Free at least `num_tokens` device slots if possible; return the freed tokens.

        Pages with a host copy leave L1; others are dropped or written back. Under `write_back` the
        call waits for those copies, so that the slots are free on return.
        """
        freed = 0
        while freed < num_tokens:
            more = self._evict_round(num_tokens - freed)
            freed += more
            if not more:
                break
        self._metrics.evicted.labels("device").inc(freed)
        return freed

    def _evict_round(self, num_tokens: int) -> int:
        """Free the slots that can be freed now: a node above one that is being written back must
        wait."""
        tree = self._tree
        freed = 0
        leaving = _Leaving()
        kept: list[TreeNode] = []
        while freed < num_tokens and (node := tree.device_heap.pop()) is not None:
            left = self._leave(node, leaving)
            freed += left
            if not left:
                kept.append(node)
        self._finish_write_back(leaving)
        for node in kept:
            tree.device_heap.offer(node)
        return freed

    def _leave(self, node: TreeNode, leaving: _Leaving) -> int:
        """Take a leaf of the device off it, with its state; return the freed device tokens. 0: it
        stays."""
        lacks_state = self._backup.lacks_host_state(node)
        if self._backup.write_policy == "write_back":
            is_owed = lacks_state or not node.backuped
        else:
            # Its children have host pages, so that it is kept.
            is_owed = bool(node.children) and not node.backuped
        if is_owed and self._write_back(node, leaving):
            return len(node.key)
        return self._leave_to_host(node) if node.backuped else self._drop(node)

    def _leave_to_host(self, node: TreeNode) -> int:
        """Take a node with host pages off the device, with its state; return the freed device
        tokens. If no tier has its state then, the node goes with its last child or pin."""
        freed = len(node.key)
        self._tree.free_slots(self._tree.take_off_device(node))
        self._host.offer([node])
        if self._states is not None:
            freed += self._tree.prune(node)
        if node.parent is None:
            self._note_lost(len(node.key))
        return freed

    def _write_back(self, node: TreeNode, leaving: _Leaving) -> bool:
        """Queue the copy of a node, and take the node off the device."""
        # Eviction from the host must not evict the node itself.
        node.protect_host()
        operation = self._backup.queue_copy(node)
        if operation is None and node.children:
            operation = self._backup.queue_copy(node, with_state=False)
        if operation is None:
            node.release_host()
            return False
        # Set before the bytes land. No reader sees that, since `evict` waits for them.
        if not node.backuped:
            node.set_host_value(operation.host_indices)
        host_state = self._backup.host_state(operation)
        if host_state is not None:
            assert self._host.states is not None and self._states is not None
            self._host.states.put(node, host_state)
            leaving.states.append(self._states.take_off_device(node))
        leaving.slots.append(self._tree.take_off_device(node))
        leaving.nodes.append(node)
        return True

    def _finish_write_back(self, leaving: _Leaving) -> None:
        """Wait for the copies, and free their device slots."""
        if not leaving.nodes:
            return
        self._controller.start_writing(is_urgent=True)
        self._controller.ack_write_queue[-1].finish_event.synchronize()
        self._tree.free_slots(torch.cat(leaving.slots))
        for slot in leaving.states:
            assert self._states is not None
            self._states.pool.free(slot)
        for node in leaving.nodes:
            self._host.unpin(node)
        # Leaves were taken first; L3 needs parents first.
        self._backup.tell_landed([node for node in leaving.nodes[::-1] if node.parent is not None])

    def evict_states(self, num: int) -> int:
        """Free `num` states on the device if there are enough candidates; return the freed states.

        A state without a host copy is lost, and nodes that become useless are deleted. But under
        `write_back` a leaf leaves the device with its pages, and is written back.
        """
        states = self._states
        assert states is not None, "this model has no states"
        writes_back = self._backup.write_policy == "write_back"
        freed = 0
        leaving = _Leaving()
        while freed < num and (node := states.heap.pop()) is not None:
            freed += 1
            is_leaf = node.lock_ref == 0 and node.device_children == 0
            is_owed = writes_back and self._backup.lacks_host_state(node)
            if is_leaf and is_owed and self._write_back(node, leaving):
                continue
            states.pool.free(states.take_off_device(node))
            self._tree.prune(node)
        self._finish_write_back(leaving)
        return freed

    def _drop(self, node: TreeNode) -> int:
        """Delete a node without a host copy, and the host pages below it; return the freed device
        tokens.

        0: a node below is pinned, and the node stays.
        """
        below = [node]
        for at in below:
            below.extend(at.children.values())
        if any(at.host_ref_counter for at in below):
            return 0
        above = node.parent
        assert above is not None
        value = self._tree.take_off_device(node)
        self._tree.free_slots(value)
        for at in reversed(below):
            self._host.forget(at)
            self._tree.delete(at)
        if self._states is not None:
            self._tree.prune(above)
        self._note_lost(sum(len(at.key) for at in below))
        return len(value)

    def _note_lost(self, tokens: int) -> None:
        self._metrics.dropped.labels("unwritten").inc(tokens)
        self._say.info("drop", "%d tokens left L1 without a copy in L2", tokens)
