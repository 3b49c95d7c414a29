"""The device pools of one model, and the registry of pool classes by kind of state from which they
are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from sglang.srt.configs.model_config import DTYPES
from sglang.srt.hardware_backend.device_kinds import DeviceKind
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool, PagedDevicePool
from sglang.srt.mem_cache.device.memory_pool import KVCache, MHATokenToKVPool
from sglang.srt.mem_cache.device.mla_pool import MLASpec, MLATokenToKVPool
from sglang.srt.mem_cache.device.nsa_pool import (
    IndexerSpec,
    NSAIndexerPool,
    NSASpec,
    NSATokenToKVPool,
)
from sglang.srt.mem_cache.device.request_pool import RequestPool
from sglang.srt.mem_cache.device.row_pool import RowPool, RowSpec
from sglang.srt.mem_cache.device.state_pool import MambaPool, MambaSpec, StatePool, state_pool
from sglang.srt.mem_cache.device.state_spec import (
    ItemKind,
    KVSpec,
    PoolName,
    StateSpec,
    check_page_size,
)

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
    num_requests: int = 0,
) -> dict[PoolName, BaseDevicePool]:
    """Make a pool for each spec; all or none.

    Args:
        specs: Specs of one model; no two have the same name.
        size: Token slots besides the padding page, whole pages; pools of tokens share their
            numbers.
        page_size: Tokens of a page.
        num_states: Slots besides padding of a pool of states of whole prefixes.
        num_requests: Rows besides padding of a pool of states of running requests.

    Raises:
        ValueError: A kind of state has no pool class; two specs have the same name; the pool whose
            slots an auxiliary pool shares is missing or has other items; two kinds of states of
            whole prefixes have slots of their own; there is none beside a state of requests; or a
            stride does not divide the page size. Names the state. No memory is taken then.
    """
    _check_specs(specs)
    check_page_size(specs, page_size)
    sizes = {
        ItemKind.TOKEN: (size, page_size),
        ItemKind.STATE: (num_states, 1),
        ItemKind.REQUEST: (num_requests, 1),
    }
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
    for spec in specs:
        if spec.item is ItemKind.REQUEST and not owners:
            # A prompt whose pages are all cached would begin at its last token, within a page.
            raise ValueError(
                f"state '{spec.name}' of running requests needs a state of whole prefixes beside "
                "it, so that every request begins at a page boundary"
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


@dataclass(frozen=True, slots=True)
class ModelPools:
    """Pools of all kinds of state that prefixes of a model keep. The first is the primary pool:
    prefixes are made of its pages.

    Raises:
        ValueError: A name repeats; a pool has layers that the model does not have; or it shares the
            slots of a pool that does not come before it or differs in size.
    """

    pools: tuple[BaseDevicePool, ...]
    num_layers: int
    """Layers of the model on this rank, with or without state."""

    def __post_init__(self) -> None:
        if not self.pools or self.pools[0].spec.indices_from_pool is not None:
            names = [str(pool.spec.name) for pool in self.pools]
            raise ValueError(
                f"a model's first pool is the primary pool, which has slots of its own: {names}"
            )
        before: dict[PoolName, BaseDevicePool] = {}
        for pool in self.pools:
            spec = pool.spec
            if spec.name in before:
                raise ValueError(f"pool {spec.name} is there twice")
            if not 0 <= spec.layers[0] <= spec.layers[-1] < self.num_layers:
                raise ValueError(
                    f"pool {spec.name} has layers {list(spec.layers)} of a model with "
                    f"{self.num_layers}"
                )
            if spec.indices_from_pool is not None:
                _check_shares(pool, before.get(spec.indices_from_pool))
            before[spec.name] = pool

    @classmethod
    def of(cls, pools: Iterable[BaseDevicePool], num_layers: int | None = None) -> ModelPools:
        """The pools of a model, the primary pool first.

        Args:
            pools: Pools in the order of the model's specs. States of running requests are left out.
            num_layers: Layers of the model on this rank; None: up to the last layer with state.
        """
        all_pools = tuple(pool for pool in pools if pool.spec.item is not ItemKind.REQUEST)
        last = max((pool.end_layer for pool in all_pools), default=-1)
        return cls(all_pools, last + 1 if num_layers is None else num_layers)


def _check_shares(pool: BaseDevicePool, owner: BaseDevicePool | None) -> None:
    name, shared = pool.spec.name, pool.spec.indices_from_pool
    if owner is None:
        raise ValueError(f"pool {name} shares the slots of {shared}, which does not come before it")
    if (pool.size, pool.page_size) != (owner.size, owner.page_size):
        raise ValueError(
            f"pool {name} shares the slots of {shared}, but has {pool.size} in pages of "
            f"{pool.page_size}, not {owner.size} in pages of {owner.page_size}"
        )


def _make_plain_pool(
    spec: StateSpec, size: int, page_size: int, device: torch.device | str
) -> BaseDevicePool:
    """The pool of a kind of state that has no class of its own."""
    if spec.item is ItemKind.STATE:
        return StatePool.from_spec(spec, size, page_size, device)
    if spec.item is ItemKind.REQUEST:
        return RequestPool.from_spec(spec, size, page_size, device)
    return PagedDevicePool(spec, size, page_size, device)


register_pool(KVSpec, MHATokenToKVPool.from_spec)
register_pool(MLASpec, MLATokenToKVPool.from_spec)
register_pool(NSASpec, NSATokenToKVPool.from_spec)
register_pool(IndexerSpec, NSAIndexerPool)
register_pool(MambaSpec, MambaPool.from_spec)
register_pool(RowSpec, RowPool.from_spec)
register_pool(StateSpec, _make_plain_pool)


def resolve_kv_dtype(name: str, model_dtype: torch.dtype, kind: DeviceKind) -> torch.dtype:
    """The dtype that `--kv-cache-dtype NAME` means. Raises ValueError that lists the names."""
    supported = kind.kv_cache_dtypes
    if name not in supported:
        raise ValueError(
            f"kv_cache_dtype {name!r} is not supported here: supported are {', '.join(supported)}"
        )
    if name == "fp8_e4m3":
        return torch.float8_e4m3fn
    return model_dtype if name == "auto" else DTYPES[name]
