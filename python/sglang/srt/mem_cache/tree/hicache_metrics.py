"""Prometheus metrics of prefix caches, their lower tiers and recurrent states, in SGLang's names.

Counts are tokens, unless a name says states.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry

from sglang.srt.utils.metrics import Gauge, MetricFactory

if TYPE_CHECKING:
    from sglang.srt.mem_cache.storage.types import CacheNamespace, StorageUsage

_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)

_PLACES: Final = {
    "used": "that requests run on or keep for the cache, or that copies use",
    "evictable": "of the prefix cache that nothing uses",
    "free": "without an owner",
}

_WHY_MISSED: Final = {
    "evicted": "evicted before",
    "no_state": "no recurrent state continues it",
    "logprobs": "logprobs of the prompt are wanted",
}
"""Texts for the log of decisions."""

QUEUES: Final = ("writes", "loads", "prefetches", "backups", "checks")
"""Names of the counts in `is_busy` of the tiers."""

_MAX_DECISIONS: Final = 64
_SHOWN_ID: Final = 48
"""Characters of a request's id that are shown."""
_SAME_S: Final = 1.0
"""Equal decisions within this time are one entry."""


class Decision(StrEnum):
    """A kind of decision."""

    NO_READ = "no read from L3"
    READ_ENDED = "L3 brought less"
    NO_WRITE = "no write to L3"
    EVICTED_DEVICE = "evicted from L1"
    EVICTED_HOST = "evicted from L2"
    DROPPED = "dropped from all tiers"
    NOT_REUSED = "prefix not reused"


@dataclass(slots=True)
class _Entry:
    what: Decision
    why: str
    began: float
    """`time.monotonic()` seconds of the first one."""
    tenant: str | None
    of: tuple[str, ...]
    request: str | None = None
    tokens: int = 0
    count: int = 0


