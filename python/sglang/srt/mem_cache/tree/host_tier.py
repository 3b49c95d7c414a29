"""The slots of one pool on the host that a tree has, and the rule of a buffer there.

Threads: the scheduler's only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from sglang.srt.mem_cache.tree.hicache_metrics import Decision
from sglang.srt.mem_cache.tree.kv_events import StorageMedium
from sglang.srt.mem_cache.tree.pool_tier import PoolTier, SlotPool, TieredTree
from sglang.srt.mem_cache.tree.tree_node import TreeNode

if TYPE_CHECKING:
    from sglang.srt.mem_cache.tree.tenants import Evictor


class HostTier(PoolTier):
    """A pool on the host (L2). Pins of a node keep its slots there, of all pools.

    Attributes:
        is_owed: True if a page that nothing has pinned waits for its write to L3.
    """

    medium = StorageMedium.CPU

    def __init__(
        self,
        tree: TieredTree,
        name: str,
        pool: SlotPool,
        *,
        state: int | None = None,
    ) -> None:
        super().__init__(tree, name, pool, state=state)
        self.is_owed: Callable[[TreeNode], bool] = lambda node: False
        self._ends: dict[int, TreeNode] = {}
        """In a buffer, nodes with slots by id; the last one of nodes that a split has made."""

    def get(self, node: TreeNode) -> torch.Tensor | None:
        return self.slots_of(node).host_value

    def kept(self, node: TreeNode) -> int:
        return self.slots_of(node).kept_on_host

    def may_leave(self, node: TreeNode) -> bool:
        is_inner = self._state is None and node.host_children > 0
        has_slots = self.slots_of(node).host_value is not None
        is_free = node.host_ref_counter == 0 and not node.is_condemned
        return has_slots and is_free and not is_inner

    def put(self, node: TreeNode, slots: torch.Tensor, *, is_stored: bool = False) -> bool:
        """Give `slots`, whose bytes have landed, to `node`. False: the node has slots of the pool
        on the host, and `slots` are freed.

        Args:
            is_stored: True if L3 has what the node's mark says even so. If not, the node counts as
                not stored, so that its slots are written.
        """
        at = self.slots_of(node)
        if at.host_value is not None:
            # Another flow has given the node slots of the pool.
            self.free(slots)
            return False
        at.set_host_value(slots)
        for one in self.listeners:
            one.stored(node, self.medium)
        if at.value is None:
            at.last_access_time = node.last_access_time
        if not is_stored:
            node.storage_epoch = -1
        if self._tree.host_is_buffer:
            self._ends[node.id] = node
        self._offer_new(node)
        return True

    def _clear(self, node: TreeNode) -> None:
        self.slots_of(node).set_host_value(None)
        above = node.parent
        is_end = self._ends.pop(node.id, None) is not None
        if is_end and above is not None and self.get(above) is not None:
            self._ends[above.id] = above  # A split may have left slots with it.

    def unneeded(self) -> list[TreeNode]:
        """In a buffer, the nodes whose pages have no reason to stay; else none.

        A reason is a pin; a write to L3 that is still to begin; a waiting request, for what L1
        lacks; or a node below that is on the host alone, as this node is.
        """
        found: dict[int, TreeNode] = {}
        for end in self._ends.values():
            for node in end.path_up():
                if node.host_value is None:
                    break
                if not self._has_reason(node):
                    found[node.id] = node
        return list(found.values())

    def _has_reason(self, node: TreeNode) -> bool:
        is_inner = node.value is None and node.host_children > 0
        if is_inner or node.host_ref_counter or node.is_condemned or self.is_owed(node):
            return True
        slots = (node, *node.states)
        return bool(node.wanted_by) and any(
            one.value is None and one.host_value is not None for one in slots
        )

    def release_unneeded(self) -> None:
        """Free what `unneeded` names. Call it on the tier of the pages."""
        while nodes := self.unneeded():
            for node in nodes:
                self.drop(node)
                self._tree.prune(node)

    def on_reset(self, nodes: Sequence[TreeNode]) -> None:
        super().on_reset(nodes)
        self._ends.clear()

    def make_room(
        self,
        num: int,
        by: Evictor,
        taker: TreeNode,
        *,
        arrival: int | None = None,
        only_older: bool = False,
    ) -> None:
        """Evict pages until `num` slots are free, or no other page may leave.

        Args:
            taker: The slots are for its pages, or for pages after it.
            arrival: Pages stay that will be used by waiting requests which came before this one;
                None: by any waiting request.
            only_older: Pages stay that were used since `taker`.
        """
        missing = num - self.pool.available_size()
        if missing <= 0:
            return
        is_spared, is_older = self.heap.strategy.is_spared, self.used_before(taker)

        def may_take(node: TreeNode) -> bool:
            return not is_spared(node, taker, arrival) and (not only_older or is_older(node))

        why = "room for copies of L1" if by.request is None else "room to read from L3"
        self._tree.tenants.evict(
            self, Decision.EVICTED_HOST, why, by, lambda: self.evict(missing, may_take)
        )

    def used_before(self, node: TreeNode) -> Callable[[TreeNode], bool]:
        """Tells of nodes whether their slots were used before those of `node`."""
        used = self.slots_of(node).last_access_time
        return lambda one: self.slots_of(one).last_access_time < used

    def alloc(self, num: int) -> torch.Tensor | None:
        """Take `num` slots, int64; evicts for them if needed. None: too many are pinned."""
        missing = num - self.pool.available_size()
        if missing > 0:
            self.evict(missing)
        return self.pool.alloc(num)

    def pin(self, node: TreeNode) -> None:
        """Keep `node` and its slots on the host, of all pools, until the matching `unpin` or
        `release`. Call it on the tier of the pages, as these."""
        node.protect_host()
        for tier in (self, *self.dependents):
            tier.heap.discard(node)

    def release(self, node: TreeNode) -> None:
        """Undo one `pin` of a node that has not become useless."""
        node.release_host()
        for tier in (self, *self.dependents):
            tier.heap.offer(node)

    def unpin(self, node: TreeNode) -> None:
        """Undo one `pin`."""
        self.release(node)
        self._tree.prune(node)
