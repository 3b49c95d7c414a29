"""What a prefix cache is built from, under the path where readers look for it."""

from sglang.srt.mem_cache.tree.cache_init_params import CacheInitParams

__all__ = ["CacheInitParams"]