class DecisionLog:
    """The last 64 decisions of a cache with their reasons, for operators. Equal ones within a
    second are counted together. Any thread; a lock guards the log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: deque[_Entry] = deque(maxlen=_MAX_DECISIONS)

    def note(
        self,
        what: Decision,
        why: str,
        tokens: int,
        *,
        request: str | None = None,
        tenant: str | None = None,
        of: tuple[str, ...] = (),
    ) -> None:
        """Note a decision about `tokens` tokens; does nothing for 0 tokens.

        Args:
            why: One of a few texts, without names or numbers.
            request: Id of the request that is the cause. The last of equal decisions is shown.
            tenant: Its tenant's label.
            of: Labels of the tenants whose tokens they were.
        """
        if not tokens:
            return
        now = self._clock()
        with self._lock:
            entry = self._same(what, why, tenant, of, now)
            if entry is None:
                entry = _Entry(what, why, now, tenant, of)
                self._entries.append(entry)
            entry.request = None if request is None else request[:_SHOWN_ID]
            entry.tokens += tokens
            entry.count += 1

    def _same(
        self, what: Decision, why: str, tenant: str | None, of: tuple[str, ...], now: float
    ) -> _Entry | None:
        """The entry of equal decisions within the last second, or None."""
        for entry in reversed(self._entries):
            if now - entry.began >= _SAME_S:
                break
            if (entry.what, entry.why, entry.tenant, entry.of) == (what, why, tenant, of):
                return entry
        return None

    def latest(self) -> list[dict[str, Any]]:
        """The entries, newest first: `what`, `why`, `request`, `tenant`, `of`, `tokens`, `count`,
        `age_s` in seconds."""
        now = self._clock()
        with self._lock:
            return [
                {
                    "what": entry.what.value,
                    "why": entry.why,
                    "request": entry.request,
                    "tenant": entry.tenant,
                    "of": list(entry.of),
                    "tokens": entry.tokens,
                    "count": entry.count,
                    "age_s": round(now - entry.began, 1),
                }
                for entry in reversed(self._entries)
            ]


class CacheMetrics:
    """Counters of a prefix cache of any number of tiers. Threads: prometheus_client's own locks;
    any thread may count.

    Attributes:
        decisions: The last decisions with their reasons.
        missed: Prompt tokens that were computed, by reason: `evicted` (this server had them before,
            see `DepartedPrefixes`), `no_state` (the pages are cached, no recurrent state continues
            them), `logprobs` (the client wants their logprobs), `new` (all others).
    """

    def __init__(self, registry: CollectorRegistry | None) -> None:
        self.decisions = DecisionLog()
        self._make = make = MetricFactory(registry)
        self.evicted = make.counter("evicted_tokens_total", "Tokens evicted, by tier", "tier")
        self.missed = make.counter(
            "cache_miss_tokens_total",
            "Prompt tokens that were computed, by the reason why they were not reused",
            "reason",
        )

    def count_missed(self, **tokens: int) -> None:
        """Count prompt tokens that were not reused, by reason; see `missed`."""
        for reason, count in tokens.items():
            self.missed.labels(reason).inc(count)
            if count and reason in _WHY_MISSED:
                self.decisions.note(Decision.NOT_REUSED, _WHY_MISSED[reason], count)

    def flows(self) -> dict[str, int]:
        """Counts of tokens since the start, by what happened to them."""
        return {"evicted_device": self.evicted.labels("device").count}


class HiCacheMetrics(CacheMetrics):
    """Counters of the lower tiers too."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        super().__init__(registry)
        counter, gauge = self._make.counter, self._make.gauge
        self.host_used = gauge("hicache_host_used_tokens", "Host (L2) tokens in use")
        self.host_total = gauge("hicache_host_total_tokens", "Host (L2) capacity in tokens")
        self.host_evictable = gauge(
            "hicache_host_evictable_tokens", "Host (L2) tokens that are cached and not in use"
        )
        self.host_stuck = gauge(
            "hicache_host_stuck_tokens",
            "Host (L2) tokens kept by reads from L3 that hang and that no request waits for",
        )
        self.dropped = counter(
            "hicache_dropped_tokens_total", "Tokens that left every tier unsaved, by cause", "cause"
        )
        self.host_written = counter(
            "hicache_host_written_tokens_total", "Tokens copied from L1 to L2"
        )
        self.checked_pages = counter(
            "hicache_checked_pages_total",
            "Pages that arrived from a tier, by what their checksum said; one for each pool",
            "tier",
            "outcome",
        )
        self.load_back = counter("load_back_tokens_total", "Tokens loaded from L2 to L1")
        self.load_back_seconds = self._make.histogram(
            "load_back_duration_seconds", "L2 to L1 copies", _SECONDS
        )
        self.prefetched = counter("prefetched_tokens_total", "Tokens read from L3")
        self.backuped = counter("backuped_tokens_total", "Tokens written to L3")
        self.prefetch_bandwidth = gauge("prefetch_bandwidth", "Bandwidth of the last L3 read, GB/s")
        self.backup_bandwidth = gauge("backup_bandwidth", "Bandwidth of the last L3 write, GB/s")
        self.hits = counter("hicache_hit_tokens_total", "Prompt tokens found, by tier", "tier")
        self.misses = counter(
            "hicache_miss_tokens_total",
            "Prompt tokens missing in a tier and in those above it, by tier",
            "tier",
        )
        self.prefetch_outcomes = counter(
            "hicache_prefetch_total",
            "L3 prefetches, by how they ended or why there was none",
            "reason",
        )
        self.backup_outcomes = counter(
            "hicache_backup_total", "L3 backups, by how they ended or why there was none", "reason"
        )
        self.pages = counter(
            "hicache_storage_pages_total", "L3 pages, by call and outcome", "call", "outcome"
        )
        self.queue_length = gauge(
            "hicache_queue_length", "Operations that wait or are under way, by queue", "queue"
        )
        self.transfer_seconds = self._make.histogram(
            "hicache_transfer_seconds",
            "Transfers, by kind: write (L1 to L2), backup (L2 to L3), prefetch (L3 to L2)",
            _SECONDS,
            "kind",
        )
        self.rank_lag = counter(
            "rank_lag_seconds_total",
            "Seconds that other ranks waited for this one, which came last to an agreement on "
            "copies and transfers",
            "rank",
        )
        self.breaker_open = gauge("hicache_breaker_open", "1 while L3 is left alone after failures")
        self._storage_info = gauge(
            "hicache_storage_info",
            "1 for the attached L3: servers share pages if they have the same namespace, which the "
            "labels after it make",
            "backend",
            "namespace",
            "weights",
            "kv_dtype",
            "page_size",
            "byte_order",
            "extra_pools",
            "format_version",
        )
        self._storage_used = gauge(
            "hicache_storage_used_bytes", "L3 (the whole store): bytes in use; NaN if unknown"
        )
        self._storage_total = gauge(
            "hicache_storage_total_bytes", "L3 (the whole store): capacity; NaN if unknown"
        )
        self._storage_objects = gauge(
            "hicache_storage_objects", "L3 (the whole store): objects; NaN if unknown"
        )
        self._storage_evicted = gauge(
            "hicache_storage_evicted_objects",
            "L3 (the whole store): objects evicted since its start; NaN if unknown",
        )
        self._storage_others = gauge(
            "hicache_storage_other_namespaces",
            "L3 (the whole store): namespaces with objects that this server cannot read; NaN if "
            "unknown",
        )
        self._storage_servers = gauge(
            "hicache_storage_servers",
            "Servers whose notes in L3 tell that they share this namespace now, with this one, at "
            "most 128; NaN if unknown, as in the first two minutes",
        )
        self._node_up = gauge(
            "hicache_store_node_up",
            "1 for each node that lends memory to a Mooncake store; 0 for an hour if it is gone",
            "node",
        )

    def set_storage(
        self,
        attached: tuple[str, CacheNamespace] | None,
        usage: StorageUsage | None,
        nodes: Mapping[str, bool],
        servers: int | None,
    ) -> None:
        """Set the gauges of L3, before the metrics are read.

        Args:
            attached: Backend and namespace of the attached store.
            usage: The last known usage.
            nodes: Whether each of its nodes serves.
            servers: Servers that share the namespace.
        """
        self._storage_info.clear()
        if attached is not None:
            backend, own = attached
            labels = {"backend": backend, "namespace": own.digest(), **own.described()}
            self._storage_info.labels(**labels).set(1)
        gauges = (
            self._storage_used, self._storage_total, self._storage_objects, self._storage_evicted,
            self._storage_others, self._storage_servers,
        )  # fmt: skip
        known: tuple[int | None, ...] = (None,) * (len(gauges) - 1)
        if usage is not None:
            known = (
                usage.used_bytes, usage.total_bytes, usage.num_objects, usage.num_evicted,
                usage.num_other_namespaces,
            )  # fmt: skip
        known = (*known, servers)
        for gauge, value in zip(gauges, known, strict=True):
            gauge.set(math.nan if value is None else value)
        self._node_up.clear()
        for node, serves in nodes.items():
            self._node_up.labels(node).set(serves)

    def flows(self) -> dict[str, int]:
        return super().flows() | {
            "evicted_host": self.evicted.labels("host").count,
            "written": self.host_written.count,
            "loaded": self.load_back.count,
            "stored": self.backuped.count,
            "read": self.prefetched.count,
        }


