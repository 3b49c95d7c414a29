"""The books of recurrent states in L2: the nodes with a host state, and the order of eviction.

Threads: the scheduler's only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from sglang.srt.mem_cache.tree.integrity import PageBooks

if TYPE_CHECKING:
    from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
    from sglang.srt.mem_cache.host.host_pool import AnyHostPool
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree
    from sglang.srt.mem_cache.tree.state_component import StateComponent
    from sglang.srt.mem_cache.tree.tree_node import TreeNode


class HostStates:
    """Host states of the nodes of one tree. Counts are states.

    A pin of a node's host pages pins its host state too.

    Args:
        tree: Tree of the nodes.
        states: The tree's component with the states in L1.
        pool: Pool of states in L2.
    """

    def __init__(self, tree: PrefixTree, states: StateComponent, pool: AnyHostPool) -> None:
        self.pool = pool
        self._states = states
        self._evicted = states.metrics.evicted.labels("host")
        self._tree = tree
        self._heap = tree.add_heap(_may_lose_host_state, of_states=True)

    def transfer(self, slot: torch.Tensor, keys: list[str] | None = None) -> PoolTransfer:
        """Transfer of a state between L2 and L3.

        Args:
            slot: Slot in L2, int64 `[1]` on the CPU.
            keys: Hash of the last page before the state; None: the last page of the operation.
        """
        return self._states.transfer(slot, keys=keys)

    def offer(self, node: TreeNode) -> None:
        """Add the state of `node` to the candidates if it can be evicted from the host."""
        self._heap.offer(node)

    def put(self, node: TreeNode, slot: torch.Tensor, *, is_stored: bool = False) -> None:
        """Give a host slot, int64 `[1]`, to `node`, whose pages are on the host.

        Args:
            is_stored: Whether L3 has the state. If not, the node counts as not stored, so that its
                state is written.
        """
        if node.mamba_host_value is not None:
            # Another flow has given the node a host state.
            self.pool.free(slot)
            return
        assert node.backuped, f"{node} gets a host state without host pages"
        node.set_mamba_host_value(slot)
        if node.mamba_value is None:
            node.mamba_last_access_time = node.last_access_time
        if not is_stored:
            node.storage_epoch = -1
        self._heap.offer(node)

    def forget(self, node: TreeNode) -> None:
        """Free the host state of `node`, if it has one."""
        if node.mamba_host_value is not None:
            self.pool.free(node.mamba_host_value)
            node.set_mamba_host_value(None)
            self._evicted.inc()

    def alloc(self) -> torch.Tensor | None:
        """Allocate a host slot, int64 `[1]`; evicts a state if needed. None: all are in use."""
        if not self.pool.available_size():
            self.evict(1)
        return self.pool.alloc(1)

    def evict(self, num: int) -> int:
        """Free up to `num` unpinned host states; return the number of freed ones. Nodes that become
        useless are deleted too."""
        freed = 0
        while freed < num and (node := self._heap.pop()) is not None:
            self.forget(node)
            self._tree.prune(node)
            freed += 1
        return freed

    def check(self, nodes: Iterable[TreeNode], owned: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Assert that each host state has one owner.

        Args:
            nodes: Nodes of the tree.
            owned: States that operations own: owner and int64 slots.
        """
        books = PageBooks("states on the host", self.pool.size, 1)
        books.own_pages("the free list", self.pool.free_page_ids())
        for node in nodes:
            books.own(repr(node), node.mamba_host_value)
            is_offered = node in self._heap
            assert is_offered or not _may_lose_host_state(node), f"{node}: its state is not offered"
        for owner, slots in owned:
            books.own(owner, slots)
        books.check()


def _may_lose_host_state(node: TreeNode) -> bool:
    return node.mamba_host_value is not None and node.host_ref_counter == 0
