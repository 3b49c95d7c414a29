"""Prometheus metrics of the server process, the scheduler and transfers, under SGLang's names.

The server process measures the latencies that clients see; the scheduler measures those that only
it knows. The hierarchical cache registers its metrics in the scheduler's registry.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

from prometheus_client import CollectorRegistry

from sglang.srt.messages.io_struct import Tier, Verifications
from sglang.srt.utils.metrics import Counter, Gauge, MetricFactory, render

if TYPE_CHECKING:
    from sglang.srt.messages.io_struct import CachedTokensDetails
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

NO_LABELS: Final[Mapping[str, str]] = {}
_FIRST_TOKEN_BUCKETS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 60.0, 120.0,
)  # fmt: skip
_NEXT_TOKEN_BUCKETS: Final = (
    0.002, 0.004, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0,
)  # fmt: skip
_REQUEST_BUCKETS: Final = (
    0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0, 200.0, 400.0, 800.0,
)  # fmt: skip


def model_label(server_args: ServerArgs) -> dict[str, str]:
    """The label of all samples of a server, as SGLang's dashboards select by it: `model_name`."""
    return {"model_name": server_args.served_model_name or server_args.model_path or ""}


class ServerMetrics:
    """Counters and histograms of one server process, in a registry of their own.

    Times are seconds. Event loop thread only.

    Args:
        labels: Labels of every sample.
    """

    def __init__(self, labels: Mapping[str, str] = NO_LABELS) -> None:
        self.registry = CollectorRegistry()
        self._labels = labels
        make = MetricFactory(self.registry)
        self._first_token = make.histogram(
            "time_to_first_token_seconds",
            "From a streaming request's arrival to its first token.",
            _FIRST_TOKEN_BUCKETS,
        )
        self._next_token = make.histogram(
            "inter_token_latency_seconds",
            "Between two tokens of a streaming request.",
            _NEXT_TOKEN_BUCKETS,
        )
        self._request = make.histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end.", _REQUEST_BUCKETS
        )
        self._requests = make.counter(
            "num_requests", "Requests that ended, by how.", "finish_reason"
        )

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(max(seconds, 0.0))

    def observe_next_tokens(self, seconds: float, count: int) -> None:
        """Record `count` tokens that arrived together, `seconds` after the last ones."""
        each = max(seconds, 0.0) / count
        for _ in range(count):
            self._next_token.observe(each)

    def observe_end(self, outcome: str, seconds: float | None) -> None:
        """Record the end of a request; `seconds` since its arrival are None if its client left
        before its end."""
        self._requests.labels(finish_reason=outcome).inc()
        if seconds is not None and outcome in ("stop", "length"):
            self._request.observe(max(seconds, 0.0))

    def render(self) -> str:
        return render(self.registry, self._labels)


def count_dropped_spans(registry: CollectorRegistry | None) -> Counter:
    """The counter of lost spans of a server with `--enable-trace`, in `registry`. It is here, since
    the modules of tracing need packages that other servers do without."""
    return MetricFactory(registry).counter(
        "trace_spans_dropped", "Spans that did not reach the collector of --otlp-traces-endpoint"
    )


