"""The radix tree of L1, under the path where readers look for it."""

from sglang.srt.mem_cache.tree.radix_cache import RadixCache
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.tree.tree_node import TreeNode

__all__ = ["RadixCache", "RadixKey", "TreeNode"]
