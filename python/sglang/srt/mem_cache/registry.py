"""Which prefix cache a server gets."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.mem_cache.hi_mamba_radix_cache import HiMambaRadixCache
from sglang.srt.mem_cache.mamba_radix_cache import MambaRadixCache
from sglang.srt.mem_cache.tiers.hiradix_cache import HiCacheArgs, HiRadixCache
from sglang.srt.mem_cache.tree.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.tree.radix_cache import RadixCache, mamba_pool_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCacheBuildContext:
    """What the choice depends on."""

    server_args: HiCacheArgs
    params: CacheInitParams
    enable_hierarchical_cache: bool


def create_tree_cache(ctx: TreeCacheBuildContext) -> RadixCache:
    """One tier, or the hierarchy where it is enabled; with recurrent states, where the model has
    some. Raises as `HiRadixCache` does."""
    has_states = mamba_pool_of(ctx.params) is not None
    if ctx.enable_hierarchical_cache:
        kind = HiMambaRadixCache if has_states else HiRadixCache
        return kind(ctx.params, ctx.server_args)
    return MambaRadixCache(ctx.params) if has_states else RadixCache(ctx.params)
