"""Eviction order: strategies, the heap that uses them, and marks of nodes that are evicted last.

A strategy maps a node to a priority; the node with the smallest is evicted first. Recency is the
tree's own counter, never a clock, and ties are broken by node id, so that every rank evicts the
same nodes.
"""

from __future__ import annotations

import bisect
import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import ClassVar, Final, TypeAlias

from sglang.srt.mem_cache.tree.tree_node import TreeNode

Priority: TypeAlias = tuple[int, ...]
EvictionOrder: TypeAlias = tuple[int, Priority]
"""Place of a node in the order of eviction; the smallest is evicted first."""


_STALE_FACTOR: Final = 2
_STALE_SLACK: Final = 64
"""A heap is rebuilt once it has more than `_STALE_FACTOR` entries per candidate and this many
besides."""


class EvictionStrategy(ABC):
    """Orders nodes for eviction."""

    grows_with_use: ClassVar[bool] = True
    """True if a node's priority never falls while it is used, so that stale heap entries are lower
    bounds."""

    recency: Callable[[TreeNode], int] = attrgetter("last_access_time")
    """Time of a node's last use, by the tree's counter."""
    kept: Callable[[TreeNode], int] = attrgetter("kept_on_device")
    """Number of sessions that keep a node on the tier."""

    @abstractmethod
    def get_priority(self, node: TreeNode) -> Priority:
        """Priority of `node`; the smallest is evicted first."""

    def eviction_order(self, node: TreeNode) -> EvictionOrder:
        """`get_priority`, except that nodes which sessions keep are evicted after others
        (`SessionHints`); and after them those that waiting requests will use, the one needed last
        first (`LookAhead`)."""
        if node.wanted_by:
            return 2, (-node.wanted_by[0],)
        return int(self.kept(node) > 0), self.get_priority(node)


class LRUStrategy(EvictionStrategy):
    """Least recently used first."""

    def get_priority(self, node: TreeNode) -> Priority:
        return (self.recency(node),)


class LFUStrategy(EvictionStrategy):
    """Least often used first, then least recently."""

    def get_priority(self, node: TreeNode) -> Priority:
        return (node.hit_count, self.recency(node))


class FIFOStrategy(EvictionStrategy):
    """Oldest first."""

    def get_priority(self, node: TreeNode) -> Priority:
        return (node.creation_time,)


class MRUStrategy(EvictionStrategy):
    """Most recently used first."""

    grows_with_use = False

    def get_priority(self, node: TreeNode) -> Priority:
        return (-self.recency(node),)


class FILOStrategy(EvictionStrategy):
    """Newest first."""

    def get_priority(self, node: TreeNode) -> Priority:
        return (-node.creation_time,)


class PriorityStrategy(EvictionStrategy):
    """Lowest request priority first, then least recently used."""

    def get_priority(self, node: TreeNode) -> Priority:
        return (node.priority, self.recency(node))

    def eviction_order(self, node: TreeNode) -> EvictionOrder:
        # The priority that the user gave weighs more than the queue.
        group, order = super().eviction_order(node)
        return node.priority, (group, *order)


class SLRUStrategy(EvictionStrategy):
    """Segmented LRU: nodes used fewer than `protected_threshold` times go first.

    Source: Karedla, Love, Wherry, "Caching strategies to improve disk system performance" (1994).
    """

    def __init__(self, protected_threshold: int = 2) -> None:
        self.protected_threshold = protected_threshold

    def get_priority(self, node: TreeNode) -> Priority:
        return (int(node.hit_count >= self.protected_threshold), self.recency(node))


_STRATEGIES: dict[str, Callable[[], EvictionStrategy]] = {
    "lru": LRUStrategy,
    "lfu": LFUStrategy,
    "fifo": FIFOStrategy,
    "mru": MRUStrategy,
    "filo": FILOStrategy,
    "priority": PriorityStrategy,
    "slru": SLRUStrategy,
}


def get_eviction_strategy(
    eviction_policy: str,
    recency: Callable[[TreeNode], int] | None = None,
    kept: Callable[[TreeNode], int] | None = None,
) -> EvictionStrategy:
    """The strategy of that name. Raises ValueError that lists the names.

    Args:
        recency: Time of a node's last use; None: last use of its pages. A match uses all pages on
            its way, but only the state at its end.
        kept: Number of sessions that keep a node on the tier; None: its pages on the device.
    """
    try:
        strategy = _STRATEGIES[eviction_policy.lower()]()
    except KeyError:
        names = ", ".join(_STRATEGIES)
        raise ValueError(
            f"radix_eviction_policy={eviction_policy!r} is unknown; choose one of {names}"
        ) from None
    if recency is not None:
        strategy.recency = recency
    if kept is not None:
        strategy.kept = kept
    return strategy


