"""Prefix cache of up to three tiers for models with recurrent states.

Its flows are the same as for other models; states move with the pages. See `docs/hicache.md`.
"""

from __future__ import annotations

from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.l2.cache_controller import HiCacheArgs
from sglang.srt.mem_cache.mamba_radix_cache import check_has_states


class HiMambaRadixCache(HiRadixCache):
    """Prefix cache of pages and recurrent states in device memory, host memory and a store.

    Raises:
        ValueError: `params.model_pools` has no recurrent states, or a reason of `HiRadixCache`.
        StorageUnreachable: See `HiRadixCache`.
    """

    def __init__(self, params: CacheInitParams, server_args: HiCacheArgs) -> None:
        check_has_states(params)
        super().__init__(params, server_args)
