"""The figures of a load test, under their usual names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sglang.benchmark.load_generator import LoadResult
from sglang.benchmark.request_result import TIERS, RequestResult

_WIDTH = 50


def summarize(load: LoadResult) -> dict[str, Any]:
    """Throughputs (per second), latencies (ms), counts. Only `failed` includes failed requests."""
    good = [one for one in load.results if one.success]
    seconds = max(load.duration, 1e-9)
    inputs = sum(one.prompt_tokens for one in good)
    outputs = sum(one.completion_tokens for one in good)
    cached = {tier: sum(one.cached_details.get(tier, 0) for one in good) for tier in TIERS}
    total_cached = sum(one.cached_tokens for one in good)
    return {
        "completed": len(good),
        "failed": len(load.results) - len(good),
        "duration": load.duration,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "input_throughput": inputs / seconds,
        "output_throughput": outputs / seconds,
        "total_throughput": (inputs + outputs) / seconds,
        "concurrency": sum(one.latency for one in good) / seconds,
        **_spread("e2e_latency_ms", [one.latency for one in good]),
        **_spread("ttft_ms", [one.ttft for one in good]),
        **_spread("tpot_ms", [one.tpot for one in good if one.tpot is not None]),
        **_spread("itl_ms", [gap for one in good for gap in one.itl]),
        "cached_tokens": total_cached,
        "cached_tokens_details": cached,
        "cache_hit_rate": total_cached / inputs if inputs else 0.0,
        "client_cpu_share": load.client_cpu_seconds / seconds,
    }


def details(results: Sequence[RequestResult]) -> dict[str, Any]:
    """The raw numbers, one for each request."""
    return {
        "input_lens": [one.prompt_tokens for one in results],
        "output_lens": [one.completion_tokens for one in results],
        "ttfts": [one.ttft for one in results],
        "itls": [one.itl for one in results],
        "latencies": [one.latency for one in results],
        "cached_tokens_by_request": [one.cached_tokens for one in results],
        "generated_texts": [one.text for one in results],
        "errors": [one.error for one in results],
    }


def error_counts(results: Iterable[RequestResult]) -> dict[str, int]:
    """Error to its number of requests, most frequent first."""
    counts: dict[str, int] = {}
    for one in results:
        if one.error:
            counts[one.error] = counts.get(one.error, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def table(figures: dict[str, Any]) -> str:
    """The usual table of results. `figures` has the results of `summarize` and the fields of the
    run."""
    rate = figures["request_rate"]
    limit = figures["max_concurrency"]
    lines = [
        " Serving Benchmark Result ".center(_WIDTH, "="),
        _row("Backend:", figures["backend"]),
        _row("Traffic request rate:", rate),
        _row("Max request concurrency:", "not set" if limit is None else limit),
        _row("Successful requests:", figures["completed"]),
        _row("Failed requests:", figures["failed"]),
        _row("Benchmark duration (s):", figures["duration"]),
        _row("Total input tokens:", figures["total_input_tokens"]),
        _row("Total generated tokens:", figures["total_output_tokens"]),
        _row("Request throughput (req/s):", figures["request_throughput"]),
        _row("Input token throughput (tok/s):", figures["input_throughput"]),
        _row("Output token throughput (tok/s):", figures["output_throughput"]),
        _row("Total token throughput (tok/s):", figures["total_throughput"]),
        _row("Concurrency:", figures["concurrency"]),
    ]
    for title, name, key in (
        ("End-to-End Latency", "E2E Latency", "e2e_latency_ms"),
        ("Time to First Token", "TTFT", "ttft_ms"),
        ("Time per Output Token (excl. 1st token)", "TPOT", "tpot_ms"),
        ("Inter-Token Latency", "ITL", "itl_ms"),
    ):
        lines.append(title.center(_WIDTH, "-"))
        for label in ("Mean", "Median", "P99"):
            lines.append(_row(f"{label} {name} (ms):", figures[f"{label.lower()}_{key}"]))
    lines.append(_row("Max ITL (ms):", figures["max_itl_ms"]))
    lines.append("Prefix cache".center(_WIDTH, "-"))
    lines.append(_row("Cached tokens:", figures["cached_tokens"]))
    for tier, tokens in figures["cached_tokens_details"].items():
        lines.append(_row(f"  from {tier}:", tokens))
    lines.append(_row("Cache hit rate:", figures["cache_hit_rate"]))
    lines.append(_row("Client CPU (share of a core):", figures["client_cpu_share"]))
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _row(name: str, value: Any) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) and np.isfinite(value) else str(value)
    return f"{name:<40} {shown:<9}".rstrip()


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    values = np.asarray(seconds, dtype=np.float64) * 1000 if seconds else np.zeros(1)
    return {
        f"mean_{name}": float(values.mean()),
        f"median_{name}": float(np.median(values)),
        f"std_{name}": float(values.std()),
        f"p90_{name}": float(np.percentile(values, 90)),
        f"p95_{name}": float(np.percentile(values, 95)),
        f"p99_{name}": float(np.percentile(values, 99)),
        f"max_{name}": float(values.max()),
    }
