"""L2, host memory: the front of the host pools. See `host_pool` for units and threads."""

from typing import Final

from sglang.srt.environ import envs
from sglang.srt.mem_cache.host.host_memory import HostTensorAllocator
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.host.host_pool_group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.host.pool_kinds import (
    DSAIndexerPoolHost,
    MambaPoolHost,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    NSAIndexerPoolHost,
)

HICACHE_HOST_MEMORY_RESERVE_BYTES: Final = envs.HICACHE_HOST_MEMORY_RESERVE_BYTES
"""The setting; `get()` returns the bytes of host memory that L2 leaves free."""

__all__ = [
    "HICACHE_HOST_MEMORY_RESERVE_BYTES",
    "DSAIndexerPoolHost",
    "HostKVCache",
    "HostPoolGroup",
    "HostTensorAllocator",
    "MHATokenToKVPoolHost",
    "MLATokenToKVPoolHost",
    "MambaPoolHost",
    "NSAIndexerPoolHost",
    "PoolEntry",
]
