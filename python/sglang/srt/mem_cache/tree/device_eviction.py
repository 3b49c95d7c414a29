"""Eviction from L1 where no tier is below it: pages and states that leave are dropped.

Threads: the scheduler's only.
"""

from __future__ import annotations

from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree
from sglang.srt.mem_cache.tree.state_component import StateComponent


class DeviceEviction:
    """Evicts from L1 in the order of the tree's heaps.

    Args:
        tree: Tree of the nodes.
        states: Its recurrent states; None: the model has none.
    """

    def __init__(self, tree: PrefixTree, states: StateComponent | None) -> None:
        self._tree = tree
        self._states = states

    def evict(self, num_tokens: int) -> int:
        """Free at least `num_tokens` device slots if there are candidates; return the freed
        tokens."""
        freed = 0
        while freed < num_tokens and (node := self._tree.device_heap.pop()) is not None:
            above = node.parent
            assert above is not None
            value = self._tree.take_off_device(node)
            self._tree.free_slots(value)
            self._tree.delete(node)
            freed += len(value) + self._tree.prune(above)
        return freed

    def evict_states(self, num: int) -> int:
        """Free `num` states if there are enough candidates; return the freed states. Nodes that
        become useless are deleted too."""
        states = self._states
        assert states is not None, "this model has no states"
        freed = 0
        while freed < num and (node := states.heap.pop()) is not None:
            states.pool.free(states.take_off_device(node))
            self._tree.prune(node)
            freed += 1
        return freed
