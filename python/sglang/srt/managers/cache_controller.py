"""Re-exports the controller of copies between the tiers at SGLang's path."""

from sglang.srt.mem_cache.l2.cache_controller import (
    CacheOperation,
    HiCacheAck,
    HiCacheController,
    LayerDoneCounter,
)
from sglang.srt.mem_cache.l3.storage_operation import PrefetchOperation, StorageOperation

__all__ = [
    "CacheOperation",
    "HiCacheAck",
    "HiCacheController",
    "LayerDoneCounter",
    "PrefetchOperation",
    "StorageOperation",
]
