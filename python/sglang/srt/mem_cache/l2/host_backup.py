"""Flow from L1 to L2: copies pages to the host.

Threads: the scheduler's only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import torch

from sglang.srt.mem_cache.l2.device_copy import DeviceCopy, num_reached
from sglang.srt.mem_cache.tree.tier_flow import TierFlow
from sglang.srt.mem_cache.tree.tree_node import TreeNode, parts_of
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from sglang.srt.mem_cache.l2.cache_controller import (
        CacheOperation,
        HiCacheController,
    )
    from sglang.srt.mem_cache.tree.component import TreeComponent
    from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
    from sglang.srt.mem_cache.tree.pool_tier import PoolTier
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree
    from sglang.srt.mem_cache.tree.tick_sync import Progress

logger = logging.getLogger(__name__)

WRITE_POLICIES: Final = ("write_through", "write_through_selective", "write_back")
_SELECTIVE_HITS: Final = 2


class HostBackup(TierFlow):
    """Copies of one tree's pages to the host.

    - A node's host pages are set when their bytes have landed, never before.
    - While a copy runs, its device pages are locked and the operation owns its host pages.
    - States of a node go in the same copy as its pages, or alone if the pages are on the host
      already.

    Args:
        tree: Tree of the nodes.
        controller: Controller of copies.
        write_policy: One of `WRITE_POLICIES`.
        metrics: Metrics of the tiers.
        below: Flows that are notified of pages that have landed on the host.
    """

    def __init__(
        self,
        tree: PrefixTree,
        controller: HiCacheController,
        *,
        write_policy: str,
        metrics: HiCacheMetrics,
        below: Sequence[TierFlow] = (),
    ) -> None:
        self.write_policy = write_policy
        self._tree = tree
        self._controller = controller
        self._metrics = metrics
        self._below = below
        self._log = RateLimitedLogger(logger)
        self._writing: dict[int, DeviceCopy] = {}

    def busy(self) -> dict[str, int]:
        # A copy keeps its place in the queue even if an eviction has settled its pages.
        writes = len(self._writing) or len(self._controller.ack_write_queue)
        return {"writes": writes} if writes else {}

    def owned_slots(self) -> Iterator[tuple[PoolTier, str, torch.Tensor]]:
        for operation_id, copy in self._writing.items():
            owner = f"write {operation_id}"
            yield self._tree.host, owner, copy.host_indices
            for component, slots in copy.host_states.items():
                yield component.host, owner, slots

    # ---- copies ----------------------------------------------------------------------------

    def on_insert(self, path: list[TreeNode]) -> None:
        if self.write_policy == "write_back":
            return
        wanted = 1 if self.write_policy == "write_through" else _SELECTIVE_HITS
        for node in path:
            if node.backuped and (wanted == 1 or node.hit_count >= wanted):
                self._save_states(node)
            if node.backuped or node.write_id is not None:
                continue
            # Top down, up to the first node that is not written: a written node has written
            # ancestors.
            if (wanted > 1 and node.hit_count < wanted) or not self.write(node):
                break

    def write(self, node: TreeNode) -> bool:
        """Queue the copy of a node and its states to the host; False if L2 has no room for it."""
        operation = self.queue_copy(node)
        if operation is None:
            is_pages = self._tree.host.pool.available_size() < len(node.key)
            self._log.warning(
                "l2-full" if is_pages else "l2-states-full",
                "L2 is full of %s in use; %d tokens stay without a copy",
                "pages" if is_pages else "states",
                len(node.key),
            )
            return False
        node.write_id = operation.operation_id
        self._begin(node, operation)
        return True

    def _save_states(self, node: TreeNode) -> None:
        """Queue the copy of states whose pages are on the host already, if L2 has room for them."""
        if not node.has_unsaved_state or any(state.lock_ref for state in node.states):
            return
        node.protect_host()
        operation = self.queue_copy(node)
        if operation is None:
            self._tree.host.unpin(node)
            self._log.warning(
                "l2-states-full",
                "L2 is full of states in use; the state behind %d tokens stays without a copy",
                node.depth,
            )
            return
        self._begin(node, operation)

    def _begin(self, node: TreeNode, operation: CacheOperation) -> None:
        """Lock the pages and the states that `operation` copies."""
        self._tree.lock(node)
        states = self.host_states(operation)
        for component in states:
            component.device.lock(node)
        copy = DeviceCopy(node, len(node.key), operation.host_indices, states)
        self._writing[operation.operation_id] = copy

    def host_states(self, operation: CacheOperation) -> dict[TreeComponent, torch.Tensor]:
        """The host slots of the states that `operation` includes, by kind."""
        return {
            component: slots
            for component in self._tree.components
            if (slots := operation.host_slots(component.pool.spec.name)) is not None
        }

    def queue_copy(self, node: TreeNode, *, with_states: bool = True) -> CacheOperation | None:
        """Queue the copy of the pages and the states of `node` that are not on the host: all or
        none."""
        assert node.value is not None
        pages = node.value[:0] if node.backuped else node.value
        extra = [
            component.transfer(device=component.of(node).value)
            for component in self._tree.components
            if with_states and component.of(node).is_on_device_only
        ]
        operation = self._controller.write(pages, extra)
        if operation is None and len(pages):
            self._tree.host.make_room(len(pages))
            operation = self._controller.write(pages, extra)
        return operation

    def begin_tick(self) -> None:
        self._controller.start_writing(soon=True)

    def report(self, progress: Progress) -> None:
        progress.writes = num_reached(self._controller.ack_write_queue)

    def act_on(self, agreed: Progress) -> None:
        for _ in range(agreed.writes):
            ack = self._controller.ack_write_queue.popleft()
            self._metrics.transfer_seconds.labels("write").observe(time.monotonic() - ack.started)
            for operation_id in ack.operation_ids:
                # Absent: an eviction has waited for the copy and settled it.
                if (copy := self._writing.pop(operation_id, None)) is not None:
                    self._settle(copy)

    def _settle(self, copy: DeviceCopy) -> None:
        """Set the host pages, whose bytes have landed, and unlock the device pages."""
        host = self._tree.host
        parts = parts_of(copy.node, copy.length)
        for node, begin, end in parts:
            if len(copy.host_indices):
                node.write_id = None
                # L3 may have had the pages before the host.
                host.put(node, _part(copy.host_indices, begin, end), is_stored=True)
        for component, slots in copy.host_states.items():
            component.host.put(copy.node, slots)
            component.device.unlock(copy.node)
        landed = [node for node, _, _ in parts]
        if not len(copy.host_indices):
            for node in landed:
                host.unpin(node)
        self._tree.unlock(copy.node)
        # Nodes that had become useless were deleted when they were unlocked.
        landed = [node for node in landed if node.parent is not None]
        if self.write_policy != "write_back":
            for node in landed:
                self._save_states(node)  # A state that came while the pages were being copied.
        self.tell_landed(landed[::-1])

    def tell_landed(self, nodes: list[TreeNode]) -> None:
        """Notify the flows below of `nodes`, parents first, whose pages have reached the host."""
        for flow in self._below:
            flow.on_host_landed(nodes)


def _part(slots: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """A copy of a range of `slots`, so that the rest is not kept alive."""
    whole = begin == 0 and end == len(slots)
    return slots if whole else slots[begin:end].clone()
