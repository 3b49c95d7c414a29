"""The connection to L3 that a cache owns: which store is attached, and what all ranks know of it.

Threads: the scheduler's only, unless a method says otherwise.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sglang.srt.arg_groups.extra_config import parse_extra_config, without_secrets
from sglang.srt.mem_cache.l3.attached_store import AttachedStore
from sglang.srt.mem_cache.l3.prefetch_table import PrefetchPolicy
from sglang.srt.mem_cache.l3.store_opener import StoreOpener
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
from sglang.srt.mem_cache.tree.tick_sync import Progress, Rates
from sglang.srt.mem_cache.tree.tree_node import TreeNode


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
        opener: Connects to backends.
        prefetch_policy: Name of the first prefetch policy.
        metrics: Metrics of the tiers.

    Attributes:
        attached: Client and threads of the attached store; None: none is attached.
        is_changing: True while an operator's change of L3 is under way.
        epoch: Counter that is increased whenever L3 may have lost its objects. Pages written or
            read in an earlier epoch do not count as stored.
        answers: True if no call to L3 is stuck on any rank.
        rates: Speeds of reads and of prefills that the ranks agreed on last.
    """

    def __init__(self, opener: StoreOpener, prefetch_policy: str, metrics: HiCacheMetrics) -> None:
        self.opener = opener
        self.prefetch_policy = _parse_policy(prefetch_policy)
        self.attached: AttachedStore | None = None
        self.is_changing = False
        self.epoch = 0
        self._metrics = metrics
        self.answers = True
        self.rates = Rates()
        self._seen_reconnects = self._agreed_reconnects = 0
        """Reconnects of L3 on this rank: as last reported, and as agreed by all ranks."""

    # ---- what the flows to and from L3 ask ---------------------------------------------------

    @property
    def available(self) -> bool:
        """True if calls to L3 are allowed: no call is stuck on any rank, and no change is under
        way."""
        return self.answers and not self.is_changing

    def has_stored(self, node: TreeNode) -> bool:
        """True if L3 is believed to have the pages of `node`."""
        return node.parent is None or node.storage_epoch == self.epoch

    def forget_stored(self) -> None:
        """Mark all nodes as not stored: L3 is another one, was cleared, or has lost pages."""
        self.epoch += 1

    # ---- attaching and detaching -------------------------------------------------------------

    def attach(self, backend: str, extra_config: str | None) -> None:
        """Connect to `backend` and attach it, at the start of the server.

        Raises:
            ValueError: The backend or its configuration cannot work.
            StorageUnavailable: It cannot be reached, and the configuration does not allow that.
        """
        config = parse_extra_config(extra_config)
        self.attached = self.opener.open(backend, config, may_wait=True)

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
            return PreparedChange(policy, self.opener.open(backend, config or {}, may_wait=False))
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
        return store

    def shutdown(self) -> None:
        """Detach and close the store, within seconds. Idempotent."""
        if (store := self.detach()) is not None:
            store.close()

    # ---- policies, and what operators see ----------------------------------------------------

    def prefetch_seconds(self, num_tokens: int) -> float:
        """Seconds for which a request may wait for a read of `num_tokens`. A store is attached."""
        assert self.attached is not None
        timeout = self.attached.settings.timeout
        if self.prefetch_policy is PrefetchPolicy.WAIT_COMPLETE:
            return timeout.max
        return timeout.seconds_for(num_tokens)

    def state(self) -> dict[str, Any]:
        """Backend, configuration as JSON text without secrets (None: there is none), transport,
        prefetch policy."""
        store = self.attached
        client = None if store is None else store.guard.client
        config = None if store is None else store.config
        return {
            "hicache_storage_backend": None if store is None else store.backend,
            "hicache_storage_backend_extra_config": json.dumps(without_secrets(config))
            if config
            else None,
            "hicache_storage_transport": client and client.describe_transport(),
            "hicache_storage_prefetch_policy": self.prefetch_policy.value,
        }

    def describe(self) -> str:
        """One line for the log."""
        store = self.attached
        if store is None:
            return "L3: none attached (--hicache-storage-backend)"
        name = store.guard.backend_name or f"{store.backend}, not reached yet"
        return (
            f"L3: {name}, sized by the store itself; prefetch policy {self.prefetch_policy.value}, "
            f"from {store.settings.prefetch_threshold} tokens; namespace {self.opener.namespace()}"
        )

    # ---- one tick ----------------------------------------------------------------------------

    def report(self, progress: Progress) -> None:
        """Add this rank's observations to those of the tick."""
        if (store := self.attached) is not None:
            progress.available = store.guard.available
            self._seen_reconnects = store.guard.reconnects
            progress.has_reconnected = self._seen_reconnects != self._agreed_reconnects
            progress.rates = Rates(store.read_rate.known, store.prefill_rate.known)

    def act_on(self, agreed: Progress) -> None:
        """Take up what the ranks agree on."""
        self.answers = agreed.available
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
