"""Re-exports the interface of prefix caches to the scheduler at SGLang's path."""

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
