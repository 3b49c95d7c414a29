"""The bytes of pages and states that a tree owns: steps and copies only read them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch

from rigs.caches.host_damage import read_page
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool, PagedDevicePool
from sglang.srt.mem_cache.device.state_pool import StatePool
from sglang.srt.mem_cache.device.state_spec import PoolHitPolicy
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.tree.pool_tier import PoolTier
from sglang.srt.mem_cache.tree.tree_node import TreeNode, parts_of

_Key: TypeAlias = tuple[TreeNode, int, str, int]
"""A node, how often slots of it have left a tier, the pool, and the page or state."""


class StillBytes:
    """Compares what a tree owns with what it owned at the last look. For a device that has done its
    steps when they return.

    Args:
        pools: Device pools of the model.
        looks_at_host: False: bytes in L2 may change.
    """

    def __init__(
        self, tree: RadixCache, pools: Sequence[BaseDevicePool], *, looks_at_host: bool
    ) -> None:
        self._tree = tree
        self._pools = pools
        self._group = None
        if looks_at_host and isinstance(tree, HiRadixCache):
            self._group = tree.cache_controller.mem_pool_host
        self._left: Counter[TreeNode] = Counter()
        self._seen: dict[_Key, torch.Tensor] = {}
        self.num_compared = 0
        """Pages and states that were compared so far."""
        for tier in tree.tree.tiers:
            vars(tier)["take_off"] = self._counting(tier)

    def look(self) -> None:
        """Assert that the pages and states that the tree has kept since the last look have their
        bytes. Loads under way are left out."""
        found = dict(self._owned())
        for key, raw in found.items():
            if (before := self._seen.get(key)) is not None:
                self.num_compared += 1
                node, _, pool, page = key
                assert torch.equal(before, raw), f"bytes of {node} changed: {pool} {page}"
        self._seen = found

    def _counting(self, tier: PoolTier) -> Callable[[TreeNode], torch.Tensor]:
        take_off = tier.take_off

        def counted(node: TreeNode) -> torch.Tensor:
            self._left[node] += 1
            return take_off(node)

        return counted

    def _owned(self) -> Iterator[tuple[_Key, torch.Tensor]]:
        tree = self._tree
        loading, pages_loading = set[TreeNode](), set[TreeNode]()
        if isinstance(tree, HiRadixCache):
            for copy in tree.host_load.loading.values():
                loading.add(copy.node)
                pages_loading |= {node for node, _, _ in parts_of(copy.node, copy.length)}
        for node in tree.nodes():
            states = () if node in loading else node.states
            own = [slot for state in states if (slot := state.value) is not None]
            value = None if node in pages_loading else node.value
            for pool in self._pools:
                name, times = str(pool.spec.name), self._left[node]
                if isinstance(pool, PagedDevicePool):
                    for page in self._pages(value):
                        yield (node, times, name, page), _read(pool, page, pool.page_items)
                elif isinstance(pool, StatePool):
                    for slot in own:
                        yield (node, times, name, int(slot)), _read(pool, int(slot), 1)
            yield from self._owned_on_host(node)

    def _owned_on_host(self, node: TreeNode) -> Iterator[tuple[_Key, torch.Tensor]]:
        for name, entry in self._group.entries.items() if self._group is not None else ():
            pages = self._pages(node.host_value)
            if entry.spec.hit_policy is PoolHitPolicy.TRAILING_PAGES:
                held = (state.host_value for state in node.states)
                pages = [int(slot) for slot in held if slot is not None]
            for page in pages:
                key = (node, self._left[node], f"{name} in L2", page)
                yield key, read_page(entry.host_pool, page)

    def _pages(self, slots: torch.Tensor | None) -> list[int]:
        size = self._tree.page_size
        return [] if slots is None else (slots[::size] // size).tolist()


def _read(pool: BaseDevicePool, page: int, items: int) -> torch.Tensor:
    """A copy of the bytes of a page of `items` items, in all layers."""
    layers = (layer.view(len(layer) // items, -1) for layer in itertools.chain(*pool.parts))
    return torch.cat([layer[page].clone().view(torch.uint8) for layer in layers])
