"""Re-exports the prefix cache of three tiers at SGLang's path."""

from sglang.srt.mem_cache.tiers.hiradix_cache import HiRadixCache

__all__ = ["HiRadixCache"]