class EvictionHeap:
    """Candidates of one tier, the first to evict on top.

    Entries are lazy: a node is offered once when it becomes a candidate, and its entry is checked
    when it reaches the top. An eviction is O(log n) and a hit is free; a scan of all leaves
    would make each eviction O(n). A node that leaves the tree is discarded, since its entry may
    never reach the top.

    Args:
        is_candidate: True if a node may be evicted; called again when its entry reaches the top.
    """

    def __init__(
        self, strategy: EvictionStrategy, is_candidate: Callable[[TreeNode], bool]
    ) -> None:
        self._strategy = strategy
        self._is_candidate = is_candidate
        self._heap: list[tuple[EvictionOrder, int, TreeNode]] = []
        self._members: dict[int, TreeNode] = {}

    def __contains__(self, node: TreeNode) -> bool:
        return node.id in self._members

    def offer(self, node: TreeNode) -> None:
        """Add `node` if it is a candidate. Call it whenever the node may have become one."""
        if node.id not in self._members and self._is_candidate(node):
            self._members[node.id] = node
            self._push(node)

    def refresh(self, node: TreeNode) -> None:
        """Update the place of `node`, which may have moved forward since it was offered."""
        if node.id not in self._members:
            return
        # The old entry stays in the heap, and is dropped when it reaches the top.
        self._push(node)
        self._drop_stale()

    def discard(self, node: TreeNode) -> None:
        """Forget `node`, which leaves the tree or is no candidate."""
        if self._members.pop(node.id, None) is not None:
            self._drop_stale()

    def _drop_stale(self) -> None:
        """Rebuild the heap if most of its entries are stale."""
        if len(self._heap) > _STALE_FACTOR * len(self._members) + _STALE_SLACK:
            self._rebuild(self._members.values())

    def _push(self, node: TreeNode) -> None:
        heapq.heappush(self._heap, (self._strategy.eviction_order(node), node.id, node))

    def _rebuild(self, nodes: Iterable[TreeNode]) -> None:
        self._heap = [(self._strategy.eviction_order(node), node.id, node) for node in nodes]
        heapq.heapify(self._heap)

    def pop(self) -> TreeNode | None:
        """Remove and return the node to evict next; None if there is no candidate."""
        if not self._strategy.grows_with_use:
            self._rebuild(self._members.values())
        while self._heap:
            priority, node_id, node = heapq.heappop(self._heap)
            if node_id not in self._members:
                continue
            if not self._is_candidate(node):
                self.discard(node)
                continue
            current = self._strategy.eviction_order(node)
            if current != priority:
                heapq.heappush(self._heap, (current, node_id, node))
                continue
            self.discard(node)
            return node
        return None

    def clear(self) -> None:
        """Forget all candidates."""
        self._heap.clear()
        self._members.clear()

    def check(self, nodes: Collection[TreeNode]) -> None:
        """Assert that the heap keeps only `nodes`, the nodes of the tree, and few entries."""
        known = {node.id for node in nodes}
        gone = [node for node_id, node in self._members.items() if node_id not in known]
        assert not gone, f"candidates that have left the tree: {gone[:4]}"
        assert len(self._heap) <= _STALE_FACTOR * len(self._members) + _STALE_SLACK, (
            f"{len(self._heap)} entries for {len(self._members)} candidates"
        )


class LookAhead:
    """Marks of the nodes of one tree that waiting requests will use. Scheduler thread only.

    A request is matched when it arrives, and the nodes of its prefix are marked until it is
    scheduled or aborted; nodes that are read from L3 meanwhile are marked too. Marked nodes are
    evicted after all others, the one needed last first. Without waiting requests the order of
    eviction is the usual one.

    Source: Gao et al., "Cost-Efficient Large Language Model Serving for Multi-turn Conversations
    with CachedAttention", USENIX ATC'24: scheduler-aware eviction, here on a radix tree.

    `TreeNode.wanted_by` holds the arrival numbers of the requests whose prefix ends there or below,
    in ascending order. A split copies them; if a node is deleted, its marks end at its parent.
    """

    def __init__(self) -> None:
        self._arrivals: dict[str, int] = {}
        self._ends: dict[int, TreeNode] = {}
        """The deepest node of each prefix that is still in the tree, by arrival number."""

    def add(self, rid: str, arrival: int, node: TreeNode) -> None:
        """Note that request `rid` waits, and will use `node` and its ancestors."""
        self.remove(rid)
        self._arrivals[rid] = arrival
        self._ends[arrival] = node
        for at in node.path_up():
            bisect.insort(at.wanted_by, arrival)

    def extend(self, rid: str, node: TreeNode) -> None:
        """Request `rid`, if it waits, will use its prompt at least up to `node`."""
        arrival = self._arrivals.get(rid)
        if arrival is None:
            return
        for at in node.path_up():
            place = bisect.bisect_left(at.wanted_by, arrival)
            if at.wanted_by[place : place + 1] == [arrival]:
                break  # So are all nodes above.
            at.wanted_by.insert(place, arrival)
            if at is node:
                self._ends[arrival] = node

    def remove(self, rid: str) -> list[TreeNode]:
        """Drop the marks of request `rid`; return the nodes that had them. Unknown ids are
        ignored."""
        arrival = self._arrivals.pop(rid, None)
        if arrival is None:
            return []
        path = self._ends.pop(arrival).path_up()
        for at in path:
            del at.wanted_by[bisect.bisect_left(at.wanted_by, arrival)]
        return path

    def on_delete(self, node: TreeNode) -> None:
        """See `NodeKeeper`: its marks end at its parent."""
        assert node.parent is not None
        for arrival in node.wanted_by:
            self._ends[arrival] = node.parent
        node.wanted_by = []

    def on_reset(self, nodes: Sequence[TreeNode]) -> None:
        """See `NodeKeeper`: all marks end."""
        self._arrivals.clear()
        self._ends.clear()

    def check(self, nodes: Iterable[TreeNode]) -> None:
        """Assert that every mark belongs to a waiting request, and that none is missing."""
        wanted: dict[int, list[int]] = {}
        for arrival, end in sorted(self._ends.items()):
            for at in end.path_up():
                wanted.setdefault(at.id, []).append(arrival)
        for node in nodes:
            expected = wanted.get(node.id, [])
            assert node.wanted_by == expected, f"{node} is wanted by {node.wanted_by}: {expected}"
