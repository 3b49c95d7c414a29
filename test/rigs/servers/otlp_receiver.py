"""A collector of traces: takes OTLP over HTTP and over gRPC, and keeps the spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from sglang.srt.utils.network import wait_until


@dataclass(frozen=True)
class ReceivedSpan:
    """One span; times are nanoseconds of the wall clock, ids hex digits."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin: int
    end: int
    attributes: dict[str, Any]
    is_error: bool


@dataclass
class OtlpReceiver:
    """The telemetry that arrived, and the answers to give. Any thread."""

    url: str = ""
    """Endpoint over HTTP."""
    address: str = ""
    """Endpoint over gRPC."""
    status: int = 200
    """Status of the answers over HTTP."""
    raw: list[bytes] = field(default_factory=list)
    """The requests as they came."""
    spans: list[ReceivedSpan] = field(default_factory=list)
    may_answer: threading.Event = field(default_factory=threading.Event)
    """Calls over HTTP hang until it is set; set at first."""

    def take(self, request: ExportTraceServiceRequest) -> None:
        self.raw.append(request.SerializeToString())
        for of_resource in request.resource_spans:
            resource = _attributes(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                for span in of_scope.spans:
                    self.spans.append(
                        ReceivedSpan(
                            service=resource["service.name"],
                            name=span.name,
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent_id=span.parent_span_id.hex(),
                            begin=span.start_time_unix_nano,
                            end=span.end_time_unix_nano,
                            attributes=_attributes(span.attributes),
                            is_error=span.status.code == span.status.STATUS_CODE_ERROR,
                        )
                    )

    def wait(self, count: int, seconds: float = 30.0) -> list[ReceivedSpan]:
        """The spans, at least `count`."""
        assert wait_until(lambda: len(self.spans) >= count, seconds), self.names()
        return self.spans

    def names(self) -> list[str]:
        return [span.name for span in self.spans]


def _attributes(pairs: Any) -> dict[str, Any]:
    def value_of(value: AnyValue) -> Any:
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [value_of(one) for one in value.array_value.values]
        return getattr(value, kind or "string_value")

    found: list[KeyValue] = list(pairs)
    return {pair.key: value_of(pair.value) for pair in found}


class _Service(TraceServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:
        self._receiver.take(request)
        return ExportTraceServiceResponse()


@contextmanager
def otlp_receiver(*, with_grpc: bool = False) -> Iterator[OtlpReceiver]:
    """A receiver on free loopback ports. gRPC has threads that a fork would break: ask for it only
    where no process is forked."""
    receiver = OtlpReceiver()
    receiver.may_answer.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.may_answer.wait(30)
            if receiver.status == 200:
                receiver.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(receiver.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Prints nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, name="otlp-receiver", daemon=True)
    thread.start()
    over_grpc = grpc.server(ThreadPoolExecutor(2)) if with_grpc else None
    if over_grpc is not None:
        service = _Service(receiver)
        add_TraceServiceServicer_to_server(service, over_grpc)  # type: ignore[no-untyped-call]
        receiver.address = f"127.0.0.1:{over_grpc.add_insecure_port('127.0.0.1:0')}"
        over_grpc.start()
    try:
        yield receiver
    finally:
        receiver.may_answer.set()
        server.shutdown()
        server.server_close()
        thread.join()
        if over_grpc is not None:
            over_grpc.stop(None).wait()
