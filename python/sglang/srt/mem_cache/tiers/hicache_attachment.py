"""Attaching and detaching L3 at run time: a working client from a configuration, or an error."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang.srt.arg_groups.extra_config import (
    check_extra_config_keys,
    parse_extra_config,
    without_secrets,
)
from sglang.srt.mem_cache.device.state_spec import RankSplit
from sglang.srt.mem_cache.host.head_group_pool import HeadGroupPool
from sglang.srt.mem_cache.host.host_pool import AnyHostPool
from sglang.srt.mem_cache.hybrid_cache.cache_controller import HiCacheController
from sglang.srt.mem_cache.l3.hicache_prefetch import PrefetchPolicy
from sglang.srt.mem_cache.l3.storage_io import StorageIO
from sglang.srt.mem_cache.l3.storage_settings import OnUnreachable, StorageSettings
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.storage.base import HiCacheStorage
from sglang.srt.mem_cache.storage.mooncake_store.config import MooncakeStoreConfig
from sglang.srt.mem_cache.storage.namespace import CacheNamespace
from sglang.srt.mem_cache.storage.pool_shards import PoolShards
from sglang.srt.mem_cache.storage.types import HiCacheStorageConfig, StoragePool

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenStorage:
    """An L3 with an open connection."""

    backend: str
    config: dict[str, Any]
    settings: StorageSettings
    storage_io: StorageIO


@dataclass(frozen=True, slots=True)
class PreparedChange:
    """An operator's change, prepared: all steps that may fail or take long are done."""

    prefetch_policy: PrefetchPolicy | None
    """New prefetch policy; None: the present one."""
    storage: OpenStorage | None
    """L3 to attach; None: the attached one stays."""

    def discard(self) -> None:
        """Undo the preparation: the change is not going to be made."""
        if self.storage is not None:
            self.storage.storage_io.close()


