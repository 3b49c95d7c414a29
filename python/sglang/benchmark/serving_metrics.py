"""Sends requests at their times (asyncio, one thread), and sums up the results in usual figures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from sglang.benchmark.api_backends import TIERS, ApiBackend, RequestOptions, RequestResult
from sglang.benchmark.workload import BenchRequest

_READ_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LoadResult:
    results: list[RequestResult]
    """Results in the order of the requests."""
    duration: float
    """Seconds from the first request to the last answer."""
    client_cpu_seconds: float
    """CPU time of this process meanwhile. Near `duration`, the client was the bottleneck."""


def open_session(api_key: str | None = None, timeout_s: float = 3600.0) -> aiohttp.ClientSession:
    """A session without a limit on connections. Close it with `async with`."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        read_bufsize=_READ_BUFFER_BYTES,
    )


async def generate_load(
    session: aiohttp.ClientSession,
    backend: ApiBackend,
    requests: Sequence[BenchRequest],
    options: RequestOptions,
    *,
    times: Sequence[float],
    texts: Sequence[str] | None = None,
    max_concurrency: int | None = None,
    on_done: Callable[[RequestResult], object] = lambda result: None,
) -> LoadResult:
    """Send each request at its time and wait for all.

    Args:
        times: Seconds after the start, ascending, one for each request.
        texts: Prompts as text, if the backend needs it.
        max_concurrency: Most requests under way. Other requests wait, and their clocks start when
            they are sent.
    """
    slots: AbstractAsyncContextManager[object] = (
        asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    )

    async def one(index: int) -> RequestResult:
        async with slots:
            text = texts[index] if texts is not None else None
            result = await backend.send(session, requests[index], options, text)
        on_done(result)
        return result

    cpu, begin = time.process_time(), time.perf_counter()
    tasks = []
    for index, at in enumerate(times):
        wait = begin + at - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(index)))
    results = await asyncio.gather(*tasks)
    return LoadResult(results, time.perf_counter() - begin, time.process_time() - cpu)


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
