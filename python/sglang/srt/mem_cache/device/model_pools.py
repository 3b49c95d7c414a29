"""The device pools of one model, by kind of state, with the model's layers that each has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
    from sglang.srt.mem_cache.device.state_spec import PoolName


@dataclass(frozen=True, slots=True)
class ModelPools:
    """Pools of all kinds of state that a model keeps. The first is the primary pool: prefixes are
    made of its pages.

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
            pools: Pools in the order of the model's specs.
            num_layers: Layers of the model on this rank; None: up to the last layer with state.
        """
        all_pools = tuple(pools)
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
