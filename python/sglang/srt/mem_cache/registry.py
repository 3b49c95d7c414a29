"""Which prefix cache a server gets."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.mem_cache.tiers.hiradix_cache import HiCacheArgs, HiRadixCache
from sglang.srt.mem_cache.tree.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.tree.radix_cache import RadixCache


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCacheBuildContext:
    """What the choice depends on."""

    server_args: HiCacheArgs
    params: CacheInitParams
    enable_hierarchical_cache: bool


def create_tree_cache(ctx: TreeCacheBuildContext) -> RadixCache:
    """One tier, or the hierarchy where it is enabled. Raises as `HiRadixCache` does."""
    if ctx.enable_hierarchical_cache:
        return HiRadixCache(ctx.params, ctx.server_args)
    return RadixCache(ctx.params)
