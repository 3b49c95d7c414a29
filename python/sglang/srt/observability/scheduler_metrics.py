"""Prometheus metrics of the scheduler, under SGLang's names.

The server process measures the latencies that clients see; the scheduler measures those that only
it knows. The hierarchical cache registers its metrics in the same registry.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, generate_latest

from sglang.srt.utils.metrics import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from sglang.srt.managers.messages.io_struct import CachedTokensDetails

_QUEUE_SECONDS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120)


class SchedulerMetrics:
    """Counters that the scheduler updates, and gauges that `render` sets. Scheduler thread only.

    Attributes:
        registry: Registry of these metrics and of the cache's.
        num_generated: Tokens generated so far; a plain number, because it changes at every token.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Args:
        clock: Seconds, for the throughput.
        """
        self.registry = CollectorRegistry()
        self.num_generated = 0
        self._clock = clock
        self._window = (clock(), 0)
        self._num_prompt = 0
        self._num_cached = dict.fromkeys(("device", "host", "storage"), 0)
        self._num_exported: dict[Counter, int] = {}
        self._gauges = {
            name: Gauge(f"sglang:{name}", text, registry=self.registry)
            for name, text in (
                ("num_running_reqs", "Requests that hold token slots"),
                ("num_queue_reqs", "Requests that wait to be scheduled"),
                ("num_used_tokens", "Device token slots in use"),
                ("token_usage", "Share of the device token slots in use"),
                ("gen_throughput", "Generated tokens per second since the last reading"),
                ("cache_hit_rate", "Share of the prompt tokens that were reused"),
            )
        }
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of scheduled requests")
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens")
        self.retractions = self._counter(
            "num_retracted_reqs", "Requests that gave way when token slots ran out"
        )
        self._cached_tokens = Counter(
            "sglang:cached_tokens",
            "Prompt tokens that were reused, by where they were",
            ["source"],
            registry=self.registry,
        )
        self._queue_time = Histogram(
            "sglang:queue_time_seconds",
            "From arrival to being scheduled",
            buckets=_QUEUE_SECONDS,
            registry=self.registry,
        )

    def on_scheduled(
        self, prompt_tokens: int, cached: CachedTokensDetails, queue_time: float
    ) -> None:
        """Count a request that is scheduled for the first time.

        Args:
            prompt_tokens: Length of its prompt.
            cached: Tokens of it that were reused.
            queue_time: Seconds since its arrival.
        """
        self._num_prompt += prompt_tokens
        self._num_cached["device"] += cached.device
        self._num_cached["host"] += cached.host
        self._num_cached["storage"] += cached.storage
        self._queue_time.observe(queue_time)

    def render(
        self, *, num_running: int, num_queued: int, used_tokens: int, pool_tokens: int
    ) -> str:
        """Everything in the registry, in Prometheus' text format."""
        self._export(self._generation_tokens, self.num_generated)
        self._export(self._prompt_tokens, self._num_prompt)
        for source, tokens in self._num_cached.items():
            self._export(self._cached_tokens.labels(source), tokens)
        num_cached = sum(self._num_cached.values())
        values = {
            "num_running_reqs": num_running,
            "num_queue_reqs": num_queued,
            "num_used_tokens": used_tokens,
            "token_usage": used_tokens / pool_tokens,
            "gen_throughput": self._throughput(),
            "cache_hit_rate": num_cached / self._num_prompt if self._num_prompt else 0.0,
        }
        for name, value in values.items():
            self._gauges[name].set(value)
        return generate_latest(self.registry).decode()

    def _export(self, counter: Counter, total: int) -> None:
        """Raise `counter` to the plain number `total`."""
        counter.inc(total - self._num_exported.get(counter, 0))
        self._num_exported[counter] = total

    def _throughput(self) -> float:
        now = self._clock()
        begin, tokens = self._window
        self._window = (now, self.num_generated)
        return (self.num_generated - tokens) / (now - begin) if now > begin else 0.0

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"sglang:{name}", text, registry=self.registry)
