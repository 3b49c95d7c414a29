"""Sends requests at their times and collects the results. asyncio; one thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

import aiohttp

from sglang.benchmark.api_backends import ApiBackend, RequestOptions
from sglang.benchmark.request_result import RequestResult
from sglang.benchmark.workload import BenchRequest

_READ_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The results of a load test."""

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
        on_done: Called after each request.
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
