"""Marks of the nodes that waiting requests will use, so that these are evicted last.

A request is matched when it arrives, and the nodes of its prefix are marked until it is scheduled
or aborted; nodes that are read from L3 meanwhile are marked too. Marked nodes are evicted after all
others, the one needed last first. Without waiting requests the order of eviction is the usual one.

Source: Gao et al., "Cost-Efficient Large Language Model Serving for Multi-turn Conversations with
CachedAttention", USENIX ATC'24: scheduler-aware eviction, here on a radix tree.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from sglang.srt.mem_cache.tree.tree_node import TreeNode


class LookAhead:
    """The marks of one tree's waiting requests. Scheduler thread only.

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
        """`node`, a leaf, is about to leave the tree."""
        assert node.parent is not None
        for arrival in node.wanted_by:
            self._ends[arrival] = node.parent

    def clear(self) -> None:
        """Drop all marks: the tree is new."""
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
