"""Completes the transfers of an operation, for models with several kinds of state.

`HiCacheController` copies them, and `AttachedStore` puts and gets them, as for a dense model.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer, SidecarPoolSpec
from sglang.srt.mem_cache.device.state_spec import PoolName


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
