"""Which node goes first: strategies, and the heap that asks them.

A strategy maps a node to a priority; the smallest goes first. Recency is the tree's own counter,
never a clock, and ties are broken by node id, so that every rank evicts the same nodes.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, TypeAlias

from sglang.srt.mem_cache.tree_node import TreeNode

Priority: TypeAlias = tuple[int, ...]


class EvictionStrategy(ABC):
    """Orders nodes for eviction."""

    grows_with_use: ClassVar[bool] = True
    """A node's priority never falls while it is used: stale heap entries are then lower bounds."""

    @abstractmethod
    def get_priority(self, node: TreeNode) -> Priority:
        """Smallest first."""


class LRUStrategy(EvictionStrategy):
    """Least recently used first."""

    def get_priority(self, node: TreeNode) -> Priority:
        return (node.last_access_time,)


class LFUStrategy(EvictionStrategy):
    """Least often used first, then least recently."""

    def get_priority(self, node: TreeNode) -> Priority:
        return (node.hit_count, node.last_access_time)


class FIFOStrategy(EvictionStrategy):
    """Oldest first."""

    def get_priority(self, node: TreeNode) -> Priority:
        return (node.creation_time,)


class MRUStrategy(EvictionStrategy):
    """Most recently used first."""

    grows_with_use = False

    def get_priority(self, node: TreeNode) -> Priority:
        return (-node.last_access_time,)


class FILOStrategy(EvictionStrategy):
    """Newest first."""

    def get_priority(self, node: TreeNode) -> Priority:
        return (-node.creation_time,)


class PriorityStrategy(EvictionStrategy):
    """Lowest request priority first, then least recently used."""

    def get_priority(self, node: TreeNode) -> Priority:
        return (node.priority, node.last_access_time)


class SLRUStrategy(EvictionStrategy):
    """Segmented LRU: nodes used fewer than `protected_threshold` times go first.

    Source: Karedla, Love, Wherry, "Caching strategies to improve disk system performance" (1994).
    """

    def __init__(self, protected_threshold: int = 2) -> None:
        self.protected_threshold = protected_threshold

    def get_priority(self, node: TreeNode) -> Priority:
        return (int(node.hit_count >= self.protected_threshold), node.last_access_time)


_STRATEGIES: dict[str, Callable[[], EvictionStrategy]] = {
    "lru": LRUStrategy,
    "lfu": LFUStrategy,
    "fifo": FIFOStrategy,
    "mru": MRUStrategy,
    "filo": FILOStrategy,
    "priority": PriorityStrategy,
    "slru": SLRUStrategy,
}


def get_eviction_strategy(eviction_policy: str) -> EvictionStrategy:
    """The strategy of that name. Raises ValueError that lists the names."""
    try:
        return _STRATEGIES[eviction_policy.lower()]()
    except KeyError:
        names = ", ".join(_STRATEGIES)
        raise ValueError(
            f"radix_eviction_policy={eviction_policy!r} is unknown; choose one of {names}"
        ) from None


class EvictionHeap:
    """Candidates of one tier, cheapest to lose first.

    Entries are lazy: a node is offered once when it becomes a candidate, and what changed since
    is found out when it comes up. That makes an eviction O(log n) and a hit free, where a scan of
    all leaves would make each eviction O(n).

    Args:
        strategy: Gives the order.
        is_candidate: True while a node may be evicted; asked again when it comes up.
    """

    def __init__(
        self, strategy: EvictionStrategy, is_candidate: Callable[[TreeNode], bool]
    ) -> None:
        self._strategy = strategy
        self._is_candidate = is_candidate
        self._heap: list[tuple[Priority, int, TreeNode]] = []
        self._members: set[int] = set()

    def __contains__(self, node: TreeNode) -> bool:
        return node.id in self._members

    def offer(self, node: TreeNode) -> None:
        """Take `node` as a candidate if it is one. Call it whenever it may have become one."""
        if node.id not in self._members and self._is_candidate(node):
            self._members.add(node.id)
            heapq.heappush(self._heap, (self._strategy.get_priority(node), node.id, node))

    def pop(self) -> TreeNode | None:
        """Remove and return the node to evict next; None when there is no candidate."""
        if not self._strategy.grows_with_use:
            self._heap = [(self._strategy.get_priority(n), i, n) for _, i, n in self._heap]
            heapq.heapify(self._heap)
        while self._heap:
            priority, node_id, node = heapq.heappop(self._heap)
            if not self._is_candidate(node):
                self._members.discard(node_id)
                continue
            current = self._strategy.get_priority(node)
            if current != priority:
                heapq.heappush(self._heap, (current, node_id, node))
                continue
            self._members.discard(node_id)
            return node
        return None

    def clear(self) -> None:
        """Forget all candidates."""
        self._heap.clear()
        self._members.clear()
