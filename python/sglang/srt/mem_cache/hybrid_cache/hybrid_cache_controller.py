"""Completes the transfers of an operation, for models with several kinds of state.

`HiCacheController` copies them, and `GuardedStore` puts and gets them, as for a dense model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer, SidecarPoolSpec
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.srt.mem_cache.host.host_pool_group import HostPoolGroup


class HybridTransfers:
    """Completes transfers of one model's pools. Scheduler's thread; any thread may call `resolve`.

    Args:
        group: The model's pools.
    """

    def __init__(self, group: HostPoolGroup) -> None:
        self._group = group

    def resolve(self, transfers: list[PoolTransfer]) -> list[PoolTransfer]:
        """`transfers`, and the transfers of auxiliary pools, which share slots with them. Any
        thread.

        Raises:
            ValueError: A transfer takes its slots from a pool that is not among `transfers`.
        """
        if len(transfers) == 1 and not self._group.auxiliary_pools:
            return transfers
        return _resolve_shared_pool_transfers(transfers, self._group.auxiliary_pools)

    def reserve_host_pages(
        self, device_indices: torch.Tensor, extra: Sequence[PoolTransfer]
    ) -> list[PoolTransfer] | None:
        """Take host pages for a write in all pools that have slots of their own, or in none.

        Returns the transfers, the primary pool's first; None if a pool has no room.

        Args:
            device_indices: The primary pool's slots.
            extra: Transfers of other pools. Transfers without `host_indices` get as many as they
                have `device_indices`; the pool's `host_evict_fn` makes room.
        """
        host_indices = self._group.primary.alloc(len(device_indices))
        if host_indices is None:
            return None
        transfers = [PoolTransfer(self._group.primary_entry.name, host_indices, device_indices)]
        taken = transfers.copy()
        for transfer in extra:
            if transfer.host_indices is None and transfer.indices_from_pool is None:
                transfer.host_indices = self._alloc(transfer)
                if transfer.host_indices is None:
                    self._give_back(taken)
                    return None
                taken.append(transfer)
            transfers.append(transfer)
        return transfers

    def _alloc(self, transfer: PoolTransfer) -> torch.Tensor | None:
        assert transfer.device_indices is not None, f"{transfer.name}: nothing to write"
        entry = self._group.entries[transfer.name]
        needed = len(transfer.device_indices)
        missing = needed - entry.host_pool.available_size()
        if missing > 0 and entry.host_evict_fn is not None:
            entry.host_evict_fn(missing)
        return entry.host_pool.alloc(needed)

    def _give_back(self, taken: Sequence[PoolTransfer]) -> None:
        for transfer in taken:
            assert transfer.host_indices is not None
            self._group.get_pool(transfer.name).free(transfer.host_indices)
            transfer.host_indices = None


def _resolve_shared_pool_transfers(
    transfers: list[PoolTransfer], auxiliary_pools: Sequence[SidecarPoolSpec]
) -> list[PoolTransfer]:
    """Give every transfer its slots, and add the transfers of auxiliary pools.

    Args:
        transfers: Transfers, the primary pool's first. One with `indices_from_pool` takes the slots
            and keys of that pool's transfer.
        auxiliary_pools: Pools without slots of their own; each moves whenever its owner does.

    Raises:
        ValueError: A transfer takes its slots from a pool that is not among `transfers`.
    """
    resolved: dict[str, PoolTransfer] = {}
    for transfer in transfers:
        owner = transfer.indices_from_pool
        if owner is not None:
            if owner not in resolved:
                raise ValueError(
                    f"pool transfer {transfer.name}: takes its slots from {owner}, which is not "
                    "transferred before it"
                )
            spec = SidecarPoolSpec(PoolName(transfer.name), owner, transfer.hit_policy)
            transfer = _beside(resolved[owner], spec)
        resolved[transfer.name] = transfer
    for auxiliary in auxiliary_pools:
        owner = auxiliary.indices_from_pool
        if owner in resolved and auxiliary.pool_name not in resolved:
            resolved[auxiliary.pool_name] = _beside(resolved[owner], auxiliary)
    return list(resolved.values())


def _beside(owner: PoolTransfer, auxiliary: SidecarPoolSpec) -> PoolTransfer:
    """An auxiliary pool's transfer: the pages that its owner moves."""
    return PoolTransfer(
        auxiliary.pool_name,
        owner.host_indices,
        owner.device_indices,
        owner.keys,
        auxiliary.hit_policy,
    )
