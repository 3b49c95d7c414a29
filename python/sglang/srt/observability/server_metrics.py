"""Prometheus metrics of the server process: the latencies that clients see."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, generate_latest

from sglang.srt.utils.metrics import Counter, Histogram

_FIRST_TOKEN_BUCKETS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 60.0, 120.0,
)  # fmt: skip
_NEXT_TOKEN_BUCKETS: Final = (
    0.002, 0.004, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0,
)  # fmt: skip
_REQUEST_BUCKETS: Final = (
    0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0, 200.0, 400.0, 800.0,
)  # fmt: skip


class ServerMetrics:
    """Counters and histograms of one server process, in a registry of their own.

    Times are seconds. Event loop thread only.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._first_token = Histogram(
            "sglang:time_to_first_token_seconds",
            "From a streaming request's arrival to its first token.",
            registry=self.registry,
            buckets=_FIRST_TOKEN_BUCKETS,
        )
        self._next_token = Histogram(
            "sglang:inter_token_latency_seconds",
            "Between two tokens of a streaming request.",
            registry=self.registry,
            buckets=_NEXT_TOKEN_BUCKETS,
        )
        self._request = Histogram(
            "sglang:e2e_request_latency_seconds",
            "From a request's arrival to its end.",
            registry=self.registry,
            buckets=_REQUEST_BUCKETS,
        )
        self._requests = Counter(
            "sglang:num_requests",
            "Requests that ended, by how.",
            ("finish_reason",),
            registry=self.registry,
        )

    def observe_first_token(self, seconds: float) -> None:
        """Record the time to the first token of a streaming request."""
        self._first_token.observe(max(seconds, 0.0))

    def observe_next_tokens(self, seconds: float, count: int) -> None:
        """Record `count` tokens that arrived together, `seconds` after the last ones."""
        each = max(seconds, 0.0) / count
        for _ in range(count):
            self._next_token.observe(each)

    def observe_end(self, outcome: str, seconds: float | None) -> None:
        """Record the end of a request.

        Args:
            outcome: See `RequestState.outcome`.
            seconds: Time since its arrival; None: its client left before its end.
        """
        self._requests.labels(finish_reason=outcome).inc()
        if seconds is not None and outcome in ("stop", "length"):
            self._request.observe(max(seconds, 0.0))

    def render(self) -> str:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry).decode()
