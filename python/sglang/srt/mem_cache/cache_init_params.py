"""Re-exports the arguments of prefix caches at SGLang's path."""

from sglang.srt.mem_cache.tree.cache_init_params import CacheInitParams

__all__ = ["CacheInitParams"]
