"""Counts of the states that leave a tier without the pages before them."""

from __future__ import annotations

from collections import Counter

import torch

from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.tree.pool_tier import PoolTier
from sglang.srt.mem_cache.tree.tree_node import TreeNode


def count_states_apart(tree: RadixCache, counts: Counter[str]) -> None:
    """Count, in `counts`, windows and recurrent states that leave a tier of `tree` from now on,
    while later pages of their prompts stay."""
    nodes = tree.tree
    for component in nodes.components:
        _count(component.device, nodes.device, "states evicted apart from device", counts)
        if hasattr(component, "host"):
            _count(component.host, nodes.host, "states evicted apart from host", counts)


def _count(states: PoolTier, pages: PoolTier, name: str, counts: Counter[str]) -> None:
    take_off = states.take_off

    def counted(node: TreeNode) -> torch.Tensor:
        # Pages leave after those of their children.
        counts[name] += any(pages.get(child) is not None for child in node.children.values())
        return take_off(node)

    vars(states)["take_off"] = counted
