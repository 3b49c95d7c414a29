"""L1, device memory: its pools, under the path where readers look for them."""

from sglang.srt.mem_cache.device.mamba_pool import MambaPool
from sglang.srt.mem_cache.device.memory_pool import KVCache, MHATokenToKVPool, ReqToTokenPool

__all__ = ["KVCache", "MHATokenToKVPool", "MambaPool", "ReqToTokenPool"]
