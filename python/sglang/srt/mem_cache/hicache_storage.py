"""L3, the shared store below host memory: the interface that backends implement.

The front of the package `storage`: everything that a third-party backend or the cache controller
imports has its name here. Objects are immutable pages under
`{namespace}/{page_hash}/{pool}[/{shard}]`.
"""

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer as PoolTransfer
from sglang.srt.mem_cache.device.pool_transfer import SidecarPoolSpec as SidecarPoolSpec
from sglang.srt.mem_cache.device.state_spec import PoolHitPolicy as PoolHitPolicy
from sglang.srt.mem_cache.device.state_spec import PoolName as PoolName
from sglang.srt.mem_cache.storage.base import HiCacheStorage as HiCacheStorage
from sglang.srt.mem_cache.storage.file_store import HiCacheFile as HiCacheFile
from sglang.srt.mem_cache.storage.types import CacheOutcome as CacheOutcome
from sglang.srt.mem_cache.storage.types import HiCacheStorageConfig as HiCacheStorageConfig
from sglang.srt.mem_cache.storage.types import HiCacheStorageExtraInfo as HiCacheStorageExtraInfo
from sglang.srt.mem_cache.storage.types import PageResult as PageResult
from sglang.srt.mem_cache.storage.types import PlainHostPool as PlainHostPool
from sglang.srt.mem_cache.storage.types import PoolResults as PoolResults
from sglang.srt.mem_cache.storage.types import PoolTransferResult as PoolTransferResult
from sglang.srt.mem_cache.storage.types import PrefetchTimeoutConfig as PrefetchTimeoutConfig
from sglang.srt.mem_cache.storage.types import StoragePool as StoragePool
from sglang.srt.mem_cache.storage.types import StorageUnavailable as StorageUnavailable
from sglang.srt.mem_cache.storage.types import StorageUnreachable as StorageUnreachable
from sglang.srt.mem_cache.storage.types import StorageUsage as StorageUsage
