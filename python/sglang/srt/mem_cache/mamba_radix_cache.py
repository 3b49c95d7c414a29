"""Prefix cache of one tier for models with recurrent states.

Tree, component and tiers are the same as for other models: see `tree/state_component.py`.
"""

from __future__ import annotations

from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, mamba_pool_of


class MambaRadixCache(RadixCache):
    """Prefix cache of pages and recurrent states in device memory.

    Raises:
        ValueError: `params.model_pools` has no recurrent states, or snapshots do not end with a
            page.
    """

    def __init__(self, params: CacheInitParams) -> None:
        check_has_states(params)
        super().__init__(params)


def check_has_states(params: CacheInitParams) -> None:
    """Raise ValueError if the model of `params` has no recurrent states."""
    if mamba_pool_of(params) is None:
        raise ValueError("this prefix cache is for models with recurrent states: `model_pools`")
