"""The prefix cache of three tiers, under the path where readers look for it."""

from sglang.srt.mem_cache.tiers.hiradix_cache import HiRadixCache

__all__ = ["HiRadixCache"]
