"""Arguments of prefix caches."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import TYPE_CHECKING

from sglang.srt.distributed.rank_group import RankGroup, SingleRank

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.device.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.device.pool_registry import ModelPools
    from sglang.srt.mem_cache.tree.held_pages import HeldPages


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheInitParams:
    """Arguments of every prefix cache."""

    disable: bool
    """Keep no pages across requests."""
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator
    page_size: int
    """Tokens of a page."""
    eviction_policy: str = "lru"
    weights_identity: str = ""
    """Digest of weights and configuration: engines with different digests share no pages in L3."""
    tp_cache_group: RankGroup = dataclasses.field(default_factory=SingleRank)
    """All ranks whose caches must be equal, for any split of the model over them. SGLang's
    `attn_cp_cache_group` and `attn_tp_cache_group` are parts of this group."""
    metrics_registry: CollectorRegistry | None = None
    """Registry of the cache's metrics; None: it keeps none."""
    model_pools: ModelPools | None = None
    """Pools of all kinds of state that the model keeps; None: only the allocator's pool."""
    mamba_snapshot_alignment: int | None = None
    """Snapshots are taken at multiples of so many tokens, so that a page and a chunk of the
    kernel end there; None: the end of any page."""
    mamba_max_states_per_path: int = -1
    """See `StateComponent.max_per_path`."""
    pages_alone: bool = False
    """See `StateComponent.pages_alone`."""
    tenant_key: bytes | None = None
    """Secret of the labels of tenants, at most 64 bytes; None: a new one."""
    bytes_per_token: Fraction | int = 0
    """Bytes of a token in the pages of all pools."""
    session_share: float = 0.0
    """Part of each tier that hints of sessions may keep."""
    session_ttl: float = 0.0
    """Seconds for which they keep it."""
    enable_kv_cache_events: bool = False
    """True if `take_events` answers; somebody must call it then."""
    held_pages: HeldPages | None = None
    """Notes which pages the tree has; None: nobody wants to know."""
    announce_keyed: bool = False
    """True if those events also tell of prompts with an `extra_key` or a `cache_salt`."""