_QUEUE_SECONDS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120)
_STAGE_SECONDS: Final = (
    0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30,
)  # fmt: skip
Stage = Literal["match", "l3_wait", "prefill", "first_decode"]
"""Part of a request's time: looking its prompt up in the tree when it arrives; the wait for its
read from L3 after its turn has come; from its first step to its first token; from there to its
second token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLoad:
    """Requests and device token slots now."""

    num_running: int
    num_queued: int
    pool_tokens: int
    """Slots of the pool."""
    free_tokens: int
    """Slots without an owner."""
    evictable_tokens: int
    """Slots of cached tokens that nothing uses."""

    @property
    def used_tokens(self) -> int:
        """Slots that are neither free nor evictable."""
        return self.pool_tokens - self.free_tokens - self.evictable_tokens


class SchedulerMetrics:
    """Counters that the scheduler updates, and gauges that `render` sets. Scheduler thread only.

    Attributes:
        registry: Registry of these metrics and of the cache's.
        num_generated: Tokens generated so far; a plain number, because it changes at every token.
        num_prompt: Prompt tokens of scheduled requests.
        num_cached: Reused prompt tokens, by the tier that they came from.
        verifications: Verifications of drafts, by the tier that the prompt's prefix came from.

    Args:
        labels: Labels of every sample.
        num_drafts: Drafts of a verification; 0: the server does not speculate.
    """

    def __init__(self, labels: Mapping[str, str] = NO_LABELS, num_drafts: int = 0) -> None:
        self.registry = CollectorRegistry()
        self._labels = labels
        self.num_generated = 0
        self._window = (time.monotonic(), 0)
        self.num_prompt = 0
        self.num_cached = dict.fromkeys(("device", "host", "storage"), 0)
        self.verifications = {tier: Verifications() for tier in get_args(Tier)}
        self._num_drafts = num_drafts
        self._num_exported: dict[Counter, int] = {}
        self._of_role: DisaggregationMetrics | None = None
        self._of_reads: TransferMetrics | None = None
        make = MetricFactory(self.registry)
        self._gauges = {
            name: make.gauge(name, text)
            for name, text in (
                ("num_running_reqs", "Requests that hold token slots"),
                ("num_queue_reqs", "Requests that wait to be scheduled"),
                ("num_used_tokens", "Device (L1) token slots in use, evictable ones not counted"),
                ("token_usage", "Share of the device token slots in use"),
                ("max_total_num_tokens", "Device (L1) capacity in tokens"),
                ("kv_evictable_tokens", "Device (L1) tokens that are cached and not in use"),
                ("kv_available_tokens", "Device (L1) token slots without an owner"),
                ("gen_throughput", "Generated tokens per second since the last reading"),
                ("cache_hit_rate", "Share of the prompt tokens that were reused"),
            )
        }
        self._prompt_tokens = make.counter("prompt_tokens", "Prompt tokens of scheduled requests")
        self._generation_tokens = make.counter("generation_tokens", "Generated tokens")
        self.retractions = make.counter(
            "num_retracted_reqs", "Requests that gave way when token slots ran out"
        )
        self.backed_up = make.counter(
            "retraction_backup_tokens",
            "Tokens of retracted requests, by what became of their pages: kept in L2, or no room "
            "there (l2_full)",
            "outcome",
        )
        self._kernels = make.counter(
            "kernel_compilations", "Kernels that were compiled, or read from the disk, in service"
        )
        self._cached_tokens = make.counter(
            "cached_tokens", "Prompt tokens that were reused, by where they were", "source"
        )
        self._spec_gauges: list[Gauge] = []
        self._spec_counters: list[Counter] = []
        if num_drafts:
            self._spec_gauges = [
                make.gauge(name, text)
                for name, text in (
                    ("spec_accept_length", "Output tokens of a verification of drafts on average"),
                    ("spec_accept_rate", "Share of the drafts that became output"),
                )
            ]
            self._spec_counters = [
                make.counter(name, text, "tier")
                for name, text in (
                    ("spec_verifications", "Verifications of drafts"),
                    ("spec_accepted_drafts", "Drafts that became output"),
                    ("spec_drafts", "Drafts"),
                )
            ]
        self._queue_time = make.histogram(
            "queue_time_seconds", "From arrival to being scheduled", _QUEUE_SECONDS
        )
        self._stages = make.histogram(
            "per_stage_req_latency_seconds",
            "Parts of a request's time, by stage: match, l3_wait, prefill, first_decode",
            _STAGE_SECONDS,
            "stage",
        )

    def observe_stage(self, stage: Stage, seconds: float) -> None:
        """Record how long a stage of one request took."""
        self._stages.labels(stage).observe(seconds)

    def on_scheduled(
        self, prompt_tokens: int, cached: CachedTokensDetails, queue_time: float
    ) -> None:
        """Count a request that is scheduled for the first time: its prompt tokens, the reused
        tokens among them, and the seconds since its arrival."""
        self.num_prompt += prompt_tokens
        self.num_cached["device"] += cached.device
        self.num_cached["host"] += cached.host
        self.num_cached["storage"] += cached.storage
        self._queue_time.observe(queue_time)

    def on_backed_up(self, kept: int, lost: int) -> None:
        """Count the tokens of a retracted request that L2 keeps, and those it has no room for."""
        self.backed_up.labels("kept").inc(kept)
        self.backed_up.labels("l2_full").inc(lost)

    def of_role(self, role: str, queues: Mapping[str, Callable[[], int]]) -> DisaggregationMetrics:
        """The metrics of a prefill or decode server, which from now on has this role; see
        `DisaggregationMetrics.watch`."""
        if self._of_role is None:
            self._of_role = DisaggregationMetrics(self.registry)
        self._of_role.watch(role, queues)
        return self._of_role

    def of_reads(self, ways: Sequence[str]) -> TransferMetrics:
        """The metrics of a decode server's reads; see `TransferMetrics`."""
        if self._of_reads is None:
            self._of_reads = TransferMetrics(self.registry, ways)
        return self._of_reads

    def on_kernel_compiled(self, name: str) -> None:
        """Count and log a kernel that was not ready when a request needed it."""
        self._kernels.inc()
        logger.warning("Kernel %s was compiled in service, and delayed a step", name)

    def render(self, load: SchedulerLoad) -> str:
        """Everything in the registry, in Prometheus' text format."""
        self._export(self._generation_tokens, self.num_generated)
        self._export(self._prompt_tokens, self.num_prompt)
        for source, tokens in self.num_cached.items():
            self._export(self._cached_tokens.labels(source), tokens)
        num_cached = sum(self.num_cached.values())
        values = {
            "num_running_reqs": load.num_running,
            "num_queue_reqs": load.num_queued,
            "num_used_tokens": load.used_tokens,
            "token_usage": load.used_tokens / load.pool_tokens,
            "max_total_num_tokens": load.pool_tokens,
            "kv_evictable_tokens": load.evictable_tokens,
            "kv_available_tokens": load.free_tokens,
            "gen_throughput": self._throughput(),
            "cache_hit_rate": num_cached / self.num_prompt if self.num_prompt else 0.0,
        }
        for name, value in values.items():
            self._gauges[name].set(value)
        if self._num_drafts:
            self._export_speculation()
        return render(self.registry, self._labels)

    def _export_speculation(self) -> None:
        parts = self.verifications.values()
        whole = Verifications(
            count=sum(part.count for part in parts), accepted=sum(part.accepted for part in parts)
        )
        drafts = whole.count * self._num_drafts
        length, rate = self._spec_gauges
        length.set(whole.accept_length)
        rate.set(whole.accepted / drafts if drafts else 0.0)
        for tier, part in self.verifications.items():
            totals = part.count, part.accepted, part.count * self._num_drafts
            for counter, total in zip(self._spec_counters, totals, strict=True):
                self._export(counter.labels(tier), total)

    def _export(self, counter: Counter, total: int) -> None:
        """Raise `counter` to the plain number `total`."""
        counter.inc(total - self._num_exported.get(counter, 0))
        self._num_exported[counter] = total

    def _throughput(self) -> float:
        now = time.monotonic()
        begin, tokens = self._window
        self._window = (now, self.num_generated)
        return (self.num_generated - tokens) / (now - begin) if now > begin else 0.0


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
    """Role, queues and failures of a prefill or decode server. Scheduler thread only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._make = make = MetricFactory(registry)
        self._queues: dict[str, Gauge] = {}
        self._role = make.gauge(
            "pd_role",
            "1 for the present role of the server (prefill or decode), 0 for an earlier one",
            "role",
        )
        self._roles: set[str] = set()
        self._bootstrap_failed = make.counter(
            "num_bootstrap_failed_reqs",
            "Requests that failed before the decode server knew that the prefill server has them",
        )
        self._transfer_failed = make.counter(
            "num_transfer_failed_reqs",
            "Requests that failed, or that the other server gave up, after that",
        )

    def watch(self, role: str, queues: Mapping[str, Callable[[], int]]) -> None:
        """Show the present role, and its queues: functions that count the requests in a queue now,
        by metric name. Queues of an earlier role are empty from now on."""
        self._roles.add(role)
        for one in self._roles:
            self._role.labels(one).set(one == role)
        for name in (*self._queues, *queues):
            if name not in self._queues:
                self._queues[name] = self._make.gauge(name, _QUEUES[name])
            self._queues[name].set_function(queues.get(name, int))

    def on_failure(self, *, had_bootstrapped: bool) -> None:
        """Count a request that failed between the servers; `had_bootstrapped`: the prefill server
        had confirmed it."""
        (self._transfer_failed if had_bootstrapped else self._bootstrap_failed).inc()


class TransferMetrics:
    """Metrics of a decode server's reads, prompt by prompt. Scheduler thread only. Metadata come by
    one of `ways`."""

    def __init__(self, registry: CollectorRegistry, ways: Sequence[str]) -> None:
        make = MetricFactory(registry)
        self._latency = make.histogram(
            "kv_transfer_latency_ms", "Time in which a prompt's pages were read, in ms", _MS
        )
        self._speed = make.histogram(
            "kv_transfer_speed_gb_s", "Speed of reading a prompt's pages, in GB/s", _GB_PER_S
        )
        self._total = make.histogram(
            "kv_transfer_total_mb", "What was read of a prompt, in MB", _MB
        )
        self._metadata = make.counter(
            "kv_transfer_metadata_bytes",
            "Bytes of metadata of prompts: sent over the control connection, or read as pages are",
            "way",
        )
        for way in ways:
            self._metadata.labels(way)
        self._checked = make.counter(
            "kv_transfer_checked_pages",
            "Pages and states that were read, by what their checksum said; one for each pool",
            "outcome",
        )

    def on_read(self, num_bytes: int, seconds: float, metadata_bytes: Mapping[str, int]) -> None:
        """Count a prompt that has arrived: the bytes read of it (0: this server had all of it), the
        seconds with a read in flight, the bytes of its metadata by way."""
        self._total.observe(num_bytes / _MEGA)
        if num_bytes and seconds > 0:
            self._latency.observe(seconds * 1e3)
            self._speed.observe(num_bytes / seconds / 1e9)
        for way, count in metadata_bytes.items():
            self._metadata.labels(way).inc(count)

    def on_checked(self, outcomes: Mapping[str, int]) -> None:
        """Count the pages of a prompt, which may have failed, by outcome of their check."""
        for outcome, count in outcomes.items():
            self._checked.labels(outcome).inc(count)
