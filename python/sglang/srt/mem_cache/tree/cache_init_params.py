"""Arguments of prefix caches: plain values, pools and groups; no server arguments."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from sglang.srt.distributed.rank_group import RankGroup, SingleRank

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.device.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.device.model_pools import ModelPools


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheInitParams:
    """Arguments of every prefix cache."""

    disable: bool
    """Cache nothing across requests."""
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator
    page_size: int
    """Tokens."""
    eviction_policy: str = "lru"
    weights_identity: str = ""
    """Digest of weights and configuration: engines that differ in it share nothing in L3."""
    tp_cache_group: RankGroup = dataclasses.field(default_factory=SingleRank)
    """All ranks whose caches must be equal, whatever splits the model over them. The one group:
    `attn_cp_cache_group` and `attn_tp_cache_group` of upstream name parts of it."""
    metrics_registry: CollectorRegistry | None = None
    """Registry of the cache's metrics; None: it keeps none."""
    model_pools: ModelPools | None = None
    """Every kind of state that the model keeps; None: what the allocator hands out, alone."""
    mamba_snapshot_alignment: int | None = None
    """Tokens: snapshots of recurrent states are taken at multiples of it, which end with a page and
    with a chunk of the kernel; None: at the end of any page."""
