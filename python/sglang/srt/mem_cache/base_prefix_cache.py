"""The interface of prefix caches to the scheduler, under the path where readers look for it."""

from sglang.srt.mem_cache.tree.base_prefix_cache import (
    BasePrefixCache,
    CacheableRequest,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InitLoadBackParams,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)

__all__ = [
    "BasePrefixCache",
    "CacheableRequest",
    "DecLockRefResult",
    "EvictParams",
    "EvictResult",
    "IncLockRefResult",
    "InitLoadBackParams",
    "InsertParams",
    "InsertResult",
    "MatchPrefixParams",
    "MatchResult",
]
