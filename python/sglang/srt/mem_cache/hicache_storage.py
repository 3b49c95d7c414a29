"""L3, the shared store below host memory: the interface that backends implement.

The front of the package `storage`: everything that a third-party backend or the cache controller
imports has its name here. Objects are immutable pages under
`{namespace}/{page_hash}/{pool}[/{shard}]`.
"""

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer, SidecarPoolSpec
from sglang.srt.mem_cache.device.state_spec import PoolHitPolicy, PoolName
from sglang.srt.mem_cache.storage.base import HiCacheStorage
from sglang.srt.mem_cache.storage.file_store import HiCacheFile
from sglang.srt.mem_cache.storage.types import (
    CacheOutcome,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PageResult,
    PlainHostPool,
    PoolResults,
    PoolTransferResult,
    PrefetchTimeoutConfig,
    StoragePool,
    StorageUnavailable,
    StorageUnreachable,
)

__all__ = [
    "CacheOutcome",
    "HiCacheFile",
    "HiCacheStorage",
    "HiCacheStorageConfig",
    "HiCacheStorageExtraInfo",
    "PageResult",
    "PlainHostPool",
    "PoolHitPolicy",
    "PoolName",
    "PoolResults",
    "PoolTransfer",
    "PoolTransferResult",
    "PrefetchTimeoutConfig",
    "SidecarPoolSpec",
    "StoragePool",
    "StorageUnavailable",
    "StorageUnreachable",
]
