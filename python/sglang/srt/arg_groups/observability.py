"""Settings of logs, metrics and traces: the part of `ServerArgs` that changes no answer's text."""

from __future__ import annotations

import dataclasses

from sglang.srt.arg_groups.cli import flag
from sglang.srt.utils.logging_utils import LOG_FORMATS, LOG_LEVELS


@dataclasses.dataclass(kw_only=True)
class ObservabilityArgs:
    """Fields of `ServerArgs`."""

    log_level: str = flag("info", "Least severity logged.", choices=LOG_LEVELS)
    log_format: str = flag(
        "text", "Form of the log: lines of text, or a JSON object a line.", choices=LOG_FORMATS
    )
    log_requests: bool = flag(
        False, "Log every request's id, lengths, cached tokens by tier and times (no text)."
    )
    enable_metrics: bool = flag(False, "Serve Prometheus metrics on /metrics.")
    enable_cache_report: bool = flag(False, "Report cached tokens in the usage of OpenAI answers.")
