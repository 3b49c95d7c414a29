"""Re-exports the pools of L1, device memory, at SGLang's path."""

from sglang.srt.mem_cache.device.hybrid_req_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.device.indexer_pool import NSAIndexerPool
from sglang.srt.mem_cache.device.mamba_pool import MambaPool
from sglang.srt.mem_cache.device.memory_pool import KVCache, MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.device.mla_pool import MLATokenToKVPool
from sglang.srt.mem_cache.device.nsa_pool import DSATokenToKVPool, NSATokenToKVPool

__all__ = [
    "DSATokenToKVPool",
    "HybridReqToTokenPool",
    "KVCache",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "MambaPool",
    "NSAIndexerPool",
    "NSATokenToKVPool",
    "ReqToTokenPool",
]
