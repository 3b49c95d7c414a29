"""Settings of logs, metrics and traces: the part of `ServerArgs` that changes no answer's text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

from sglang.srt.arg_groups.cli import Heading, flag, flag_name
from sglang.srt.utils.logging_utils import LOG_FORMATS, LOG_LEVELS

_DEFAULT_COLLECTOR: Final = "localhost:4317"
_MOST_TRACE_MB: Final = 65536


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
    record_trace: str | None = flag(
        None,
        "New file for requests' lengths, keyed block hashes and times (no text), for "
        "`sglang.hicache_plan --trace`.",
    )
    record_trace_share: float = flag(
        1.0, "Share of the prompts in that file; those with the same first 512 tokens together."
    )
    record_trace_mb: int = flag(64, "MiB of that file; then the record ends.")


def check_observability(args: ObservabilityArgs) -> Iterator[str]:
    """Refuse a collector that gets nothing, and sizes of a record without sense or effect."""
    if not args.enable_trace and args.otlp_traces_endpoint != _DEFAULT_COLLECTOR:
        yield (
            f"--otlp-traces-endpoint {args.otlp_traces_endpoint} has no effect without "
            "--enable-trace: add that, or leave it out"
        )
    if not 0 < args.record_trace_share <= 1:
        yield f"--record-trace-share {args.record_trace_share}: must be above 0, and at most 1"
    if not 1 <= args.record_trace_mb <= _MOST_TRACE_MB:
        yield f"--record-trace-mb {args.record_trace_mb}: must be from 1 to {_MOST_TRACE_MB}"
    if args.record_trace is None:
        for field in dataclasses.fields(ObservabilityArgs):
            value = getattr(args, field.name)
            if field.name.startswith("record_trace_") and value != field.default:
                name = flag_name(field.name)
                yield f"{name} {value} has no effect without --record-trace: add that"
