"""Choice of a server's prefix cache."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.mem_cache.hi_mamba_radix_cache import HiMambaRadixCache
from sglang.srt.mem_cache.mamba_radix_cache import MambaRadixCache
from sglang.srt.mem_cache.tiers.hiradix_cache import HiCacheArgs, HiRadixCache
from sglang.srt.mem_cache.tree.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.tree.radix_cache import RadixCache, mamba_pool_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCacheBuildContext:
    """Inputs of the choice."""

    server_args: HiCacheArgs
    params: CacheInitParams
    enable_hierarchical_cache: bool


def create_tree_cache(ctx: TreeCacheBuildContext) -> RadixCache:
    """Make the prefix cache: one tier, or the hierarchy if it is enabled; with recurrent states if
    the model has them. Raises as `HiRadixCache` does."""
    has_states = mamba_pool_of(ctx.params) is not None
    if ctx.enable_hierarchical_cache:
        kind = HiMambaRadixCache if has_states else HiRadixCache
        return kind(ctx.params, ctx.server_args)
    return MambaRadixCache(ctx.params) if has_states else RadixCache(ctx.params)
