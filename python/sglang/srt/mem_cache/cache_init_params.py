"""Re-exports the arguments of prefix caches at SGLang's path."""

from sglang.srt.mem_cache.tree.base_prefix_cache import CacheInitParams as CacheInitParams
