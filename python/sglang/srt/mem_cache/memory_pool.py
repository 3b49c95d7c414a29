"""L1, device memory: its pools, under the path where readers look for them."""

from sglang.srt.mem_cache.device.indexer_pool import NSAIndexerPool
from sglang.srt.mem_cache.device.memory_pool import KVCache, MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.device.mla_pool import MLATokenToKVPool

__all__ = ["KVCache", "MHATokenToKVPool", "MLATokenToKVPool", "NSAIndexerPool", "ReqToTokenPool"]
