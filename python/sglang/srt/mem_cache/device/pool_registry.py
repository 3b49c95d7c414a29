"""Registry of the pool classes by kind of state, from which a model's pools are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool, PagedDevicePool
from sglang.srt.mem_cache.device.mamba_pool import MambaPool, MambaSpec
from sglang.srt.mem_cache.device.memory_pool import KVCache, MHATokenToKVPool
from sglang.srt.mem_cache.device.mla_pool import MLASpec, MLATokenToKVPool
from sglang.srt.mem_cache.device.nsa_pool import (
    IndexerSpec,
    NSAIndexerPool,
    NSASpec,
    NSATokenToKVPool,
)
from sglang.srt.mem_cache.device.state_pool import StatePool, state_pool
from sglang.srt.mem_cache.device.state_spec import ItemKind, KVSpec, PoolName, StateSpec

Spec = TypeVar("Spec", bound=StateSpec)
MakePool = Callable[[Spec, int, int, torch.device | str], BaseDevicePool]
"""Makes a pool; arguments: spec, slots besides the padding page, slots of a page, device."""

_POOLS: dict[type[StateSpec], MakePool[StateSpec]] = {}


def register_pool(spec_type: type[Spec], make: MakePool[Spec]) -> None:
    """Register `make` for the pools of specs whose class is `spec_type`.

    Raises:
        ValueError: Another function is registered for the class.
    """
    if spec_type in _POOLS:
        raise ValueError(f"{spec_type.__name__} has a pool already")
    _POOLS[spec_type] = make  # type: ignore[assignment]  # called with this class alone


def make_pools(
    specs: Sequence[StateSpec],
    size: int,
    page_size: int,
    device: torch.device | str,
    num_states: int = 0,
) -> dict[PoolName, BaseDevicePool]:
    """Make a pool for each spec; all or none.

    Args:
        specs: Specs of one model; no two have the same name.
        size: Token slots besides the padding page, whole pages; pools of tokens share their
            numbers.
        page_size: Tokens of a page.
        num_states: Slots besides padding of a pool of states of whole prefixes.

    Raises:
        ValueError: A kind of state has no pool class; two specs have the same name; the pool whose
            slots an auxiliary pool shares is missing or has other items; or two kinds of states of
            whole prefixes have slots of their own. Names the state. No memory is taken then.
    """
    _check_specs(specs)
    sizes = {ItemKind.TOKEN: (size, page_size), ItemKind.STATE: (num_states, 1)}
    pools: dict[PoolName, BaseDevicePool] = {}
    for spec in specs:
        if spec.name not in pools:
            pool = _POOLS[type(spec)](spec, *sizes[spec.item], device)
            pools |= {one.spec.name: one for one in (pool, *pool.auxiliary_pools)}
    owner = state_pool(pools.values())
    for pool in pools.values():
        if isinstance(pool, StatePool) and owner is not None and pool is not owner:
            owner.share_slots_with(pool)
    return pools


def _check_specs(specs: Sequence[StateSpec]) -> None:
    names = [spec.name for spec in specs]
    items = {spec.name: spec.item for spec in specs}
    for spec in specs:
        if names.count(spec.name) > 1:
            raise ValueError(f"the model has two kinds of state called '{spec.name}'")
        if spec.indices_from_pool not in (None, *names):
            raise ValueError(
                f"state '{spec.name}' shares the slots of '{spec.indices_from_pool}', "
                "which the model does not have"
            )
        if spec.indices_from_pool and spec.item is not items[spec.indices_from_pool]:
            raise ValueError(
                f"state '{spec.name}', one for each {spec.item}, cannot share the slots of "
                f"'{spec.indices_from_pool}', one for each {items[spec.indices_from_pool]}"
            )
        if type(spec) not in _POOLS:
            raise ValueError(
                f"there is no device pool for state '{spec.name}' ({type(spec).__name__})"
            )
    owners = [
        spec.name
        for spec in specs
        if spec.item is ItemKind.STATE and spec.indices_from_pool is None
    ]
    if len(owners) > 1:
        raise ValueError(
            f"states '{owners[0]}' and '{owners[1]}' stand for whole prefixes and have slots of "
            f"their own: let '{owners[1]}' share those of '{owners[0]}' (indices_from_pool)"
        )


def kv_pool(pools: Mapping[PoolName, BaseDevicePool]) -> KVCache:
    """The pool of a model's pools whose slots requests own; the others share these or depend on it.

    Raises:
        ValueError: The model keeps no keys and values; names the kinds of state that it keeps.
    """
    pool = pools.get(PoolName.KV)
    if not isinstance(pool, KVCache):
        raise ValueError(
            f"the model keeps {', '.join(pools) or 'no state'}: it needs keys and values "
            f"('{PoolName.KV}'), whose slots requests own"
        )
    return pool


def _make_plain_pool(
    spec: StateSpec, size: int, page_size: int, device: torch.device | str
) -> BaseDevicePool:
    """The pool of a kind of state that has no class of its own."""
    if spec.item is ItemKind.STATE:
        return StatePool.from_spec(spec, size, page_size, device)
    return PagedDevicePool(spec, size, page_size, device)


register_pool(KVSpec, MHATokenToKVPool.from_spec)
register_pool(MLASpec, MLATokenToKVPool.from_spec)
register_pool(NSASpec, NSATokenToKVPool.from_spec)
register_pool(IndexerSpec, NSAIndexerPool)
register_pool(MambaSpec, MambaPool.from_spec)
register_pool(StateSpec, _make_plain_pool)
