"""The connection to L3 that a cache owns: it opens stores, from a backend's name and configuration,
and has which one is attached, and what all ranks know of it.

Threads: the scheduler's only, unless a method says otherwise.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from sglang.srt.arg_groups.extra_config import (
    check_extra_config_keys,
    parse_extra_config,
    without_secrets,
)
from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.mem_cache.device.state_spec import PoolHitPolicy, RankSplit
from sglang.srt.mem_cache.host.head_group_pool import HeadGroupPool
from sglang.srt.mem_cache.host.host_pool_group import HostPoolGroup
from sglang.srt.mem_cache.l3.attached_store import AttachedStore
from sglang.srt.mem_cache.l3.prefetch_table import PrefetchPolicy
from sglang.srt.mem_cache.l3.storage_reads import NO_RETRIES, LookUpRetries, pages_per_read
from sglang.srt.mem_cache.l3.storage_settings import OnUnreachable, StorageSettings
from sglang.srt.mem_cache.l3.store_presence import StorePresence
from sglang.srt.mem_cache.l3.stored_pools import PoolShards, StoredPools
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.storage.base import HiCacheStorage
from sglang.srt.mem_cache.storage.mooncake_store.config import MooncakeStoreConfig
from sglang.srt.mem_cache.storage.types import (
    CacheNamespace,
    HiCacheStorageConfig,
    StoragePool,
    StorageUnreachable,
    StorageUsage,
)
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
from sglang.srt.mem_cache.tree.kv_events import KVEventLog
from sglang.srt.mem_cache.tree.radix_key import PageHash
from sglang.srt.mem_cache.tree.tick_sync import Progress, Rates
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.srt.utils.threads import shorten_switch_interval

logger = logging.getLogger(__name__)

_WAIT_BOUND_S: Final = 300.0
_WAIT_STEP_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class PreparedChange:
    """An operator's change, prepared: all steps that may fail or take long are done."""

    prefetch_policy: PrefetchPolicy | None
    """New prefetch policy; None: the present one."""
    store: AttachedStore | None
    """Store to attach; None: the attached one stays."""

    def discard(self) -> None:
        """Undo the preparation: the change is not going to be made."""
        if self.store is not None:
            self.store.close()


