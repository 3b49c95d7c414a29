"""Which slots of which pool move between tiers together. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.device.state_spec import PoolHitPolicy, PoolName

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class PoolTransfer:
    """Which slots of which pool move under which page keys, and how a hit counts."""

    name: PoolName
    host_indices: torch.Tensor | None = None
    """int64 `[len(keys) * page_size of the pool]` on CPU: host slots, whole pages."""
    device_indices: torch.Tensor | None = None
    """int64, as long as `host_indices`, on the pool's device."""
    keys: list[str] | None = None
    """`{namespace}/{page_hash}`, one a page. Backends add pool and shard."""
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[Any] | None = None
    """Tree nodes that a load brings back; opaque to pools and backends."""
    indices_from_pool: PoolName | None = None
    """Take both index tensors from this pool's transfer. Resolved before a backend sees it."""


@dataclass(frozen=True, slots=True)
class SidecarPoolSpec:
    """An extra pool whose pages share another pool's indices."""

    pool_name: PoolName
    indices_from_pool: PoolName
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
