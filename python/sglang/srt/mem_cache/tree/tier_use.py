"""Figures for operators: the use of a tier's slots, and the prefixes that are used most.

Threads: the scheduler's only.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sglang.srt.mem_cache.tree.tree_node import TreeNode, parts_of

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.tree.host_tier import HostTier
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree

_MAX_SCANNED: Final = 20_000
"""Nodes that one search for busy prefixes looks at."""
_SHOWN_DIGITS: Final = 16


class HostUse(NamedTuple):
    """Tokens of L2 by use; together they are its size."""

    in_flight: int
    """Owned by copies and reads that have not ended."""
    locked: int
    """Cached, and read by copies to L1 or writes to L3."""
    evictable: int
    """Cached and not in use."""
    free: int


def host_use(
    tier: HostTier,
    owned: Iterable[torch.Tensor],
    pinned: Iterable[tuple[TreeNode, int]],
) -> HostUse:
    """The use of the pages of L2. Its cost grows with the operations in flight, not with the tree.

    Args:
        owned: int64 slots of pages that operations own.
        pinned: For each operation that pins cached pages, the node and the number of tokens up to
            its end.
    """
    in_flight, free = sum(map(len, owned)), tier.pool.available_size()
    nodes = {part.id: part for node, length in pinned for part, _, _ in parts_of(node, length)}
    locked = sum(
        len(node.host_value)
        for node in nodes.values()
        if node.host_ref_counter and node.host_value is not None
    )
    return HostUse(in_flight, locked, tier.pool.size - free - in_flight - locked, free)


def busiest_prefixes(tree: PrefixTree, storage_epoch: int, count: int) -> list[dict[str, Any]]:
    """The `count` prefixes that the most requests used, without tokens: a hash, lengths and tiers.

    A request that uses a node uses its ancestors too, so that a best-first search finds them
    without a walk over the tree. A prefix is left out if a longer one was used as often. New nodes
    come before old ones with as many uses. The search stops at 20,000 nodes; among more siblings it
    looks at the newest.

    Args:
        storage_epoch: The present epoch of L3; pages of earlier ones may be gone.
    """
    found: list[dict[str, Any]] = []
    scanned = 0
    heap: list[tuple[int, int, int, TreeNode]] = []
    at, depth = tree.root, 0
    while len(found) < count:
        budget = _MAX_SCANNED - scanned
        best = 0
        for child in itertools.islice(reversed(at.children.values()), budget):
            scanned += 1
            best = max(best, child.hit_count)
            heapq.heappush(heap, (-child.hit_count, -child.id, depth + len(child.key), child))
        if at is not tree.root and best < at.hit_count:
            found.append(_describe(at, depth, storage_epoch))
        if not heap:
            break
        _, _, depth, at = heapq.heappop(heap)
        if not at.hit_count:
            break
    return found


def _describe(node: TreeNode, depth: int, storage_epoch: int) -> dict[str, Any]:
    tiers = {
        "L1": node.value is not None,
        "L2": node.host_value is not None,
        "L3": node.storage_epoch == storage_epoch,
    }
    assert node.prefix is not None, "it is in the tree"
    return {
        "hash": node.prefix.hexdigest()[:_SHOWN_DIGITS],
        "tokens": depth,
        "uses": node.hit_count,
        "tiers": [name for name, has in tiers.items() if has],
        "locked": node.lock_ref > 0,
        "waiting": len(node.wanted_by),
    }
