"""Traces of a server process: their spans at a real OTLP receiver, and a collector that fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry

from rigs.servers.engine_server import post_and_leave
from rigs.servers.fake_engine import FrontServer, front_server
from rigs.servers.otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver
from sglang.srt.arg_groups.cli import FlagErrors
from sglang.srt.entrypoints import start_checks
from sglang.srt.environ import envs
from sglang.srt.messages.io_struct import TokenizedGenerateReqInput
from sglang.srt.observability import tracing
from sglang.srt.observability.tracing import TimedSpan, Tracer, make_exporter
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import get_free_port, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
NOT_SAMPLED = f"00-{TRACE}-b7ad6b7169203331-00"
SECRET = "a secret prompt"


@pytest.fixture(autouse=True)
def export_soon() -> Iterator[None]:
    with envs.SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS.override(20):
        yield


@pytest.fixture(name="receiver")
def start_receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver(with_grpc=True) as running:
        yield running


@pytest.fixture(name="server")
def start_server(receiver: OtlpReceiver) -> Iterator[FrontServer]:
    with front_server(enable_trace=True, otlp_traces_endpoint=receiver.url) as running:
        yield running


def post(server: FrontServer, path: str, body: dict[str, Any], parent: str | None = PARENT) -> None:
    headers = {} if parent is None else {"traceparent": parent}
    response = httpx.post(server.url + path, json=body, headers=headers, timeout=20)
    assert response.status_code == 200, response.text


def by_name(spans: Sequence[ReceivedSpan]) -> dict[str, ReceivedSpan]:
    return {span.name: span for span in spans}


def traced(server: FrontServer) -> list[bool]:
    received = server.scheduler.received
    return [one.is_traced for one in received if isinstance(one, TokenizedGenerateReqInput)]


def test_a_request_continues_the_trace_of_its_client(
    server: FrontServer, receiver: OtlpReceiver
) -> None:
    post(server, "/generate", {"text": SECRET, "sampling_params": {"max_new_tokens": 3}})
    spans = by_name(receiver.wait(2))
    http, request = spans["POST /generate"], spans["request"]
    assert {span.trace_id for span in spans.values()} == {TRACE}
    assert (http.parent_id, request.parent_id) == ("b7ad6b7169203331", http.span_id)
    assert http.begin <= request.begin <= request.end <= http.end
    assert http.attributes["http.response.status_code"] == 200
    assert request.attributes["gen_ai.usage.input_tokens"] == len(SECRET)
    assert request.attributes["gen_ai.usage.output_tokens"] == 3
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert request.attributes["sglang.cached_tokens.storage"] == 2
    assert not any(word in raw for raw in receiver.raw for word in (b"secret", b"prompt\x12"))
    assert traced(server) == [True]


@pytest.mark.parametrize("stream", [False, True])
def test_samples_share_a_trace(server: FrontServer, receiver: OtlpReceiver, stream: bool) -> None:
    """Without a client's trace they begin one."""
    chat = {"messages": [{"role": "user", "content": SECRET}], "n": 3, "max_tokens": 2}
    post(server, "/v1/chat/completions", {**chat, "stream": stream}, None)
    spans = receiver.wait(4)
    assert sorted(span.name for span in spans) == [
        "POST /v1/chat/completions", "request", "request", "request",
    ]  # fmt: skip
    assert len({span.trace_id for span in spans}) == 1
    assert by_name(spans)["POST /v1/chat/completions"].parent_id == ""


def test_what_is_not_traced(server: FrontServer, receiver: OtlpReceiver) -> None:
    post(server, "/generate", {"text": "a"}, NOT_SAMPLED)
    assert httpx.get(f"{server.url}/health_generate", timeout=20).status_code == 200
    assert httpx.post(f"{server.url}/nowhere", timeout=20).status_code == 404
    assert traced(server) == [False, False]
    post(server, "/generate", {"text": "a"})
    assert len(receiver.wait(2)) == 2


def test_failed_requests_are_errors(server: FrontServer, receiver: OtlpReceiver) -> None:
    server.scheduler.hold.set()
    post_and_leave(server.url, "/generate", {"text": "a"}, lambda: bool(server.requests))
    spans = by_name(receiver.wait(2))
    assert spans["request"].attributes["gen_ai.response.finish_reasons"] == ["disconnect"]
    response = httpx.post(f"{server.url}/generate", json={"text": 7}, timeout=20)
    assert response.status_code == 400
    assert receiver.wait(3)[2].attributes["http.response.status_code"] == 400


