"""L2, host memory: the front of the host pools. See `host_pool` for units and threads."""

from typing import Final

from sglang.srt.environ import envs
from sglang.srt.mem_cache.host.host_memory import HostTensorAllocator as HostTensorAllocator
from sglang.srt.mem_cache.host.host_pool import HostKVCache as HostKVCache
from sglang.srt.mem_cache.host.host_pool_group import HostPoolGroup as HostPoolGroup
from sglang.srt.mem_cache.host.host_pool_group import PoolEntry as PoolEntry
from sglang.srt.mem_cache.host.pool_kinds import DSAIndexerPoolHost as DSAIndexerPoolHost
from sglang.srt.mem_cache.host.pool_kinds import MambaPoolHost as MambaPoolHost
from sglang.srt.mem_cache.host.pool_kinds import MHATokenToKVPoolHost as MHATokenToKVPoolHost
from sglang.srt.mem_cache.host.pool_kinds import MLATokenToKVPoolHost as MLATokenToKVPoolHost
from sglang.srt.mem_cache.host.pool_kinds import NSAIndexerPoolHost as NSAIndexerPoolHost

HICACHE_HOST_MEMORY_RESERVE_BYTES: Final = envs.HICACHE_HOST_MEMORY_RESERVE_BYTES
"""The setting; `get()` returns the bytes of host memory that L2 leaves free."""
