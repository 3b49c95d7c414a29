"""Re-exports the eviction orders at SGLang's path."""

from sglang.srt.mem_cache.tree.evict_policy import EvictionStrategy as EvictionStrategy
from sglang.srt.mem_cache.tree.evict_policy import FIFOStrategy as FIFOStrategy
from sglang.srt.mem_cache.tree.evict_policy import FILOStrategy as FILOStrategy
from sglang.srt.mem_cache.tree.evict_policy import LFUStrategy as LFUStrategy
from sglang.srt.mem_cache.tree.evict_policy import LRUStrategy as LRUStrategy
from sglang.srt.mem_cache.tree.evict_policy import MRUStrategy as MRUStrategy
from sglang.srt.mem_cache.tree.evict_policy import PriorityStrategy as PriorityStrategy
from sglang.srt.mem_cache.tree.evict_policy import SLRUStrategy as SLRUStrategy
