"""Re-exports the radix tree of L1 at SGLang's path."""

from sglang.srt.mem_cache.tree.radix_cache import RadixCache as RadixCache
from sglang.srt.mem_cache.tree.radix_key import RadixKey as RadixKey
from sglang.srt.mem_cache.tree.tree_node import TreeNode as TreeNode