class StateMetrics:
    """Counters and gauges of states. A slot holds one state of all layers.

    Threads: the scheduler's only.

    Attributes:
        evicted: Evicted states by tier. A state that leaves a tier with its pages counts too, a
            flush does not.
        cut: Prompt tokens that were computed because a state was missing.
        snapshots: Snapshots by step (`prefill` or `decode`) and outcome (`taken` or `no_slot`).
    """

    def __init__(self, registry: CollectorRegistry | None) -> None:
        self._make = make = MetricFactory(registry)
        self._usage = make.gauge("mamba_usage", "Share of the device slots of states in use")
        self._slots = {
            place: make.gauge(
                f"num_{place}_mamba_slots", f"Device slots of recurrent states {text}"
            )
            for place, text in _PLACES.items()
        }
        self.evicted = make.counter(
            "evicted_mamba_slots", "Recurrent states that left a tier, by tier", "tier"
        )
        self.cut = make.counter(
            "mamba_cut_tokens",
            "Prompt tokens whose pages a tier had, computed since no state follows them",
        )
        self.snapshots = make.counter(
            "mamba_snapshots",
            "Snapshots of recurrent states that steps left, or for which no slot could be freed",
            "step",
            "outcome",
        )
        self._host: tuple[Gauge, Gauge] | None = None

    def set_device(self, slots: Mapping[str, int]) -> None:
        """Set the gauges of L1, before the metrics are read, to the present `mamba_slots` of the
        cache."""
        self._usage.set(slots["used_mamba_slots"] / slots["max_mamba_cache_size"])
        for place, gauge in self._slots.items():
            gauge.set(slots[f"{place}_mamba_slots"])

    def set_host(self, *, total: int, free: int) -> None:
        """The same for L2."""
        if self._host is None:
            self._host = (
                self._make.gauge(
                    "hicache_host_used_mamba_slots", "Host (L2) slots of recurrent states in use"
                ),
                self._make.gauge(
                    "hicache_host_total_mamba_slots", "Host (L2) capacity in recurrent states"
                ),
            )
        host_used, host_total = self._host
        host_used.set(total - free)
        host_total.set(total)