class StoreConnection:
    """The attached store, if any; its state as all ranks agree on it; and the prefetch policy,
    which outlives a detachment.

    Args:
        host_pools: Pools of L2.
        page_size: Tokens of a page.
        ranks: All ranks, which share the store.
        weights_identity: Digest of weights and configuration, for the namespace.
        prefetch_policy: Name of the first prefetch policy.
        retries: Repetitions of look-ups that missed.
        reads_states: False: pages are read without recurrent states.
        events: Gets what L3 has got or lost; None: nobody wants that.

    Attributes:
        attached: Client and threads of the attached store; None: none is attached.
        is_changing: True while an operator's change of L3 is under way.
        epoch: Counter that is increased whenever L3 may have lost its objects. Pages written or
            read in an earlier epoch do not count as stored.
        answers: True if no call to L3 is stuck on any rank.
        silence_ms: How long L3 has not answered; see `Progress`.
        rates: Speeds of reads and of prefills that the ranks agreed on last.
    """

    def __init__(
        self,
        host_pools: HostPoolGroup,
        page_size: int,
        ranks: RankGroup,
        *,
        weights_identity: str,
        model_name: str | None,
        prefetch_policy: str,
        metrics: HiCacheMetrics,
        retries: LookUpRetries = NO_RETRIES,
        reads_states: bool = True,
        events: KVEventLog | None = None,
    ) -> None:
        self.host_pools = host_pools
        self._queries = [
            query
            for query in host_pools.extra_queries
            if reads_states or query.hit_policy is PoolHitPolicy.ALL_PAGES
        ]
        """The pools beside the primary one that have to have their part of a hit."""
        self._page_size = page_size
        self._ranks = ranks
        self._weights_identity = weights_identity
        self._model_name = model_name
        self._metrics = metrics
        self._events = events
        self._retries = retries
        self.prefetch_policy = _parse_policy(prefetch_policy)
        self.attached: AttachedStore | None = None
        self.is_changing = False
        self.epoch = 0
        self.answers = True
        self.silence_ms = 0
        self.rates = Rates()
        self._seen_reconnects = self._agreed_reconnects = 0
        """Reconnects of L3 on this rank: as last reported, and as agreed by all ranks."""

    # ---- what the flows to and from L3 ask ---------------------------------------------------

    @property
    def available(self) -> bool:
        """True if calls to L3 are allowed: no call is stuck on any rank, and no change is under
        way."""
        return self.answers and not self.is_changing

    def forget_stored(self) -> None:
        """Mark all nodes as not stored: L3 is another one, was cleared, or has lost pages."""
        self.epoch += 1

    @property
    def asked_at(self) -> int:
        """Time of a question that is put to the store now, for `note_lost`."""
        return 0 if self._events is None else self._events.now

    def note_stored(self, node: TreeNode, epoch: int) -> None:
        """Mark a node whose pages, in all pools, were written to L3 or read from it by an operation
        that began in `epoch`."""
        node.storage_epoch = epoch
        if self._events is not None and epoch == self.epoch and self.attached is not None:
            self._events.in_store(node, self.attached.medium)

    def note_lost(self, page: PageHash, asked_at: int) -> None:
        """Note that L3, asked at `asked_at`, was found to lack a page or to have it damaged."""
        if self._events is not None:
            self._events.not_in_store(page, asked_at)

    def note_cleared(self) -> None:
        """Mark all nodes as not stored: L3 may have none of its objects."""
        self.forget_stored()
        if self._events is not None:
            self._events.store_is_gone()

    # ---- attaching and detaching -------------------------------------------------------------

    def attach(self, backend: str, extra_config: str | None) -> None:
        """Connect to `backend` and attach it, at the start of the server.

        Raises:
            ValueError: The backend or its configuration cannot work.
            StorageUnavailable: It cannot be reached, and the configuration does not allow that.
        """
        config = parse_extra_config(extra_config)
        self.attached = self._open(backend, config, may_wait=True)

    def prepare(
        self, backend: str, extra_config: str | None, prefetch_policy: str | None
    ) -> PreparedChange:
        """Prepare to attach `backend` while serving, or to update the policy if it is attached. Any
        thread; the connection itself does not change.

        Raises:
            ValueError: The backend or its configuration cannot work, or another one is attached.
            StorageUnavailable: It cannot be reached, and the configuration does not allow that.
        """
        policy = _parse_policy(prefetch_policy) if prefetch_policy else None
        config = None if extra_config is None else parse_extra_config(extra_config)
        attached = self.attached
        if attached is None:
            return PreparedChange(policy, self._open(backend, config or {}, may_wait=False))
        if backend != attached.backend:
            raise ValueError(
                f"{attached.backend} is attached; detach it before attaching {backend}"
            )
        if config is not None and config != attached.config:
            raise ValueError("the extra config of an attached backend is fixed; detach it first")
        return PreparedChange(policy, None)

    def take_up(self, change: PreparedChange) -> str:
        """Make a prepared change; return a description of the work done."""
        self.prefetch_policy = change.prefetch_policy or self.prefetch_policy
        if change.store is None:
            return "updated the policies"
        assert self.attached is None, "changes are made one at a time"
        self.attached = change.store
        self.forget_stored()
        return f"attached {change.store.backend}"

    def detach(self) -> AttachedStore | None:
        """Detach the store, whose objects stay. No operation may be under way. Returns the store,
        which the caller closes; None if none was attached."""
        store, self.attached = self.attached, None
        self._metrics.breaker_open.set(0)
        if self._events is not None:
            self._events.store_is_gone()
        return store

    def shutdown(self) -> None:
        """Detach and close the store, within seconds. Idempotent."""
        if (store := self.detach()) is not None:
            store.close()

    # ---- opening a store, any thread ---------------------------------------------------------

    def _open(self, backend: str, config: dict[str, Any], *, may_wait: bool) -> AttachedStore:
        """Connect to `backend` and start the threads that use it. The caller closes the result.

        `may_wait`: accept a config that demands to wait for a store that cannot be reached. Raises
        as `attach`.
        """
        check_extra_config_keys(backend, config)
        settings = StorageSettings.from_extra_config(config)
        waits = settings.on_unreachable is OnUnreachable.WAIT
        if waits and not may_wait:
            raise ValueError(
                "extra config on_unreachable: `wait` is for the start; give exit or degrade"
            )
        group = self.host_pools
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
        connect = self._connector(backend, config, settings, shards, waits=waits)
        return AttachedStore(
            connect,
            backend=backend,
            config=config,
            settings=settings,
            page_size=self._page_size,
            page_bytes=group.page_bytes,
            pages_per_read=pages_per_read(group.primary.page_num),
            metrics=self._metrics,
            pools=StoredPools(
                self.namespace().digest(), self._queries, group.auxiliary_pools, shards
            ),
            retries=self._retries,
            # One rank of the server speaks for all, also of several DP groups.
            presence=None if self._ranks.rank or self._ranks.first_rank else StorePresence(),
        )

    def namespace(self) -> CacheNamespace:
        """Namespace of the objects. Each key begins with its digest, so that engines with other
        weights or another format of pages do not find them."""
        group = self.host_pools
        return CacheNamespace(
            weights_identity=self._weights_identity,
            kv_dtype=str(group.primary_entry.device_pool.dtype),
            page_size=self._page_size,
            page_byte_order=group.primary.page_byte_order,
            extra_pools=tuple(
                f"{name} {pool.page_format}" for name, pool in group.extra_pools.items()
            )
            or msgspec.UNSET,
        )

    def get_attn_cp_rank_and_size(self) -> tuple[int, int]:
        """Number of this rank among the ranks with the same heads, and their count."""
        return self._ranks.attn_cp_rank, self._ranks.attn_cp_size

    def _connector(
        self,
        backend: str,
        config: dict[str, Any],
        settings: StorageSettings,
        shards: Mapping[str, PoolShards],
        *,
        waits: bool,
    ) -> Callable[[], HiCacheStorage]:
        """Makes clients of a store. If it `waits`, the first one is tried for, within a time limit,
        until the store can be reached."""
        group = self.host_pools
        attn_cp_rank, attn_cp_size = self.get_attn_cp_rank_and_size()
        pools: dict[str, StoragePool] = {}
        for name in [group.primary_entry.name, *group.extra_pools]:
            pool, objects = group.get_pool(name), shards[name].objects
            for index, one in enumerate(objects):
                is_whole = len(objects) == 1
                pools[one.pool] = pool if is_whole else HeadGroupPool(pool, index, len(objects))
        primary = pools.pop(shards[group.primary_entry.name].objects[0].pool)
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
            namespace=self.namespace().digest(),
            object_names={one.pool: one.name for all in shards.values() for one in all.objects},
        )
        deadline = time.monotonic() + _WAIT_BOUND_S

        def connect() -> HiCacheStorage:
            while True:
                try:
                    return StorageBackendFactory.create_backend(
                        backend, storage_config, primary, extra_pools=pools
                    )
                except StorageUnreachable as error:
                    if not waits or time.monotonic() > deadline:
                        raise
                    logger.warning("waiting for L3 (on_unreachable=wait): %s", error)
                    time.sleep(_WAIT_STEP_S)

        return connect

    # ---- policies, and what operators see ----------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Backend, configuration as JSON text without secrets (None: there is none), transport,
        prefetch policy."""
        store = self.attached
        client = None if store is None else store.client
        config = None if store is None else store.config
        return {
            "hicache_storage_backend": None if store is None else store.backend,
            "hicache_storage_backend_extra_config": json.dumps(without_secrets(config))
            if config
            else None,
            "hicache_storage_transport": client and client.describe_transport(),
            "hicache_storage_prefetch_policy": self.prefetch_policy.value,
        }

    def usage(self) -> StorageUsage | None:
        """The last known usage of the store; None: unknown. Rank 0 asks for all ranks."""
        store = self.attached
        if store is None or self._ranks.rank != 0:
            return None
        return store.usage.latest(store.client)

    def sharers(self) -> int | None:
        """Servers that share the namespace, with this one; None: unknown, or another rank knows."""
        presence = None if self.attached is None else self.attached.presence
        return None if presence is None else presence.servers

    def read_metrics(self) -> None:
        """Update the gauges, before the metrics are read."""
        store = self.attached
        named = None if store is None else (store.backend, self.namespace())
        usage = self.usage()
        nodes = {} if store is None else store.usage.nodes.serving()
        self._metrics.set_storage(named, usage, nodes, self.sharers())

    def describe(self) -> str:
        """One line for the log."""
        store = self.attached
        if store is None:
            return "L3: none attached (--hicache-storage-backend)"
        name = store.backend_name or f"{store.backend}, not reached yet"
        return (
            f"L3: {name}, sized by the store itself; prefetch policy {self.prefetch_policy.value}, "
            f"from {store.settings.prefetch_threshold} tokens; "
            f"namespace {self.namespace().digest()}"
        )

    # ---- one tick ----------------------------------------------------------------------------

    def report(self, progress: Progress) -> None:
        """Add this rank's observations to those of the tick."""
        if (store := self.attached) is not None:
            progress.available = store.available
            progress.silence_ms = int(1000 * store.silence_s)
            self._seen_reconnects = store.reconnects
            progress.has_reconnected = self._seen_reconnects != self._agreed_reconnects
            progress.rates = Rates(store.read_rate.known, store.prefill_rate.known)

    def act_on(self, agreed: Progress) -> None:
        """Take up what the ranks agree on."""
        self.answers = agreed.available
        self.silence_ms = agreed.silence_ms
        self.rates = agreed.rates
        if agreed.has_reconnected:
            self._agreed_reconnects = self._seen_reconnects
            self.forget_stored()


def _parse_policy(name: str) -> PrefetchPolicy:
    """The prefetch policy of that name. Raises ValueError that lists the names."""
    try:
        return PrefetchPolicy(name)
    except ValueError:
        choices = ", ".join(policy.value for policy in PrefetchPolicy)
        raise ValueError(f"hicache_storage_prefetch_policy {name!r} is none of {choices}") from None


def demands_on_host_pools(backend: str | None, extra_config: str | None) -> tuple[str, bool]:
    """The allocator that L2 needs for this L3, `mooncake` or `default`; and True if servers of
    other tensor-parallel sizes may share this L3: `tp_lcm_size` is set.

    Raises ValueError if the configuration cannot work.
    """
    if backend is None:
        return "default", False
    config, allocator_type = parse_extra_config(extra_config), "default"
    if backend == "mooncake":
        store = MooncakeStoreConfig.load_from_extra_config(config)
        allocator_type = store.host_allocator_type
    settings = StorageSettings.from_extra_config(config)
    return allocator_type, settings.tp_lcm_size is not None
