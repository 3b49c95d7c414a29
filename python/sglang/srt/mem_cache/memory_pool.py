"""Re-exports the pools of L1, device memory, at SGLang's path."""

from sglang.srt.mem_cache.device.memory_pool import HybridReqToTokenPool as HybridReqToTokenPool
from sglang.srt.mem_cache.device.memory_pool import KVCache as KVCache
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool as MHATokenToKVPool
from sglang.srt.mem_cache.device.memory_pool import ReqToTokenPool as ReqToTokenPool
from sglang.srt.mem_cache.device.mla_pool import MLATokenToKVPool as MLATokenToKVPool
from sglang.srt.mem_cache.device.nsa_pool import DSATokenToKVPool as DSATokenToKVPool
from sglang.srt.mem_cache.device.nsa_pool import NSAIndexerPool as NSAIndexerPool
from sglang.srt.mem_cache.device.nsa_pool import NSATokenToKVPool as NSATokenToKVPool
from sglang.srt.mem_cache.device.state_pool import MambaPool as MambaPool
