"""L2, host memory: the front of the host pools. See `host_pool` for units and threads."""

from sglang.srt.mem_cache.device.state_pool import DevicePool
from sglang.srt.mem_cache.host.host_memory import HostTensorAllocator
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.host.host_pool_group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.host.mamba_host_pool import MambaPoolHost
from sglang.srt.mem_cache.host.mha_host_pool import MHATokenToKVPoolHost

__all__ = [
    "DevicePool",
    "HostKVCache",
    "HostPoolGroup",
    "HostTensorAllocator",
    "MHATokenToKVPoolHost",
    "MambaPoolHost",
    "PoolEntry",
]
