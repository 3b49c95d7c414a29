"""Names that third-party backends and upstream's tests import, under upstream's paths.

What is listed is what there is: a name that joins upstream's surface is added here with its code.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Final

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

NAMES: Final[Mapping[str, str]] = {
    "managers.cache_controller": (
        "CacheOperation HiCacheAck HiCacheController LayerDoneCounter PrefetchOperation "
        "StorageOperation"
    ),
    "mem_cache.allocator.base": "BaseTokenToKVPoolAllocator",
    "mem_cache.allocator.paged": "PagedTokenToKVPoolAllocator",
    "mem_cache.allocator.token": "TokenToKVPoolAllocator",
    "mem_cache.base_prefix_cache": (
        "BasePrefixCache DecLockRefResult EvictParams EvictResult IncLockRefResult "
        "InitLoadBackParams InsertParams InsertResult MatchPrefixParams MatchResult"
    ),
    "mem_cache.cache_init_params": "CacheInitParams",
    "mem_cache.evict_policy": (
        "EvictionStrategy FIFOStrategy FILOStrategy LFUStrategy LRUStrategy MRUStrategy "
        "PriorityStrategy SLRUStrategy"
    ),
    "mem_cache.hicache_storage": (
        "HiCacheFile HiCacheStorage HiCacheStorageConfig HiCacheStorageExtraInfo "
        "PoolHitPolicy PoolName PoolTransfer PoolTransferResult PrefetchTimeoutConfig "
        "SidecarPoolSpec"
    ),
    "mem_cache.hi_mamba_radix_cache": "HiMambaRadixCache",
    "mem_cache.hiradix_cache": "HiRadixCache",
    "mem_cache.hybrid_cache.hybrid_pool_assembler": (
        "build_mamba_hybrid_stack build_nsa_hybrid_stack"
    ),
    "mem_cache.mamba_radix_cache": "MambaRadixCache",
    "mem_cache.memory_pool": (
        "DSATokenToKVPool HybridReqToTokenPool KVCache MambaPool MHATokenToKVPool "
        "MLATokenToKVPool NSATokenToKVPool ReqToTokenPool"
    ),
    "mem_cache.memory_pool_host": (
        "DSAIndexerPoolHost HICACHE_HOST_MEMORY_RESERVE_BYTES HostKVCache HostPoolGroup "
        "HostTensorAllocator MambaPoolHost MHATokenToKVPoolHost MLATokenToKVPoolHost "
        "NSAIndexerPoolHost PoolEntry"
    ),
    "mem_cache.radix_cache": "RadixCache RadixKey TreeNode",
    "mem_cache.registry": "TreeCacheBuildContext create_tree_cache",
    "mem_cache.storage.backend_factory": "StorageBackendFactory",
    "mem_cache.storage.mooncake_store.mooncake_store": (
        "MooncakeBaseStore MooncakeHostTensorAllocator MooncakeStore MooncakeStoreConfig"
    ),
    "utils.auth": (
        "AuthDecision AuthLevel add_api_key_middleware app_has_admin_force_endpoints "
        "auth_level decide_request_auth"
    ),
}
"""Modules below `sglang.srt`, and their names."""


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in NAMES.items() for name in names.split()],
)
def test_the_name_is_where_upstream_has_it(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(f"sglang.srt.{module}"), name)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
