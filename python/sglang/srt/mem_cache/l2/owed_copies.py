"""Copies to L2 that wait for room.

Threads: the scheduler's only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree
    from sglang.srt.mem_cache.tree.tree_node import TreeNode


class OwedCopies:
    """Nodes up to whose ends L2 lacks pages or states, in the order of their last use.

    Nothing keeps them in L1: a node that leaves the tree leaves the queue, which is therefore no
    longer than the tree.

    Attributes:
        nodes: The nodes by id. Those that are given up leave.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self.nodes: dict[int, TreeNode] = {}
        tree.keepers.append(self)

    def add(self, node: TreeNode) -> None:
        """Put `node` behind all others."""
        self.nodes.pop(node.id, None)
        self.nodes[node.id] = node

    def on_delete(self, node: TreeNode) -> None:
        """See `NodeKeeper`."""
        self.nodes.pop(node.id, None)

    def on_reset(self, nodes: Sequence[TreeNode]) -> None:
        """See `NodeKeeper`."""
        self.nodes.clear()

    def check(self) -> None:
        """Assert that all nodes are in the tree."""
        for node in self.nodes.values():
            assert node.is_in_tree, f"{node} has left the tree, and its copy waits"

    def resume(
        self,
        first_due: Callable[[TreeNode], TreeNode | None],
        begin: Callable[[TreeNode], TreeNode | None],
        *,
        newest_first: bool,
    ) -> None:
        """Begin the copies while there is room.

        Args:
            first_due: The first node on the way down to a node that has to be copied; None: there
                is none. Splits move the first pages of a node to nodes above it.
            begin: Begins the copy of a node, or of its front, which it splits off; returns the node
                that is copied. None: there is no room.
            newest_first: The nodes used last come first.
        """
        while self.nodes:
            ids = reversed(self.nodes) if newest_first else iter(self.nodes)
            node = self.nodes[next(ids)]
            due = first_due(node)
            copied = None if due is None else begin(due)
            if due is not None and copied is None:
                return
            if copied is None or copied is node:
                del self.nodes[node.id]
