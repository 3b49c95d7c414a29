"""Re-exports the controller of copies between the tiers at SGLang's path."""

from sglang.srt.mem_cache.l2.cache_controller import CacheOperation as CacheOperation
from sglang.srt.mem_cache.l2.cache_controller import HiCacheAck as HiCacheAck
from sglang.srt.mem_cache.l2.cache_controller import HiCacheController as HiCacheController
from sglang.srt.mem_cache.l2.layer_done_counter import LayerDoneCounter as LayerDoneCounter
from sglang.srt.mem_cache.l3.prefetch_table import PrefetchOperation as PrefetchOperation
from sglang.srt.mem_cache.l3.storage_writes import StorageOperation as StorageOperation
