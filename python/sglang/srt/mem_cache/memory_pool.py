"""Re-exports the pools of L1, device memory, at SGLang's path."""

from sglang.srt.mem_cache.device.memory_pool import (
    HybridReqToTokenPool,
    KVCache,
    MHATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.device.mla_pool import MLATokenToKVPool
from sglang.srt.mem_cache.device.nsa_pool import DSATokenToKVPool, NSAIndexerPool, NSATokenToKVPool
from sglang.srt.mem_cache.device.state_pool import MambaPool

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
