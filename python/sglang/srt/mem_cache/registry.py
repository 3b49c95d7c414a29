"""Choice of a server's prefix cache; third parties add theirs by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hi_mamba_radix_cache import HiMambaRadixCache
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.l2.cache_controller import HiCacheArgs
from sglang.srt.mem_cache.mamba_radix_cache import MambaRadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache, mamba_pool_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCacheBuildContext:
    """Inputs of the choice."""

    server_args: HiCacheArgs
    params: CacheInitParams
    enable_hierarchical_cache: bool
    radix_cache_backend: str | None = None
    """Name of a registered backend; None: the engine's own."""

    @property
    def is_hybrid_ssm(self) -> bool:
        """True if the model has recurrent states."""
        return mamba_pool_of(self.params) is not None

    @property
    def disable_radix_cache(self) -> bool:
        """True if no pages are kept across requests."""
        return self.params.disable


RadixCacheFactory: TypeAlias = Callable[[TreeCacheBuildContext], RadixCache]

_factories: dict[str, RadixCacheFactory] = {}


def register_radix_cache_backend(name: str, factory: RadixCacheFactory) -> None:
    """Let `--radix-cache-backend NAME` (`radix_cache_backend`) choose the caches that `factory`
    makes. Every process of the engine has to call it: where the file that starts the engine does so
    at its top level, they do, because they import that file.

    Args:
        name: Not taken yet, except by the same factory.
        factory: Makes a `RadixCache`, of a class of one's own, from the context's parameters.

    Raises:
        ValueError: The name is empty or taken.
    """
    if not name or _factories.get(name, factory) is not factory:
        raise ValueError(f"radix cache backend {name!r}: the name is empty or taken")
    _factories[name] = factory


def get_radix_cache_factory(name: str) -> RadixCacheFactory:
    """The factory of that name. Raises ValueError that lists the names."""
    try:
        return _factories[name]
    except KeyError:
        known = ", ".join(registered_radix_cache_backends()) or "none"
        raise ValueError(
            f"--radix-cache-backend {name!r} is not registered; registered: {known}. Call "
            "register_radix_cache_backend at the top level of the file that starts the engine"
        ) from None


def registered_radix_cache_backends() -> list[str]:
    """Names, sorted."""
    return sorted(_factories)


def default_radix_cache_factory(ctx: TreeCacheBuildContext) -> RadixCache:
    """One tier, or the hierarchy if it is enabled; with recurrent states if the model has them.
    Raises as `HiRadixCache` does."""
    if ctx.enable_hierarchical_cache:
        kind = HiMambaRadixCache if ctx.is_hybrid_ssm else HiRadixCache
        return kind(ctx.params, ctx.server_args)
    return MambaRadixCache(ctx.params) if ctx.is_hybrid_ssm else RadixCache(ctx.params)


def create_tree_cache(ctx: TreeCacheBuildContext) -> RadixCache:
    """Make the prefix cache that the arguments choose.

    Raises:
        ValueError: The chosen backend is not registered, or made no `RadixCache`; or as the factory
            does.
    """
    name = ctx.radix_cache_backend
    if name is None:
        return default_radix_cache_factory(ctx)
    cache = get_radix_cache_factory(name)(ctx)
    if not isinstance(cache, RadixCache):
        raise ValueError(
            f"--radix-cache-backend {name!r} made an object of type {type(cache).__name__}; a "
            "subclass of RadixCache is due"
        )
    return cache
