"""Eviction order: strategies, the heap that uses them, and marks of nodes that are evicted last.

A strategy maps a node to a priority; the node with the smallest is evicted first. Recency is the
tree's own counter, never a clock, and ties are broken by node id, so that every rank evicts the
same nodes.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TypeAlias

from sglang.srt.mem_cache.tree.tree_node import ROOT_ID, TreeNode
from sglang.srt.utils.parts import NODE_ITEMS, Meter, Parts

Priority: TypeAlias = tuple[int, ...]
EvictionOrder: TypeAlias = tuple[int, Priority]
"""Place of a node in the order of eviction; the smallest is evicted first."""
_Entry: TypeAlias = tuple[EvictionOrder, int, TreeNode]
"""Order, id and node. No two have the same id, so that nodes are not compared."""


class EvictionStrategy(ABC):
    """Orders nodes for eviction."""

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

    def is_spared(self, node: TreeNode, taker: TreeNode, arrival: int | None) -> bool:
        """True if `node` must not leave for pages of `taker`, or after it: a waiting request that
        came before `arrival` will use it. None: any waiting request."""
        wanted = node.wanted_by
        return bool(wanted) and (arrival is None or wanted[0] < arrival)


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

    def is_spared(self, node: TreeNode, taker: TreeNode, arrival: int | None) -> bool:
        return node.priority >= taker.priority and super().is_spared(node, taker, arrival)


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
    """The nodes that may leave one tier, the first to leave on top.

    The heap knows the place of each node's entry: adding, moving and removing a node costs
    O(log n). No eviction pays for nodes that were used since the last one. An entry has the order
    that its node had when it was added or refreshed. Use alone moves a node backward, so `first`
    compares the first entry with its node.

    Source: Sedgewick and Wayne, "Algorithms", 4th ed., section 2.4: indexed priority queue.

    Args:
        is_candidate: True if a node may be evicted.
    """

    def __init__(
        self, strategy: EvictionStrategy, is_candidate: Callable[[TreeNode], bool]
    ) -> None:
        self.strategy = strategy
        self._is_candidate = is_candidate
        self._heap: list[_Entry] = []
        self.places: dict[int, int] = {}
        """Index of each node's entry, by the node's id. Read only."""

    def __contains__(self, node: TreeNode) -> bool:
        return node.id in self.places

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, node: TreeNode) -> None:
        """Add `node` if it is a candidate. Call it whenever the node may have become one."""
        if node.id not in self.places and self._is_candidate(node):
            entry = self.strategy.eviction_order(node), node.id, node
            self._heap.append(entry)
            self._rise(len(self._heap) - 1, entry)

    def refresh(self, node: TreeNode) -> None:
        """Update the place of `node`, if it is a candidate."""
        place = self.places.get(node.id)
        if place is not None:
            entry = self.strategy.eviction_order(node), node.id, node
            if entry[0] != self._heap[place][0]:
                self._put(place, entry)

    def discard(self, node: TreeNode) -> None:
        """Forget `node`. Call it whenever the node is no candidate any more."""
        place = self.places.pop(node.id, None)
        if place is None:
            return
        last = self._heap.pop()
        if place < len(self._heap):
            self._put(place, last)

    def first(self) -> TreeNode | None:
        """The node to evict next; None if there is no candidate."""
        while self._heap:
            known, _, node = self._heap[0]
            assert self._is_candidate(node), f"{node} is in use, and offered"
            order = self.strategy.eviction_order(node)
            if order <= known:
                return node
            self._put(0, (order, node.id, node))
        return None

    def pop(self) -> TreeNode | None:
        """Remove and return the node to evict next; None if there is no candidate."""
        node = self.first()
        if node is not None:
            self.discard(node)
        return node

    def clear(self) -> None:
        """Forget all candidates."""
        self._heap.clear()
        self.places.clear()

    def check(self, node: TreeNode) -> None:
        """Assert that `node` is here if and only if it is a candidate, and in its place."""
        place, is_candidate = self.places.get(node.id), self._is_candidate(node)
        if place is None:
            assert not is_candidate, f"{node} may lose its slots, and is not offered"
            return
        assert is_candidate, f"{node} may not lose its slots, and is offered"
        above = self._heap[(place - 1) // 2] if place else self._heap[0]
        is_in_order = above[:2] <= self._heap[place][:2]
        assert is_in_order and self._heap[place][2] is node, f"{node} is in another's place"

    def _put(self, place: int, entry: _Entry) -> None:
        """Put `entry` into the heap, in place of the entry at `place`."""
        if place and entry < self._heap[(place - 1) // 2]:
            self._rise(place, entry)
        else:
            self._sink(place, entry)

    def _rise(self, place: int, entry: _Entry) -> None:
        heap, places = self._heap, self.places
        while place:
            above = (place - 1) // 2
            if heap[above] < entry:
                break
            heap[place] = heap[above]
            places[heap[place][1]] = place
            place = above
        heap[place] = entry
        places[entry[1]] = place

    def _sink(self, place: int, entry: _Entry) -> None:
        heap, places = self._heap, self.places
        below, end = 2 * place + 1, len(self._heap)
        while below < end:
            if below + 1 < end and heap[below + 1] < heap[below]:
                below += 1
            if entry < heap[below]:
                break
            heap[place] = heap[below]
            places[heap[place][1]] = place
            place, below = below, 2 * below + 1
        heap[place] = entry
        places[entry[1]] = place


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
                break  # All nodes above have it too.
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

    def arrival_of(self, rid: str) -> int | None:
        """Arrival number of request `rid`; None: it does not wait."""
        return self._arrivals.get(rid)

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

    def check(self, nodes: Iterable[TreeNode]) -> Parts:
        """Assert that every mark belongs to a waiting request, and that none is missing, in
        parts."""
        meter = Meter()
        wanted: dict[int, list[int]] = {}
        for arrival, end in sorted(self._ends.items()):
            path = end.path_up()
            assert end.is_in_tree or (not path and end.id == ROOT_ID), f"{end} has left the tree"
            for at in path:
                wanted.setdefault(at.id, []).append(arrival)
            if meter.spend(NODE_ITEMS // 8 * len(path)):
                yield
        for node in nodes:
            expected = wanted.get(node.id, [])
            assert node.wanted_by == expected, f"{node} is wanted by {node.wanted_by}: {expected}"
            if meter.spend(NODE_ITEMS // 8):
                yield
