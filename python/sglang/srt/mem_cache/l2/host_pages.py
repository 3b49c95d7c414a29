"""The books of L2: the nodes with host pages, and the order of their eviction.

Threads: the scheduler's only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from sglang.srt.mem_cache.tree.integrity import PageBooks

if TYPE_CHECKING:
    from sglang.srt.mem_cache.host.host_pool import AnyHostPool
    from sglang.srt.mem_cache.l2.host_states import HostStates
    from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree
    from sglang.srt.mem_cache.tree.tree_node import TreeNode


class HostPages:
    """Host pages of the nodes of one tree. Counts are tokens.

    Args:
        tree: Tree of the nodes.
        pool: The anchor's pool in L2: the pages that prefixes are made of.
        metrics: Metrics of evictions.
        states: The books of recurrent states; None: the model has none.
    """

    def __init__(
        self,
        tree: PrefixTree,
        pool: AnyHostPool,
        metrics: HiCacheMetrics,
        states: HostStates | None = None,
    ) -> None:
        self.pool = pool
        self.states = states
        self._tree = tree
        self._metrics = metrics
        self._heap = tree.add_heap(_may_leave_host)
        tree.watch_leaving(self.forget)

    def offer(self, nodes: Iterable[TreeNode]) -> None:
        """Add those of `nodes` to the candidates that can be evicted from the host."""
        for node in nodes:
            self._heap.offer(node)

    def unpin(self, node: TreeNode) -> None:
        """Undo one `node.protect_host()`."""
        node.release_host()
        self._heap.offer(node)
        if self.states is not None:
            self.states.offer(node)
            self._tree.prune(node)

    def forget(self, node: TreeNode) -> None:
        """Free the host pages of `node`, if it has any, and its host state."""
        if node.host_value is not None:
            self.pool.free(self._take_off_host(node))

    def _take_off_host(self, node: TreeNode) -> torch.Tensor:
        """Take the host pages and the host state of `node` off the host. The caller frees the
        returned pages."""
        value = node.host_value
        assert value is not None and node.parent is not None
        if self.states is not None:
            self.states.forget(node)
        node.set_host_value(None)
        self._heap.offer(node.parent)
        return value

    def make_room(self, num_tokens: int) -> None:
        """Evict until `num_tokens` are free, or all other pages are pinned."""
        missing = num_tokens - self.pool.available_size()
        if missing > 0:
            self.evict(missing)

    def evict(self, num_tokens: int) -> int:
        """Free at least `num_tokens` of unpinned host pages, if there are as many; return the freed
        tokens."""
        slots: list[torch.Tensor] = []
        freed = 0
        while freed < num_tokens and (node := self._heap.pop()) is not None:
            above = node.parent
            assert above is not None
            slots.append(self._take_off_host(node))
            freed += len(node.key)
            if node.value is None:
                self._tree.delete(node)
                node = above
            if self.states is not None:
                before = self.pool.available_size()
                self._tree.prune(node)
                freed += self.pool.available_size() - before
        if slots:
            self.pool.free(torch.cat(slots))
            self._metrics.evicted.labels("host").inc(freed)
        return freed

    def check(self, owned: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Assert that each host page has one owner.

        Args:
            owned: Pages that operations own: owner and int64 slots.
        """
        books = PageBooks("host", self.pool.size, self._tree.page_size)
        books.own_pages("the free list", self.pool.free_page_ids())
        nodes = list(self._tree.nodes())
        for node in nodes:
            books.own(repr(node), node.host_value)
            if _may_leave_host(node):
                assert node in self._heap, f"{node} could leave the host but is not offered"
        for owner, pages in owned:
            books.own(owner, pages)
        books.check()


def _may_leave_host(node: TreeNode) -> bool:
    return (
        node.parent is not None
        and node.host_value is not None
        and node.host_ref_counter == 0
        and node.host_children == 0
    )
