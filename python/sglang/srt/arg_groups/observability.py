"""Settings of logs, metrics and traces: the part of `ServerArgs` that changes no answer's text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

from sglang.srt.arg_groups.cli import Heading, flag
from sglang.srt.utils.logging_utils import LOG_FORMATS, LOG_LEVELS

_DEFAULT_COLLECTOR: Final = "localhost:4317"


@dataclasses.dataclass(kw_only=True)
class ObservabilityArgs:
    """Fields of `ServerArgs`."""

    log_level: str = flag(
        "info", "Least severity logged.", choices=LOG_LEVELS, heading=Heading.OBSERVABILITY
    )
    log_format: str = flag(
        "text", "Form of the log: lines of text, or a JSON object a line.", choices=LOG_FORMATS
    )
    log_requests: bool = flag(
        False, "Log every request's id, lengths, cached tokens by tier and times (no text)."
    )
    enable_metrics: bool = flag(False, "Serve Prometheus metrics on /metrics.")
    enable_cache_report: bool = flag(False, "Report cached tokens in the usage of OpenAI answers.")
    enable_trace: bool = flag(
        False, "Export a trace of every request through OpenTelemetry (extra `trace`)."
    )
    otlp_traces_endpoint: str = flag(
        _DEFAULT_COLLECTOR,
        "Collector of traces: HOST:PORT or a URL. OTLP over gRPC, or over HTTP for URLs with a "
        "path such as /v1/traces.",
    )


def check_observability(args: ObservabilityArgs) -> Iterator[str]:
    """Refuse a collector that gets nothing."""
    if not args.enable_trace and args.otlp_traces_endpoint != _DEFAULT_COLLECTOR:
        yield (
            f"--otlp-traces-endpoint {args.otlp_traces_endpoint} has no effect without "
            "--enable-trace: add that, or leave it out"
        )
