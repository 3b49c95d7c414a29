"""Remembers prefixes that have left the tree, so that evicted tokens can be told from new ones.

A Bloom filter of prefix hashes (Bloom, "Space/time trade-offs in hash coding with allowable
errors", 1970), in two generations: when the newer is full, the older is forgotten. One megabyte,
whatever is cached.

Threads: the scheduler's only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from sglang.srt.mem_cache.tree.digest import PrefixHash, empty_prefix, prefix_with

if TYPE_CHECKING:
    from sglang.srt.mem_cache.tree.radix_key import RadixKey
    from sglang.srt.mem_cache.tree.tree_node import TreeNode

CAPACITY: Final = 1 << 18
"""Prefixes of one generation."""
_BITS: Final = 16 * CAPACITY
_PROBES: Final = 6
"""A full generation has 16 bits and 6 probes for each prefix. It takes a strange prefix for a known
one with a probability of 0.1%; both generations together err in 0.2% of lookups."""
_LEAST_STEP: Final = 64
_LOW: Final = (1 << 32) - 1

Bits = npt.NDArray[np.uint8]


class DepartedPrefixes:
    """Prefixes of one tree that have left all its tiers, by their hash.

    Prefixes are noted every `step` tokens: at each page, or at each 64 tokens if pages are smaller.
    The filter remembers at least the last `CAPACITY` of them, or 16 million tokens.
    """

    def __init__(self, page_size: int) -> None:
        self.step = -(-_LEAST_STEP // page_size) * page_size
        self._new, self._old = (np.zeros(_BITS // 8, dtype=np.uint8) for _ in range(2))
        self._num_new = 0

    def on_delete(self, node: TreeNode) -> None:
        """See `NodeKeeper`: the prefixes that end in `node` have left."""
        assert node.parent is not None
        begin = node.parent.depth
        prefix = (node.parent.prefix or empty_prefix(node.key.extra_key)).copy()
        done, hashes = 0, []
        for end in range(self._next_end(begin), begin + len(node.key.ids) + 1, self.step):
            prefix.update(node.key.ids[done : end - begin].data)
            done = end - begin
            hashes.append(prefix.intdigest())
        if hashes:
            self._set(np.array(hashes, dtype=np.uint64))

    def on_reset(self, nodes: Sequence[TreeNode]) -> None:
        """See `NodeKeeper`."""
        for node in nodes:
            self.on_delete(node)

    def reach(self, key: RadixKey, begin: int) -> int:
        """The number of tokens of `key` up to which the tree has once had it, if that is more than
        the `begin` tokens that it has now; else `begin`.

        Hashes the key once. A prefix leaves the tree after all longer ones, so that the longest
        known one is found by bisection.
        """
        ends = range(self._next_end(begin), len(key.ids) + 1, self.step)
        known, prefix, done = 0, empty_prefix(key.extra_key), 0
        low, high = 0, len(ends)
        while low < high:
            # The first is looked up first: most tokens that are missing are new.
            middle = (low + high) // 2 if known else low
            longer = prefix_with(prefix, key.ids[done : ends[middle]])
            if not self._knows(longer):
                high = middle
                continue
            prefix, done, known = longer, ends[middle], ends[middle]
            low = middle + 1
        return known or begin

    def _next_end(self, begin: int) -> int:
        return begin // self.step * self.step + self.step

    def _set(self, hashes: npt.NDArray[np.uint64]) -> None:
        if self._num_new >= CAPACITY:
            self._new, self._old = self._old, self._new
            self._new.fill(0)
            self._num_new = 0
        self._num_new += len(hashes)
        low, high = hashes & np.uint64(_LOW), hashes >> np.uint64(32) | np.uint64(1)
        probes = np.arange(_PROBES, dtype=np.uint64)[:, None]
        places = ((low + probes * high) % np.uint64(_BITS)).ravel()
        bits = (1 << (places & np.uint64(7)).astype(np.uint8)).astype(np.uint8)
        np.bitwise_or.at(self._new, (places >> np.uint64(3)).astype(np.int64), bits)

    def _knows(self, prefix: PrefixHash) -> bool:
        value = prefix.intdigest()
        low, high = value & _LOW, value >> 32 | 1
        places = [(low + probe * high) % _BITS for probe in range(_PROBES)]
        return any(
            all(int(bits[place >> 3]) >> (place & 7) & 1 for place in places)
            for bits in (self._new, self._old)
        )