def test_stages_are_exported_over_grpc(receiver: OtlpReceiver) -> None:
    tracer = Tracer(make_exporter(receiver.address), "sglang-prefill", "here:1")
    parent = tracer.parent()
    assert parent is not None
    stages = [
        TimedSpan("queue", 1.0, 2.0, {}),
        TimedSpan("prefill", 2.0, 2.5, {"sglang.tokens": 7}),
    ]
    tracer.record(parent, TimedSpan("request", 1.0, 3.0, {}, "abort"), stages)
    tracer.close()
    spans = by_name(receiver.wait(3))
    request, prefill = spans["request"], spans["prefill"]
    assert request.is_error
    assert prefill.parent_id == request.span_id
    assert (prefill.begin - request.begin, prefill.end - prefill.begin) == (10**9, 5 * 10**8)
    assert prefill.attributes == {"sglang.tokens": 7}
    assert {span.service for span in spans.values()} == {"sglang-prefill"}
    assert (tracer.queue.exported, tracer.queue.dropped) == (3, 0)


def test_two_servers_share_the_trace_of_a_room(receiver: OtlpReceiver) -> None:
    for room, service in ((7, "prefill"), (7, "decode"), (8, "decode")):
        tracer = Tracer(make_exporter(receiver.url), service)
        parent = tracer.parent(room)
        assert parent is not None
        tracer.record(parent, TimedSpan("request", 1.0, 2.0, {}))
        tracer.close()
    first, second, other = receiver.wait(3)
    assert first.trace_id == second.trace_id != other.trace_id
    assert first.parent_id == second.parent_id


# ---- a collector that fails ----------------------------------------------------------------


def test_a_collector_that_is_down_costs_spans_alone(caplog: pytest.LogCaptureFixture) -> None:
    endpoint = f"http://127.0.0.1:{get_free_port()}/v1/traces"
    with front_server(
        enable_trace=True, otlp_traces_endpoint=endpoint, enable_metrics=True
    ) as server:
        tracer = server.context.manager.tracer
        assert tracer is not None
        for _ in range(3):
            post(server, "/generate", {"text": "a"})
        assert wait_until(lambda: tracer.queue.dropped == 6, 30)
        text = httpx.get(f"{server.url}/metrics", timeout=20).text
    assert "sglang:trace_spans_dropped_total 6.0" in text
    assert [one for one in caplog.messages if "spans are lost" in one]


class HangingExporter(SpanExporter):
    """Hangs in its first call."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.called = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.called.set()
        self.goes_on.wait(30)
        return SpanExportResult.SUCCESS


def test_a_collector_that_hangs_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_MOST_QUEUED", 10)
    monkeypatch.setattr(tracing, "_CLOSE_S", 0.05)
    registry, exporter = CollectorRegistry(), HangingExporter()
    tracer = Tracer(exporter, registry=registry)
    parent = tracer.parent()
    assert parent is not None
    tracer.record(parent, TimedSpan("request", 1.0, 2.0, {}))
    assert exporter.called.wait(20)
    for _ in range(25):
        tracer.record(parent, TimedSpan("request", 1.0, 2.0, {}))
    assert tracer.queue.dropped == 15
    assert registry.get_sample_value("sglang:trace_spans_dropped_total") == 15
    tracer.close()  # Does not wait for the call.
    exporter.goes_on.set()
    assert wait_until(lambda: tracer.queue.exported == 11, 20)


# ---- settings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "protocol", "module"),
    [
        ("localhost:4317", None, "grpc"),
        ("http://localhost:4317", None, "grpc"),
        ("http://localhost:4318/v1/traces", None, "http"),
        ("localhost:4318", "http/protobuf", "http"),
        ("https://host/v1/traces", "grpc", "grpc"),
    ],
)
def test_an_endpoint_decides(endpoint: str, protocol: str | None, module: str) -> None:
    variable = envs.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL
    with variable.override(protocol):
        exporter = make_exporter(endpoint)
    assert f".{module}." in type(exporter).__module__
    exporter.shutdown()


@pytest.mark.parametrize("endpoint", ["", "ftp://host/x", "http://"])
def test_a_wrong_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"--otlp-traces-endpoint .*: give HOST:PORT, or a URL"):
        make_exporter(endpoint)


def test_a_wrong_protocol_is_refused() -> None:
    with (
        envs.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL.override("thrift"),
        pytest.raises(ValueError, match="=thrift: choose one of grpc, http/protobuf"),
    ):
        make_exporter("localhost:4317")


def test_an_endpoint_without_traces_is_refused() -> None:
    with pytest.raises(FlagErrors, match=r"--otlp-traces-endpoint .* --enable-trace"):
        ServerArgs(model_path="dummy", otlp_traces_endpoint="host:1").resolve()


def test_a_missing_package_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ServerArgs(model_path="dummy", enable_trace=True).resolve()
    start_checks.check_tracing(args)
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.resources", None)
    monkeypatch.delitem(__import__("sys").modules, "sglang.srt.observability.tracing")
    monkeypatch.delattr("sglang.srt.observability.tracing", raising=False)
    with pytest.raises(ValueError, match=r"--enable-trace needs .*pip install 'sglang\[trace\]'"):
        start_checks.check_tracing(args)
