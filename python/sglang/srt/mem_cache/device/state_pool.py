"""The device pools of one model, by kind of state, and which of the model's layers each has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sglang.srt.mem_cache.device.state_spec import PoolHitPolicy, PoolName

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool, LayerTransferCounter


class DevicePool(Protocol):
    """What the lower tiers need of a device pool, whatever state it holds."""

    @property
    def layer_num(self) -> int: ...
    @property
    def start_layer(self) -> int: ...
    @property
    def end_layer(self) -> int: ...
    @property
    def page_size(self) -> int:
        """Slots of a page: tokens, or 1 where a slot stands for a whole prefix."""

    @property
    def size(self) -> int:
        """Slots that requests can own; the padding page (slots below `page_size`) is extra."""

    @property
    def store_dtype(self) -> torch.dtype: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device | str: ...
    def register_layer_transfer_counter(
        self, layer_transfer_counter: LayerTransferCounter
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class StatePool:
    """One kind of state on the device."""

    name: PoolName
    device_pool: DevicePool
    layers: Sequence[int]
    """Model layers (0-based in this rank's stack) that have such state, in the pool's order."""
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    indices_from_pool: PoolName | None = None
    """The pool whose slots these pages share on every tier; None: the pool has its own slots."""

    @property
    def layer_mapper(self) -> Callable[[int], int | None]:
        """Model layer to the pool's own layer, None where it has no such layer."""
        return {layer: own for own, layer in enumerate(self.layers)}.get


@dataclass(frozen=True, slots=True)
class ModelPools:
    """All kinds of state that a model keeps. The first is the anchor: prefixes are made of its
    pages.

    Raises:
        ValueError: A name repeats, a pool's layers are not the model's or not as many as the pool
            has, or a pool shares the slots of one that does not come before it or has others.
    """

    pools: tuple[StatePool, ...]
    num_layers: int
    """Of the model on this rank, with or without state."""

    def __post_init__(self) -> None:
        if not self.pools or self.pools[0].indices_from_pool is not None:
            names = [str(pool.name) for pool in self.pools]
            raise ValueError(
                f"a model's first pool is the anchor, which has slots of its own: {names}"
            )
        before: dict[PoolName, StatePool] = {}
        for pool in self.pools:
            if pool.name in before:
                raise ValueError(f"pool {pool.name} is there twice")
            self._check_layers(pool)
            if pool.indices_from_pool is not None:
                _check_shares(pool, before.get(pool.indices_from_pool))
            before[pool.name] = pool

    @classmethod
    def of(cls, pools: Iterable[BaseDevicePool], num_layers: int | None = None) -> ModelPools:
        """The pools of a model as their specs describe them, the anchor first.

        Args:
            pools: In the order of the model's specs.
            num_layers: Of the model on this rank; None: up to the last layer with state.
        """
        states = tuple(
            StatePool(
                pool.spec.name,
                pool,
                pool.spec.layers,
                pool.spec.hit_policy,
                pool.spec.indices_from_pool,
            )
            for pool in pools
        )
        last = max((layer for state in states for layer in state.layers), default=-1)
        return cls(states, last + 1 if num_layers is None else num_layers)

    def _check_layers(self, pool: StatePool) -> None:
        layers = list(pool.layers)
        is_in_model = all(0 <= layer < self.num_layers for layer in layers)
        if not is_in_model or sorted(set(layers)) != layers or len(layers) != _layers_of(pool):
            raise ValueError(
                f"pool {pool.name} has {_layers_of(pool)} layers: give as many model layers below "
                f"{self.num_layers}, ascending, not {layers}"
            )


def _layers_of(pool: StatePool) -> int:
    return pool.device_pool.layer_num


def _check_shares(pool: StatePool, owner: StatePool | None) -> None:
    if owner is None:
        raise ValueError(
            f"pool {pool.name} shares the slots of {pool.indices_from_pool}, which does not come "
            "before it"
        )
    own, other = pool.device_pool, owner.device_pool
    if (own.size, own.page_size) != (other.size, other.page_size):
        raise ValueError(
            f"pool {pool.name} shares the slots of {owner.name}, but has {own.size} in pages of "
            f"{own.page_size}, not {other.size} in pages of {other.page_size}"
        )
