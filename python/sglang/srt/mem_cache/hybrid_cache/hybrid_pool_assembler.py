"""Builds the host pools that mirror a model's device pools, as one group.

Building makes all pools that the model needs, or raises and keeps no memory. Sizes are settled for
all pools, and between all ranks, before any memory is taken; an error on one rank is raised on all.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

import torch

from sglang.srt.constants import GB
from sglang.srt.distributed.rank_group import RankGroup, SingleRank, gather_texts
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
from sglang.srt.mem_cache.device.pool_registry import ModelPools
from sglang.srt.mem_cache.device.state_pool import state_pool
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.srt.mem_cache.host.host_layout import (
    HostLayout,
    check_layout_of_kind,
    resolve_layout_and_io,
)
from sglang.srt.mem_cache.host.host_memory import (
    available_host_bytes,
    check_fits_host_memory,
    spare_host_bytes,
)
from sglang.srt.mem_cache.host.host_memory_turn import host_memory_turn
from sglang.srt.mem_cache.host.host_pool import HostKVCache, device_bytes, pages_in
from sglang.srt.mem_cache.host.host_pool_group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.host.page_copier import check_has_copier
from sglang.srt.mem_cache.tree.on_all_ranks import on_all_ranks

_MOST_NAME_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class _Plan:
    """One host pool before it has memory."""

    device_pool: BaseDevicePool
    host_pool_class: type[HostKVCache]

    @property
    def name(self) -> PoolName:
        return self.device_pool.spec.name

    @property
    def item_bytes(self) -> int:
        return self.host_pool_class.item_bytes(self.device_pool)

    @property
    def device_bytes(self) -> int:
        """Bytes that requests can own on the device."""
        return device_bytes(self.device_pool, self.item_bytes)

    @property
    def page_bytes(self) -> int:
        return self.device_pool.page_items * self.item_bytes


def build_kv_host_stack(
    pools: ModelPools,
    *,
    ratio: float,
    size_gb: float,
    io_backend: str,
    layout: str,
    has_storage: bool,
    is_shared_by_sizes: bool = False,
    allocator_type: str = "default",
    ranks: RankGroup | None = None,
    host_memory_fraction: float | None = None,
) -> tuple[str, HostPoolGroup]:
    """Build host pools for all kinds of state of a model.

    Args:
        ratio: Host slots per device slot of each pool, if `size_gb` is 0.
        size_gb: GB (10^9 bytes) of all host pools together, divided between them as device memory
            is; overrides the ratio.
        io_backend: Requested I/O backend; `auto` chooses by the primary pool's pages, and by
            whether there are recurrent states.
        layout: Requested layout; `auto` likewise.
        has_storage: True if an L3 backend is configured.
        is_shared_by_sizes: True if servers of other tensor-parallel sizes share it.
        allocator_type: Allocator of the host memory; see `HostKVCache`.
        ranks: All ranks of the server, which build at the same time; None: this rank alone. A pool
            gets the pages of the rank with the fewest.
        host_memory_fraction: Share of the host's free memory, less the reserve, that the host pools
            of all ranks take together; overrides the ratio. All ranks are on one machine then.

    Returns:
        The resolved I/O backend, and the pools.

    Raises:
        ValueError: A kind of device pool has no host pool, layout or I/O backend cannot work, or
            there is too little memory, on this rank or another. Names the pool, the bytes wanted
            and available, and with several ranks the rank.
    """
    ranks = ranks or SingleRank()
    by_share = host_memory_fraction is not None and not size_gb
    # The first rank waits for the turn of all ranks.
    has_turn = not by_share or ranks.rank == 0
    with host_memory_turn(alone=by_share) if has_turn else nullcontext():
        # A collective. After it the first rank has its turn.
        ranks_here = _count_ranks_here(ranks)
        return _build_in_turn(
            pools,
            size=lambda: _Size.of(ratio, size_gb, host_memory_fraction, ranks_here),
            io_backend=io_backend,
            layout=layout,
            has_storage=has_storage,
            is_shared_by_sizes=is_shared_by_sizes,
            allocator_type=allocator_type,
            ranks=ranks,
            ranks_here=ranks_here,
        )


@dataclass(frozen=True, slots=True)
class _Size:
    """The size of all host pools of a rank."""

    ratio: float
    """Host slots per device slot, if `total` is 0."""
    total: float
    """Bytes."""
    setting: str
    """The flag that says so."""

    @classmethod
    def of(cls, ratio: float, gb: float, fraction: float | None, ranks_here: int) -> _Size:
        if gb:
            return cls(ratio, gb * GB, f"--hicache-size {gb} GB")
        if fraction is None:
            return cls(ratio, 0.0, f"--hicache-ratio {ratio}")
        share = fraction * spare_host_bytes() / ranks_here
        return cls(0.0, share, f"--hicache-host-memory-fraction {fraction}")

    def bytes_for(self, device_bytes: int, all_device_bytes: int) -> float:
        """Bytes of host pools whose device pools have `device_bytes` of all."""
        if self.total:
            return self.total * (device_bytes / all_device_bytes)
        return self.ratio * device_bytes


def _build_in_turn(
    pools: ModelPools,
    *,
    size: Callable[[], _Size],
    io_backend: str,
    layout: str,
    has_storage: bool,
    is_shared_by_sizes: bool,
    allocator_type: str,
    ranks: RankGroup,
    ranks_here: int,
) -> tuple[str, HostPoolGroup]:
    def plan_all() -> tuple[list[_Plan], dict[PoolName, int], str, str]:
        plans = [_Plan(pool, _host_pool_class(pool)) for pool in pools.pools]
        device_pool = plans[0].device_pool
        check_has_copier(device_pool.device)
        io, resolved = resolve_layout_and_io(
            torch.device(device_pool.device).type,
            io_backend,
            layout,
            has_storage,
            plans[0].host_pool_class.shortest_part_bytes(device_pool) * device_pool.page_items,
            has_states=state_pool(pools.pools) is not None,
            is_shared_by_sizes=is_shared_by_sizes,
            known=[
                one
                for one in HostLayout
                if all(one in plan.host_pool_class.LAYOUTS for plan in plans)
            ],
        )
        for plan in plans:
            layouts = plan.host_pool_class.LAYOUTS
            check_layout_of_kind(resolved, layouts, f"host pool {plan.name}")
        return plans, _pages_of_pools(plans, size()), io, resolved

    plans, wanted, chosen_io, chosen_layout = on_all_ranks(ranks, plan_all)
    # A collective: each pool gets the pages of the rank with the fewest.
    least = ranks.reduce_min(torch.tensor(list(wanted.values()), dtype=torch.int64)).tolist()
    pages = dict(zip(wanted, least, strict=True))
    # No rank takes memory before all have checked that there is enough.
    on_all_ranks(ranks, lambda: _check_all_fit(plans, pages, ranks_here))

    def build_all() -> list[PoolEntry]:
        return [
            PoolEntry.of(
                _build(plan, pages[plan.name], chosen_layout, allocator_type),
                plan.device_pool,
                is_primary=plan is plans[0],
            )
            for plan in plans
        ]

    return chosen_io, HostPoolGroup(on_all_ranks(ranks, build_all), pools.num_layers)


build_nsa_hybrid_stack = build_mamba_hybrid_stack = build_kv_host_stack
"""Further names of the same function, for models with an indexer and with recurrent states."""


def _host_pool_class(pool: BaseDevicePool) -> type[HostKVCache]:
    if pool.host_pool is None:
        raise ValueError(
            f"the hierarchical cache has no host pool for {type(pool).__name__} "
            f"(pool {pool.spec.name}); start without --enable-hierarchical-cache"
        )
    module, _, name = pool.host_pool.rpartition(".")
    found: type[HostKVCache] = getattr(importlib.import_module(module), name)
    return found


def _pages_of_pools(plans: Sequence[_Plan], size: _Size) -> dict[PoolName, int]:
    """Pages of each pool; pools that share slots have equally many."""
    in_all = sum(plan.device_bytes for plan in plans)
    owners: dict[PoolName, PoolName] = {}  # Whose slots each pool has; they come before it.
    for plan in plans:
        shared = plan.device_pool.spec.indices_from_pool
        owners[plan.name] = plan.name if shared is None else owners[shared]
    pages: dict[PoolName, int] = {}
    for name, owner in owners.items():
        if name != owner:
            pages[name] = pages[owner]
            continue
        # Pools that share its slots share its part of the memory.
        together = [one for one in plans if owners[one.name] == name]
        share = sum(one.device_bytes for one in together)
        budget = size.bytes_for(share, in_all)
        page_bytes = sum(one.page_bytes for one in together)
        pages[name] = pages_in(budget, page_bytes, name, size.setting)
    return pages


def _count_ranks_here(ranks: RankGroup) -> int:
    """Number of ranks that take host memory of this machine or container. A collective."""
    if ranks.size == 1:
        return 1
    here = socket.gethostname()[:_MOST_NAME_BYTES]
    return gather_texts(ranks, here, _MOST_NAME_BYTES).count(here)


def _check_all_fit(plans: Sequence[_Plan], pages: dict[PoolName, int], ranks_here: int = 1) -> None:
    """Raise ValueError if `ranks_here` such host caches do not fit into this machine's memory."""
    wanted = {plan.name: pages[plan.name] * plan.page_bytes for plan in plans}
    each = ", ".join(f"pool {name} {size} bytes" for name, size in wanted.items())
    many = "" if ranks_here == 1 else f", of {ranks_here} ranks"
    check_fits_host_memory(
        sum(wanted.values()) * ranks_here,
        f"the host cache ({each}{many})",
        "lower --hicache-size or --hicache-ratio",
    )


def _build(plan: _Plan, page_num: int, layout: str, allocator_type: str) -> HostKVCache:
    name = plan.name
    try:
        return plan.host_pool_class.make(
            plan.device_pool, page_num=page_num, layout=layout, allocator_type=allocator_type
        )
    except ValueError as error:
        raise ValueError(f"host pool {name}: {error}") from error
    except (MemoryError, RuntimeError) as error:
        raise ValueError(
            f"host pool {name}: no memory for {page_num * plan.page_bytes} bytes, with "
            f"{available_host_bytes()} bytes available: {error}; lower --hicache-size or "
            "--hicache-ratio"
        ) from error
