"""L1 to L2: nodes get host pages, and pages leave L1.

Threads: the scheduler's only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import torch

from sglang.srt.mem_cache.tiers.device_copy import DeviceCopy, num_reached
from sglang.srt.mem_cache.tree.tier_flow import TierFlow
from sglang.srt.mem_cache.tree.tree_node import TreeNode, parts_of
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hybrid_cache.cache_controller import (
        CacheOperation,
        HiCacheController,
    )
    from sglang.srt.mem_cache.tiers.host_pages import HostPages
    from sglang.srt.mem_cache.tree.ballot import Progress
    from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree

logger = logging.getLogger(__name__)

WRITE_POLICIES: Final = ("write_through", "write_through_selective", "write_back")
_SELECTIVE_HITS: Final = 2


class HostBackup(TierFlow):
    """Copies of one tree's pages to the host, and eviction from the device.

    - A node's host pages are set when their bytes have landed, never before.
    - While a copy runs, its device pages are locked and the operation owns its host pages.

    Args:
        tree: Whose nodes.
        host: L2's books.
        controller: Copies.
        write_policy: One of `WRITE_POLICIES`.
        metrics: Counts what happened.
        below: Flows that are told what has landed on the host.
    """

    def __init__(
        self,
        tree: PrefixTree,
        host: HostPages,
        controller: HiCacheController,
        *,
        write_policy: str,
        metrics: HiCacheMetrics,
        below: Sequence[TierFlow] = (),
    ) -> None:
        self.write_policy = write_policy
        self._tree = tree
        self._host = host
        self._controller = controller
        self._metrics = metrics
        self._below = below
        self._say = RateLimitedLogger(logger)
        self._writing: dict[int, DeviceCopy] = {}

    def busy(self) -> dict[str, int]:
        # A copy whose pages are settled already still holds its place in the queue.
        writes = len(self._writing) or len(self._controller.ack_write_queue)
        return {"writes": writes} if writes else {}

    def owned_host_pages(self) -> Iterator[tuple[str, torch.Tensor]]:
        for operation_id, copy in self._writing.items():
            yield f"write {operation_id}", copy.host_indices

    # ---- copies ----------------------------------------------------------------------------

    def on_insert(self, path: list[TreeNode]) -> None:
        if self.write_policy == "write_back":
            return
        wanted = 1 if self.write_policy == "write_through" else _SELECTIVE_HITS
        for node in path:
            if node.backuped or node.write_id is not None:
                continue
            # Top down, and no further than the first that does not go: writes are prefix-closed.
            if (wanted > 1 and node.hit_count < wanted) or not self.write(node):
                break

    def write(self, node: TreeNode) -> bool:
        """Queue the copy of a node to the host; False where L2 has no room for it."""
        operation = self._queue_copy(node)
        if operation is None:
            self._say.warning(
                "l2-full",
                "L2 is full of pages in use; %d tokens stay without a copy",
                len(node.key),
            )
            return False
        self._tree.lock(node)
        node.write_id = operation.operation_id
        copy = DeviceCopy(node, len(node.key), operation.host_indices)
        self._writing[operation.operation_id] = copy
        return True

    def _queue_copy(self, node: TreeNode) -> CacheOperation | None:
        assert node.value is not None and not node.backuped
        operation = self._controller.write(node.value)
        if operation is None:
            self._host.make_room(len(node.key))
            operation = self._controller.write(node.value)
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
                # Absent: an eviction has waited for it and settled it.
                if (copy := self._writing.pop(operation_id, None)) is not None:
                    self._settle(copy)

    def _settle(self, copy: DeviceCopy) -> None:
        """The bytes have landed: publish the host pages and let go of the device pages."""
        landed = []
        for node, begin, end in parts_of(copy.node, copy.length):
            node.write_id = None
            node.set_host_value(_part(copy.host_indices, begin, end))
            landed.append(node)
        self._host.offer(landed)
        self._tree.unlock(copy.node)
        self._tell_landed(landed[::-1])

    def _tell_landed(self, nodes: list[TreeNode]) -> None:
        for flow in self._below:
            flow.on_host_landed(nodes)

    # ---- leaving L1 ------------------------------------------------------------------------

    def evict(self, num_tokens: int) -> int:
        """Free device slots, at least `num_tokens` if it can; tokens freed.

        Pages with a host copy leave L1; others are dropped or written back. Under `write_back` it
        waits for those copies, so that the slots are free on return.
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
        """Free at most what can go now: a node above one that is being written back must wait."""
        tree = self._tree
        freed = 0
        leaving: list[TreeNode] = []
        kept: list[TreeNode] = []
        slots: list[torch.Tensor] = []
        while freed < num_tokens and (node := tree.device_heap.pop()) is not None:
            if node.backuped:
                value = tree.take_off_device(node)
                tree.free_slots(value)
                freed += len(value)
                self._host.offer([node])
            elif (written := self._write_back(node)) is not None:
                freed += len(written)
                slots.append(written)
                leaving.append(node)
            elif dropped := self._drop(node):
                freed += dropped
            else:
                kept.append(node)
        if leaving:
            self._finish_write_back(leaving, slots)
        for node in kept:
            tree.device_heap.offer(node)
        return freed

    def _write_back(self, node: TreeNode) -> torch.Tensor | None:
        """Queue a node's copy and take it off the device's books; its slots, or None.

        Only where the copy is owed: under `write_back`, or because host pages hang below.
        """
        if self.write_policy != "write_back" and not node.children:
            return None
        operation = self._queue_copy(node)
        if operation is None:
            return None
        # Set before the bytes land, which nothing sees: `evict` waits for them.
        node.set_host_value(operation.host_indices)
        node.protect_host()
        return self._tree.take_off_device(node)

    def _finish_write_back(self, nodes: list[TreeNode], slots: list[torch.Tensor]) -> None:
        self._controller.start_writing(is_urgent=True)
        self._controller.ack_write_queue[-1].finish_event.synchronize()
        self._tree.free_slots(torch.cat(slots))
        for node in nodes:
            self._host.unpin(node)
        # Leaves were taken first; L3 wants parents first.
        self._tell_landed(nodes[::-1])

    def _drop(self, node: TreeNode) -> int:
        """Forget a node without a host copy, and the host pages below it; device tokens freed.

        0 where something below is pinned: the node stays.
        """
        below = [node]
        for at in below:
            below.extend(at.children.values())
        if any(at.host_ref_counter for at in below):
            return 0
        value = self._tree.take_off_device(node)
        self._tree.free_slots(value)
        for at in reversed(below):
            if at.host_value is not None:
                self._host.pool.free(at.host_value)
                at.set_host_value(None)
            self._tree.delete(at)
        lost = sum(len(at.key) for at in below)
        self._metrics.dropped.labels("unwritten").inc(lost)
        self._say.info("drop", "%d tokens left L1 without a copy in L2", lost)
        return len(value)


def _part(slots: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """A range of `slots` that keeps nothing else of them alive."""
    whole = begin == 0 and end == len(slots)
    return slots if whole else slots[begin:end].clone()