class StorageAttachment:
    """The attached backend and its settings, if any, and the policies, which outlive a detachment.

    Args:
        controller: Holds the threads and the client, and knows the ranks.
        weights_identity: Digest of weights and configuration, for the namespace.
        model_name: Name of the model, for backends.
        prefetch_policy: The first prefetch policy.
    """

    def __init__(
        self,
        controller: HiCacheController,
        *,
        weights_identity: str,
        model_name: str | None,
        prefetch_policy: str,
    ) -> None:
        self._controller = controller
        self._weights_identity = weights_identity
        self._model_name = model_name
        self.prefetch_policy = parse_policy(prefetch_policy)
        self.settings = StorageSettings()
        self.backend: str | None = None
        self._config: dict[str, Any] = {}

    @property
    def storage_io(self) -> StorageIO | None:
        """The threads of the attached backend."""
        return self._controller.storage_io

    def prefetch_seconds(self, num_tokens: int) -> float:
        """Seconds for which a request may wait for a read of `num_tokens`."""
        timeout = self.settings.timeout
        if self.prefetch_policy is PrefetchPolicy.WAIT_COMPLETE:
            return timeout.max
        return timeout.seconds_for(num_tokens)

    def attach(self, backend: str, extra_config: str | None) -> None:
        """Connect to `backend` and attach it, at the start of the server.

        Raises:
            ValueError: The backend or its configuration cannot work.
            StorageUnavailable: It cannot be reached, and the configuration does not allow that.
        """
        config = parse_extra_config(extra_config)
        self._use(self._open(backend, config, _settings(backend, config)))

    def prepare(
        self, backend: str, extra_config: str | None, prefetch_policy: str | None
    ) -> PreparedChange:
        """Prepare to attach `backend` while serving, or to update the policy if it is attached. Any
        thread; the attachment itself does not change.

        Raises:
            ValueError: The backend or its configuration cannot work, or another one is attached.
            StorageUnavailable: It cannot be reached, and the configuration does not allow that.
        """
        policy = parse_policy(prefetch_policy) if prefetch_policy else None
        config = None if extra_config is None else parse_extra_config(extra_config)
        if self.backend is None:
            config = config or {}
            settings = _settings(backend, config)
            if settings.on_unreachable is OnUnreachable.WAIT:
                raise ValueError(
                    "extra config on_unreachable: `wait` is for the start; give exit or degrade"
                )
            return PreparedChange(policy, self._open(backend, config, settings))
        if backend != self.backend:
            raise ValueError(f"{self.backend} is attached; detach it before attaching {backend}")
        if config is not None and config != self._config:
            raise ValueError("the extra config of an attached backend is fixed; detach it first")
        return PreparedChange(policy, None)

    def take_up(self, change: PreparedChange) -> str:
        """Make a prepared change; return a description of the work done."""
        self.prefetch_policy = change.prefetch_policy or self.prefetch_policy
        if change.storage is None:
            return "updated the policies"
        self._use(change.storage)
        return f"attached {change.storage.backend}"

    def detach(self) -> None:
        """Detach the backend, which the caller closes. Idempotent."""
        self.backend, self._config = None, {}
        self._controller.detach_storage_backend()

    def state(self) -> dict[str, Any]:
        """Backend, configuration as JSON text without secrets (None: there is none), transport,
        prefetch policy."""
        shown = json.dumps(without_secrets(self._config)) if self._config else None
        client = self.storage_io.storage if self.backend and self.storage_io else None
        return {
            "hicache_storage_backend": self.backend,
            "hicache_storage_backend_extra_config": shown,
            "hicache_storage_transport": client and client.describe_transport(),
            "hicache_storage_prefetch_policy": self.prefetch_policy.value,
        }

    def describe(self) -> str:
        """One line for the log."""
        storage_io = self._controller.storage_io
        if storage_io is None:
            return "L3: none attached (--hicache-storage-backend)"
        name = storage_io.backend_name or f"{self.backend}, not reached yet"
        return (
            f"L3: {name}, sized by the store itself; prefetch policy {self.prefetch_policy.value}, "
            f"from {self.settings.prefetch_threshold} tokens; namespace {self._namespace()}"
        )

    def _open(self, backend: str, config: dict[str, Any], settings: StorageSettings) -> OpenStorage:
        namespace = self._namespace()
        shards = {
            name: PoolShards.of(
                name, entry.spec.share, self._controller.ranks, settings.tp_lcm_size
            )
            for name, entry in self._controller.mem_pool_host.entries.items()
        }
        if settings.tp_lcm_size is not None and all(one.holds_all_heads for one in shards.values()):
            logger.warning(
                "extra config tp_lcm_size=%d has no effect: objects of this model hold all heads",
                settings.tp_lcm_size,
            )
        connect = self._connector(backend, config, settings, namespace, shards)
        storage_io = self._controller.open_storage(connect, settings, namespace, shards)
        return OpenStorage(backend, config, settings, storage_io)

    def _use(self, storage: OpenStorage) -> None:
        self._controller.attach_storage_backend(storage.storage_io)
        self.backend, self._config = storage.backend, storage.config
        self.settings = storage.settings

    def _namespace(self) -> str:
        pool, group = self._controller.mem_pool_device, self._controller.mem_pool_host
        return CacheNamespace(
            weights_identity=self._weights_identity,
            kv_dtype=str(pool.dtype),
            page_size=self._controller.page_size,
            page_byte_order=group.anchor.page_byte_order,
            extra_pools=tuple(
                f"{name} {pool.page_format}" for name, pool in group.extra_pools.items()
            )
            or msgspec.UNSET,
        ).digest()

    def _connector(
        self,
        backend: str,
        config: dict[str, Any],
        settings: StorageSettings,
        namespace: str,
        shards: Mapping[str, PoolShards],
    ) -> Callable[[], HiCacheStorage]:
        group, ranks = self._controller.mem_pool_host, self._controller.ranks
        attn_cp_rank, attn_cp_size = self._controller.get_attn_cp_rank_and_size()
        anchor, *extra = (
            pool
            for name in [group.anchor_entry.name, *group.extra_pools]
            for pool in _storage_pools(group.get_pool(name), shards[name])
        )
        storage_config = HiCacheStorageConfig(
            tp_rank=ranks.attn_tp_rank,
            tp_size=ranks.attn_tp_size,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=attn_cp_rank,
            attn_cp_size=attn_cp_size,
            is_mla_model=group.anchor_entry.spec.share.split is RankSplit.SAME,
            enable_storage_metrics=True,
            is_page_first_layout=group.anchor.is_zero_copy,
            model_name=self._model_name,
            tp_lcm_size=settings.tp_lcm_size,
            should_split_heads=any(one.is_split for one in shards.values()),
            extra_config=config,
            namespace=namespace,
            object_names={one.pool: one.name for all in shards.values() for one in all.objects},
        )

        def connect() -> HiCacheStorage:
            return StorageBackendFactory.create_backend(
                backend, storage_config, anchor[1], extra_pools=dict(extra)
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


def _settings(backend: str, config: dict[str, Any]) -> StorageSettings:
    check_extra_config_keys(backend, config)
    return StorageSettings.from_extra_config(config)


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


def parse_policy(name: str) -> PrefetchPolicy:
    """The prefetch policy of that name. Raises ValueError that lists the names."""
    try:
        return PrefetchPolicy(name)
    except ValueError:
        choices = ", ".join(policy.value for policy in PrefetchPolicy)
        raise ValueError(f"hicache_storage_prefetch_policy {name!r} is none of {choices}") from None
