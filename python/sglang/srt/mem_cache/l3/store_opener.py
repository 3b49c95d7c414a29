"""Opens stores: from a backend's name and its configuration to a working client, or an error."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from sglang.srt.arg_groups.extra_config import check_extra_config_keys, parse_extra_config
from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.mem_cache.device.state_spec import RankSplit
from sglang.srt.mem_cache.host.head_group_pool import HeadGroupPool
from sglang.srt.mem_cache.host.host_pool import AnyHostPool
from sglang.srt.mem_cache.host.host_pool_group import HostPoolGroup
from sglang.srt.mem_cache.l3.attached_store import AttachedStore
from sglang.srt.mem_cache.l3.storage_reads import pages_per_read
from sglang.srt.mem_cache.l3.storage_settings import OnUnreachable, StorageSettings
from sglang.srt.mem_cache.l3.stored_pools import StoredPools
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.storage.base import HiCacheStorage
from sglang.srt.mem_cache.storage.mooncake_store.config import MooncakeStoreConfig
from sglang.srt.mem_cache.storage.pool_shards import PoolShards
from sglang.srt.mem_cache.storage.types import (
    CacheNamespace,
    HiCacheStorageConfig,
    StoragePool,
    StorageUnreachable,
)
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
from sglang.srt.utils.threads import shorten_switch_interval

logger = logging.getLogger(__name__)

_WAIT_BOUND_S: Final = 300.0
_WAIT_STEP_S: Final = 1.0


class StoreOpener:
    """Opens stores for the pages of one engine. Any thread.

    Args:
        host_pools: Pools of L2.
        page_size: Tokens of a page.
        ranks: All ranks, which share the store.
        weights_identity: Digest of weights and configuration, for the namespace.
        model_name: Name of the model, for backends.
        metrics: Metrics of the tiers.
    """

    def __init__(
        self,
        host_pools: HostPoolGroup,
        page_size: int,
        ranks: RankGroup,
        *,
        weights_identity: str,
        model_name: str | None,
        metrics: HiCacheMetrics,
    ) -> None:
        self._host_pools = host_pools
        self._page_size = page_size
        self._ranks = ranks
        self._weights_identity = weights_identity
        self._model_name = model_name
        self._metrics = metrics

    def open(self, backend: str, config: dict[str, Any], *, may_wait: bool) -> AttachedStore:
        """Connect to `backend` and start the threads that use it. The caller closes the result.

        Args:
            backend: Name of the backend.
            config: Extra config.
            may_wait: Accept a config that demands to wait for a store that cannot be reached.

        Raises:
            ValueError: The backend or its configuration cannot work.
            StorageUnavailable: It cannot be reached, and the configuration does not allow that.
        """
        check_extra_config_keys(backend, config)
        settings = StorageSettings.from_extra_config(config)
        waits = settings.on_unreachable is OnUnreachable.WAIT
        if waits and not may_wait:
            raise ValueError(
                "extra config on_unreachable: `wait` is for the start; give exit or degrade"
            )
        group = self._host_pools
        shards = {
            name: PoolShards.of(name, entry.spec.share, self._ranks, settings.tp_lcm_size)
            for name, entry in group.entries.items()
        }
        if settings.tp_lcm_size is not None and all(one.holds_all_heads for one in shards.values()):
            logger.warning(
                "extra config tp_lcm_size=%d has no effect: objects of this model hold all heads",
                settings.tp_lcm_size,
            )
        if device_runtime(group.primary_entry.device_pool.device).kind.overlaps_steps:
            shorten_switch_interval()
        connect = self._connector(backend, config, settings, shards)
        if waits:
            connect = _first_waiting(connect)
        return AttachedStore(
            connect,
            backend=backend,
            config=config,
            settings=settings,
            page_size=self._page_size,
            page_bytes=group.page_bytes,
            pages_per_read=pages_per_read(group.primary.page_num),
            metrics=self._metrics,
            pools=StoredPools(self.namespace(), group.extra_queries, group.auxiliary_pools, shards),
        )

    def namespace(self) -> str:
        """First part of every key: engines with other weights or another format of pages find none
        of these objects."""
        group = self._host_pools
        return CacheNamespace(
            weights_identity=self._weights_identity,
            kv_dtype=str(group.primary_entry.device_pool.dtype),
            page_size=self._page_size,
            page_byte_order=group.primary.page_byte_order,
            extra_pools=tuple(
                f"{name} {pool.page_format}" for name, pool in group.extra_pools.items()
            )
            or msgspec.UNSET,
        ).digest()

    def get_attn_cp_rank_and_size(self) -> tuple[int, int]:
        """Number of this rank among the ranks with the same heads, and their count."""
        return self._ranks.attn_cp_rank, self._ranks.attn_cp_size

    def _connector(
        self,
        backend: str,
        config: dict[str, Any],
        settings: StorageSettings,
        shards: Mapping[str, PoolShards],
    ) -> Callable[[], HiCacheStorage]:
        group = self._host_pools
        attn_cp_rank, attn_cp_size = self.get_attn_cp_rank_and_size()
        primary, *extra = (
            pool
            for name in [group.primary_entry.name, *group.extra_pools]
            for pool in _storage_pools(group.get_pool(name), shards[name])
        )
        storage_config = HiCacheStorageConfig(
            tp_rank=self._ranks.attn_tp_rank,
            tp_size=self._ranks.attn_tp_size,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=attn_cp_rank,
            attn_cp_size=attn_cp_size,
            is_mla_model=group.primary_entry.spec.share.split is RankSplit.SAME,
            enable_storage_metrics=True,
            is_page_first_layout=group.primary.is_zero_copy,
            model_name=self._model_name,
            tp_lcm_size=settings.tp_lcm_size,
            should_split_heads=any(one.is_split for one in shards.values()),
            extra_config=config,
            namespace=self.namespace(),
            object_names={one.pool: one.name for all in shards.values() for one in all.objects},
        )

        def connect() -> HiCacheStorage:
            return StorageBackendFactory.create_backend(
                backend, storage_config, primary[1], extra_pools=dict(extra)
            )

        return connect


def _storage_pools(pool: AnyHostPool, shards: PoolShards) -> list[tuple[str, StoragePool]]:
    """The parts of a host pool as backends see them: one pool for each object of a page, by name.

    Raises ValueError if the pool cannot be cut by heads.
    """
    if not shards.is_split:
        return [(shards.objects[0].pool, pool)]
    count = len(shards.objects)
    return [
        (one.pool, HeadGroupPool(pool, index, count)) for index, one in enumerate(shards.objects)
    ]


def _first_waiting(connect: Callable[[], HiCacheStorage]) -> Callable[[], HiCacheStorage]:
    """`connect` with retries, within a time limit, while the store cannot be reached."""
    deadline = time.monotonic() + _WAIT_BOUND_S

    def waiting() -> HiCacheStorage:
        while True:
            try:
                return connect()
            except StorageUnreachable as error:
                if time.monotonic() > deadline:
                    raise
                logger.warning("waiting for L3 (on_unreachable=wait): %s", error)
                time.sleep(_WAIT_STEP_S)

    return waiting


def host_allocator_type(backend: str | None, extra_config: str | None) -> str:
    """Allocator of L2 that this L3 needs: `mooncake` or `default`.

    Raises ValueError if the configuration cannot work.
    """
    if backend != "mooncake":
        return "default"
    config = MooncakeStoreConfig.load_from_extra_config(parse_extra_config(extra_config))
    return config.host_allocator_type


def shares_with_other_sizes(backend: str | None, extra_config: str | None) -> bool:
    """True if servers of other tensor-parallel sizes may share this L3: `tp_lcm_size` is set.

    Raises ValueError if the configuration cannot work.
    """
    if backend is None:
        return False
    settings = StorageSettings.from_extra_config(parse_extra_config(extra_config))
    return settings.tp_lcm_size is not None
