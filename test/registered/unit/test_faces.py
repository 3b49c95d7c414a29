"""Names that third-party backends and upstream's tests import, under upstream's paths.

The list is complete: a name that joins upstream's surface is added here with its code.
"""

from __future__ import annotations

import importlib
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

import sglang
from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

NAMES: Final[Mapping[str, str]] = {
    "disaggregation.kv_events": (
        "AllBlocksCleared BlockRemoved BlockStored EventBatch KVCacheEvent KVEventBatch "
        "StorageMedium"
    ),
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
    "mem_cache.registry": (
        "TreeCacheBuildContext create_tree_cache default_radix_cache_factory "
        "get_radix_cache_factory register_radix_cache_backend registered_radix_cache_backends"
    ),
    "mem_cache.storage.backend_factory": "StorageBackendFactory",
    "mem_cache.storage.mooncake_store.mooncake_store": (
        "MooncakeBaseStore MooncakeHostTensorAllocator MooncakeStore MooncakeStoreConfig"
    ),
    "mem_cache.utils": (
        "compute_node_hash_values get_eviction_strategy get_hash_str hash_str_to_int64 "
        "maybe_init_custom_mem_pool split_node_hash_value"
    ),
    "utils": "is_port_available",
    "utils.auth": (
        "AuthDecision AuthLevel add_api_key_middleware app_has_admin_force_endpoints "
        "auth_level decide_request_auth"
    ),
}
"""Modules below `sglang.srt`, and their names."""

UNCALLED: Final[Mapping[str, str]] = {
    "distributed.device_communicators.mooncake_transfer_engine": (
        "MooncakeTransferEngine.get_engine"
    ),
    "mem_cache.allocator.base": "BaseTokenToKVPoolAllocator.size_full",
    "mem_cache.hiradix_cache": "HiRadixCache.write_backup",
    "mem_cache.memory_pool_host": "HostKVCache.is_stride_page_aligned",
    "mem_cache.radix_cache": "RadixCache.pretty_print",
}
"""Methods of upstream's surface that stay for third parties alone: the package calls none."""


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in NAMES.items() for name in names.split()],
)
def test_the_name_is_where_upstream_has_it(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(f"sglang.srt.{module}"), name)


@pytest.mark.parametrize("module", UNCALLED)
def test_third_parties_alone_call_the_method(module: str) -> None:
    of_class, method = UNCALLED[module].split(".")
    assert hasattr(getattr(importlib.import_module(f"sglang.srt.{module}"), of_class), method)
    files = Path(sglang.__file__).parent.rglob("*.py")
    called = [file for file in files if re.search(rf"[.]{method}\b", file.read_text())]
    assert not called, f"{called} call {method}: take it out of `UNCALLED`"


def test_the_router_s_launcher_finds_its_imports() -> None:
    launcher = importlib.import_module("sglang_router.launch_server")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", get_free_port()))
        listener.listen(1)
        taken = listener.getsockname()[1]
        assert not launcher.is_port_available(taken)
        (port,) = launcher.find_available_ports(taken, 1)
    assert port != taken
