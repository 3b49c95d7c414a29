"""Transfers of a pool's slots between tiers. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from sglang.srt.mem_cache.device.state_spec import PoolHitPolicy, PoolName


@dataclass(slots=True)
class PoolTransfer:
    """The slots of one pool that move, and their page keys.

    Raises:
        ValueError: `nodes_to_load` is given, which has no effect: the tree itself knows the nodes
            that it loads.
    """

    name: str
    """A `PoolName`; in calls to a backend also the name of a part of a pool."""
    host_indices: torch.Tensor | None = None
    """int64 `[len(keys) * page_size of the pool]` on CPU: host slots, whole pages."""
    device_indices: torch.Tensor | None = None
    """int64, as long as `host_indices`, on the pool's device or the CPU."""
    keys: list[str] | None = None
    """`{namespace}/{page_hash}`, one a page. Backends add pool and shard."""
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[Any] | None = None
    """Not supported: must be None."""
    indices_from_pool: PoolName | None = None
    """Pool from whose transfer both index tensors are taken. Resolved before a backend sees it."""

    def __post_init__(self) -> None:
        if self.nodes_to_load is not None:
            raise ValueError(
                f"pool transfer {self.name}: nodes_to_load has no effect here, the tree knows by "
                "itself which nodes it loads: leave it out"
            )


@dataclass(frozen=True, slots=True)
class SidecarPoolSpec:
    """An extra pool whose pages share another pool's indices."""

    pool_name: PoolName
    indices_from_pool: PoolName
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


def join_transfers(lists: Sequence[list[PoolTransfer]]) -> list[PoolTransfer]:
    """Join the transfers of several operations: one for each pool, in the order of the operations.
    A single list is returned as it is."""
    if len(lists) == 1:
        return lists[0]
    by_pool: dict[str, list[PoolTransfer]] = {}
    for transfer in chain.from_iterable(lists):
        by_pool.setdefault(transfer.name, []).append(transfer)
    return [
        PoolTransfer(
            name,
            host_indices=_joined([one.host_indices for one in parts]),
            device_indices=_joined([one.device_indices for one in parts]),
            keys=_joined_keys(parts),
            hit_policy=parts[0].hit_policy,
            indices_from_pool=parts[0].indices_from_pool,
        )
        for name, parts in by_pool.items()
    ]


def _joined(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Concatenation of `parts`, which are all tensors or all None."""
    there = [part for part in parts if part is not None]
    assert len(there) in (0, len(parts)), "only some of the transfers have these slots"
    return torch.cat(there) if there else None


def _joined_keys(parts: list[PoolTransfer]) -> list[str] | None:
    there = [one.keys for one in parts if one.keys is not None]
    assert len(there) in (0, len(parts)), "only some of the transfers have keys"
    return list(chain.from_iterable(there)) if there else None
