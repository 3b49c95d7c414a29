"""Re-exports the events of KV blocks at SGLang's path."""

from sglang.srt.mem_cache.tree.kv_events import AllBlocksCleared as AllBlocksCleared
from sglang.srt.mem_cache.tree.kv_events import BlockRemoved as BlockRemoved
from sglang.srt.mem_cache.tree.kv_events import BlockStored as BlockStored
from sglang.srt.mem_cache.tree.kv_events import EventBatch as EventBatch
from sglang.srt.mem_cache.tree.kv_events import KVCacheEvent as KVCacheEvent
from sglang.srt.mem_cache.tree.kv_events import KVEventBatch as KVEventBatch
from sglang.srt.mem_cache.tree.kv_events import StorageMedium as StorageMedium
