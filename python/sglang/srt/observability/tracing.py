"""Traces through OpenTelemetry, made in the server process and exported by a thread of it.

Imported with `--enable-trace` alone, since its packages are the extra `trace`. An exporter that
fails or is slow loses spans, which are counted; nobody waits for it. Spans have no text of prompts
or answers.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

import xxhash
from opentelemetry import context, propagate, trace
from opentelemetry.sdk.resources import (
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from sglang.srt.environ import envs
from sglang.srt.observability.engine_metrics import count_dropped_spans
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue
    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)

_QUOTING: Final = ("opentelemetry.trace", "opentelemetry.baggage")
"""Loggers that quote headers of clients in warnings about them."""
_MOST_QUEUED: Final = 8192
"""Spans that wait for the exporter; further ones are lost."""
_CALL_S: Final = 5.0
"""Seconds for one call of the collector, with its retries."""
_CLOSE_S: Final = 2.0
_HTTP: Final = "http/protobuf"
_PROTOCOLS: Final = ("grpc", _HTTP)


class TimedSpan(NamedTuple):
    """A span that is over, in seconds of `time.monotonic()`."""

    name: str
    begin: float
    end: float
    attributes: Mapping[str, AttributeValue]
    error: str | None = None
    """Why it failed; None: it did not."""


def make_exporter(endpoint: str) -> SpanExporter:
    """The exporter to a collector.

    Args:
        endpoint: HOST:PORT or a URL. OTEL_EXPORTER_OTLP_TRACES_PROTOCOL chooses the protocol;
            unset, a URL with a path is HTTP's, and all else gRPC's.

    Raises:
        ValueError: The endpoint or the variable is wrong.
        ImportError: The extra `trace` is not installed.
    """
    url = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
    chosen = envs.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL.get()
    protocol = chosen or (_HTTP if url.path.strip("/") else "grpc")
    if protocol not in _PROTOCOLS:
        raise ValueError(
            f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL={protocol}: choose one of {', '.join(_PROTOCOLS)}"
        )
    if not url.hostname or url.scheme not in ("", "http", "https"):
        raise ValueError(
            f"--otlp-traces-endpoint {endpoint}: give HOST:PORT, or a URL that begins with http"
        )
    # The exporters would log about a collector that is down without limit.
    for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if protocol == _HTTP:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

        path = url.path if url.path.strip("/") else "/v1/traces"
        address = f"{url.scheme or 'http'}://{url.netloc}{path}"
        return over_http.OTLPSpanExporter(endpoint=address, timeout=_CALL_S)
    from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

    is_plain = url.scheme != "https"
    return over_grpc.OTLPSpanExporter(endpoint=url.netloc, insecure=is_plain, timeout=_CALL_S)


class SpanQueue(SpanProcessor):
    """Hands spans to an exporter, in batches, by the thread `trace-export`.

    Any thread may end spans. A span is lost if the queue is full, or if the exporter fails with it.

    Attributes:
        exported, dropped: Spans so far.
    """

    def __init__(self, exporter: SpanExporter, registry: CollectorRegistry | None = None) -> None:
        self.exported = self.dropped = 0
        self._exporter = exporter
        self._queue: queue.Queue[ReadableSpan] = queue.Queue(_MOST_QUEUED)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._log = RateLimitedLogger(logger)
        self._counter = count_dropped_spans(registry)
        self._thread = threading.Thread(target=self._run, name="trace-export", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        try:
            self._queue.put_nowait(span)
        except queue.Full:
            self._drop(1, "the queue is full")

    def shutdown(self) -> None:
        """Export what is queued, for at most two seconds. Idempotent."""
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def _drop(self, count: int, why: str) -> None:
        with self._lock:
            self.dropped += count
        self._counter.inc(count)
        self._log.warning("dropped", "traces: %d spans are lost: %s", count, why)

    def _run(self) -> None:
        delay_s = envs.SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS.get() / 1e3
        most = max(1, envs.SGLANG_OTLP_EXPORTER_MAX_EXPORT_BATCH_SIZE.get())
        while True:
            is_last = self._closing.wait(delay_s)
            while batch := self._take(most):
                self._export(batch)
            if is_last:
                self._exporter.shutdown()
                return

    def _take(self, most: int) -> list[ReadableSpan]:
        batch: list[ReadableSpan] = []
        while len(batch) < most:
            try:
                batch.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return batch

    def _export(self, batch: Sequence[ReadableSpan]) -> None:
        why = "the collector does not take them"
        try:
            result = self._exporter.export(batch)
        except Exception as error:  # noqa: BLE001 - a thread's boundary; `_drop` logs it
            result, why = SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"
        if result is SpanExportResult.SUCCESS:
            self.exported += len(batch)
        else:
            self._drop(len(batch), why)


class Tracer:
    """The traces of one server process.

    Args:
        exporter: Gets the spans.
        service: Name of the service in traces.
        instance: Name of this server among them, e.g. its address.
        registry: Gets the counter of lost spans; None: there is none.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        service: str = "sglang",
        instance: str = "",
        registry: CollectorRegistry | None = None,
    ) -> None:
        for name in _QUOTING:
            logging.getLogger(name).setLevel(logging.ERROR)
        self.queue = SpanQueue(exporter, registry)
        names = {SERVICE_NAME: service, SERVICE_INSTANCE_ID: instance}
        self._provider = TracerProvider(
            # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win.
            resource=Resource(names).merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(self.queue)
        self._tracer = self._provider.get_tracer("sglang")

    def close(self) -> None:
        """Export what is queued, for at most two seconds."""
        self._provider.shutdown()

    def parent(self, room: int | None = None) -> context.Context | None:
        """The context of the HTTP request that this task handles, for `record`; None: its trace is
        not sampled.

        Args:
            room: Room of a request that two servers share. If the client sent no trace, both put
                their spans into one whose id is a digest of the room.
        """
        here = context.get_current()
        span = trace.get_current_span(here)
        is_outside = not span.get_span_context().is_valid
        if not (is_outside or span.is_recording()):
            return None
        if room is None or getattr(span, "parent", None) is not None:
            return here
        digest = xxhash.xxh3_128_intdigest(room.to_bytes(8, "little"))
        shared = trace.SpanContext(
            trace_id=digest,
            span_id=digest % (1 << 64),
            is_remote=True,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
        return trace.set_span_in_context(trace.NonRecordingSpan(shared), here)

    def record(
        self, parent: context.Context, root: TimedSpan, stages: Sequence[TimedSpan] = ()
    ) -> None:
        """Add a span that is over to the trace of `parent`, with its stages."""
        offset = time.time_ns() - time.monotonic_ns()
        span = self._start(parent, root, offset)
        inside = trace.set_span_in_context(span, parent)
        for stage in stages:
            self._start(inside, stage, offset).end(_nanoseconds(stage.end, offset))
        span.end(_nanoseconds(root.end, offset))

    def _start(self, parent: context.Context, timed: TimedSpan, offset: int) -> trace.Span:
        span = self._tracer.start_span(
            timed.name,
            parent,
            attributes=timed.attributes,
            start_time=_nanoseconds(timed.begin, offset),
        )
        if timed.error is not None:
            span.set_status(trace.StatusCode.ERROR, timed.error)
        return span

    @contextlib.contextmanager
    def http_request(
        self, route: str, headers: Mapping[str, str]
    ) -> Iterator[Callable[[int], None]]:
        """A span for a POST request that begins now, in the trace that its `traceparent` names.
        Code within finds the span by `parent`. Gives a function that notes the answer's status."""
        span = self._tracer.start_span(
            f"POST {route}",
            propagate.extract(headers),
            kind=trace.SpanKind.SERVER,
            attributes={"http.request.method": "POST", "http.route": route},
        )

        def note_status(status: int) -> None:
            if status:
                span.set_attribute("http.response.status_code", status)
            if status >= 500:
                span.set_status(trace.StatusCode.ERROR)

        with trace.use_span(span, end_on_exit=True, record_exception=False):
            yield note_status


def _nanoseconds(seconds: float, offset: int) -> int:
    """Nanoseconds of the wall clock at `seconds` of the monotonic one."""
    return round(seconds * 1e9) + offset
