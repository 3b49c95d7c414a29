"""Prometheus metrics of a server that only prefills or only decodes, under SGLang's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry

from sglang.srt.utils.metrics import Counter, Gauge, Histogram

_QUEUES: Final = {
    "num_prefill_bootstrap_queue_reqs": "Requests that no decode server has asked for yet",
    "num_prefill_inflight_queue_reqs": "Requests that are computed and not yet read",
    "num_decode_prealloc_queue_reqs": "Requests that wait for token slots",
    "num_decode_transfer_queue_reqs": "Requests whose prompts are on their way",
    "num_decode_lingering_reqs": "Requests that have ended, and whose slots are still read into",
}
_MS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000)
_GB_PER_S: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 25, 50, 100, 200, 400)
_MB: Final = (0.1, 0.5, 1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000)
_MEGA: Final = 1e6


class DisaggregationMetrics:
    """Queues, failures and transfers of a prefill or decode server. Scheduler thread only."""

    def __init__(
        self, registry: CollectorRegistry, queues: Mapping[str, Callable[[], int]]
    ) -> None:
        """Args:
        registry: The scheduler's.
        queues: Functions that count the requests in a queue now, by metric name.
        """
        for name, count in queues.items():
            gauge = Gauge(f"sglang:{name}", _QUEUES[name], registry=registry)
            gauge.set_function(count)
        self._bootstrap_failed = Counter(
            "sglang:num_bootstrap_failed_reqs",
            "Requests that failed before the decode server knew that the prefill server has them",
            registry=registry,
        )
        self._transfer_failed = Counter(
            "sglang:num_transfer_failed_reqs",
            "Requests that failed, or that the other server gave up, after that",
            registry=registry,
        )

    def on_failure(self, *, had_bootstrapped: bool) -> None:
        """A request failed between the servers.

        Args:
            had_bootstrapped: Whether the prefill server had confirmed the request.
        """
        (self._transfer_failed if had_bootstrapped else self._bootstrap_failed).inc()


class TransferMetrics:
    """Metrics of a decode server's reads, prompt by prompt. Scheduler thread only.

    Args:
        ways: Ways by which metadata come.
    """

    def __init__(self, registry: CollectorRegistry, ways: Sequence[str]) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"sglang:{name}", text, registry=registry, buckets=buckets)

        self._latency = histogram(
            "kv_transfer_latency_ms", "Time in which a prompt's pages were read, in ms", _MS
        )
        self._speed = histogram(
            "kv_transfer_speed_gb_s", "Speed of reading a prompt's pages, in GB/s", _GB_PER_S
        )
        self._total = histogram("kv_transfer_total_mb", "What was read of a prompt, in MB", _MB)
        self._metadata = Counter(
            "sglang:kv_transfer_metadata_bytes",
            "Bytes of metadata of prompts: sent over the control connection, or read as pages are",
            ["way"],
            registry=registry,
        )
        for way in ways:
            self._metadata.labels(way)

    def on_read(self, num_bytes: int, seconds: float) -> None:
        """Count a prompt that has arrived.

        Args:
            num_bytes: Bytes read of it; 0: this server had all of it.
            seconds: Seconds with a read in flight.
        """
        self._total.observe(num_bytes / _MEGA)
        if num_bytes and seconds > 0:
            self._latency.observe(seconds * 1e3)
            self._speed.observe(num_bytes / seconds / 1e9)

    def on_metadata(self, num_bytes: Mapping[str, int]) -> None:
        """Count the metadata of a prompt: bytes by way."""
        for way, count in num_bytes.items():
            self._metadata.labels(way).inc(count)
