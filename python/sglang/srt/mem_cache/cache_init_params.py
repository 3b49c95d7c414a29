"""Arguments of prefix caches, under the path where readers look for them."""

from sglang.srt.mem_cache.tree.cache_init_params import CacheInitParams

__all__ = ["CacheInitParams"]
