"""Re-exports the interface of prefix caches to the scheduler at SGLang's path."""

from sglang.srt.mem_cache.tree.base_prefix_cache import BasePrefixCache as BasePrefixCache
from sglang.srt.mem_cache.tree.base_prefix_cache import CacheableRequest as CacheableRequest
from sglang.srt.mem_cache.tree.base_prefix_cache import DecLockRefResult as DecLockRefResult
from sglang.srt.mem_cache.tree.base_prefix_cache import EvictParams as EvictParams
from sglang.srt.mem_cache.tree.base_prefix_cache import EvictResult as EvictResult
from sglang.srt.mem_cache.tree.base_prefix_cache import IncLockRefResult as IncLockRefResult
from sglang.srt.mem_cache.tree.base_prefix_cache import InitLoadBackParams as InitLoadBackParams
from sglang.srt.mem_cache.tree.base_prefix_cache import InsertParams as InsertParams
from sglang.srt.mem_cache.tree.base_prefix_cache import InsertResult as InsertResult
from sglang.srt.mem_cache.tree.base_prefix_cache import MatchPrefixParams as MatchPrefixParams
from sglang.srt.mem_cache.tree.base_prefix_cache import MatchResult as MatchResult
