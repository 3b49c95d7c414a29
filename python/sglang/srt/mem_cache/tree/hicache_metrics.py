"""Prometheus metrics of the hierarchical cache, under SGLang's names; counts are tokens."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry

from sglang.srt.utils.metrics import Counter, Gauge, Histogram

_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)

QUEUES: Final = ("writes", "loads", "prefetches", "backups", "checks")
"""Names of the counts in `is_busy` of the tiers."""


class HiCacheMetrics:
    """Counters of the tiers. Threads: prometheus_client's own locks; any thread may count."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        registry = registry or CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"sglang:{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"sglang:{name}", text, labels, registry=registry)

        def seconds(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"sglang:{name}", text, labels, registry=registry, buckets=_SECONDS)

        self.host_used = gauge("hicache_host_used_tokens", "Host (L2) tokens in use")
        self.host_total = gauge("hicache_host_total_tokens", "Host (L2) capacity in tokens")
        self.host_stuck = gauge(
            "hicache_host_stuck_tokens",
            "Host (L2) tokens kept by reads from L3 that hang and that no request waits for",
        )
        self.evicted = counter("evicted_tokens_total", "Tokens evicted, by tier", "tier")
        self.dropped = counter(
            "hicache_dropped_tokens_total", "Tokens that left every tier unsaved, by cause", "cause"
        )
        self.load_back = counter("load_back_tokens_total", "Tokens loaded from L2 to L1")
        self.load_back_seconds = seconds("load_back_duration_seconds", "L2 to L1 copies")
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
        self.transfer_seconds = seconds(
            "hicache_transfer_seconds",
            "Transfers, by kind: write (L1 to L2), backup (L2 to L3), prefetch (L3 to L2)",
            "kind",
        )
        self.breaker_open = gauge("hicache_breaker_open", "1 while L3 is left alone after failures")
