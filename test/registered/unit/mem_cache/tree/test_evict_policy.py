"""Orders of eviction: which entries a heap keeps."""

from __future__ import annotations

import pytest

from sglang.srt.mem_cache.tree.evict_policy import EvictionHeap, get_eviction_strategy
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


@pytest.mark.parametrize("stays", [True, False], ids=["evicted", "no candidates any more"])
def test_a_heap_that_is_emptied_keeps_few_entries(stays: bool) -> None:
    """Each node has a second entry behind all others: it was needed until a request left."""
    nodes = [TreeNode(number, RadixKey([number])) for number in range(1, 91)]
    candidates = set(nodes)
    heap = EvictionHeap(get_eviction_strategy("lru"), candidates.__contains__)
    for node in nodes:
        node.last_access_time = 1000 + node.id
        heap.offer(node)
    for node in nodes:
        node.last_access_time = node.id
        heap.refresh(node)
    heap.check(nodes)
    if not stays:
        candidates.difference_update(nodes[:85])
    for left in range(89 if stays else 4, -1, -1):
        assert heap.pop() is nodes[89 - left]
        heap.check(nodes)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
