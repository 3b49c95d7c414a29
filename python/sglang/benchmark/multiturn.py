"""Conversations: each client asks, gets an answer, and asks on with all that was said before.

So every round's prompt is the round before it, its answer, and new tokens: what a prefix cache is
for. asyncio; one thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import numpy as np

from sglang.benchmark.api_backends import RequestOptions, SglangBackend
from sglang.benchmark.request_result import TIERS, RequestResult
from sglang.benchmark.workload import BenchRequest, Vocabulary

_FLAGS: Final = {
    "clients": "--num-clients",
    "rounds": "--num-rounds",
    "request_len": "--request-length",
    "output_len": "--output-length",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """How many, how long. Lengths are tokens."""

    clients: int
    rounds: int
    request_len: int
    """Of what is new in each round."""
    output_len: int
    parallel: int | None = None
    """Requests under way at most; None: one for each client."""
    seed: int = 1

    def __post_init__(self) -> None:
        for name, flag in _FLAGS.items():
            if getattr(self, name) < 1:
                raise ValueError(f"{flag} {getattr(self, name)}: must be 1 or more")


@dataclass(slots=True)
class _Client:
    rng: np.random.Generator
    history: list[int] = field(default_factory=list)
    failed: bool = False


async def converse(
    session: aiohttp.ClientSession,
    vocabulary: Vocabulary,
    shape: Conversations,
    options: RequestOptions,
    *,
    between_rounds: Callable[[], Awaitable[None]] | None = None,
    on_done: Callable[[RequestResult], object] = lambda result: None,
) -> list[list[RequestResult]]:
    """Hold all conversations. One that failed ends.

    Args:
        between_rounds: Awaited between two rounds, which then wait for the slowest client; without
            it clients go on as they can.

    Returns:
        The results of each round.
    """
    backend = SglangBackend()
    slots = asyncio.Semaphore(shape.parallel or shape.clients)
    results: list[list[RequestResult]] = [[] for _ in range(shape.rounds)]
    seeds = np.random.SeedSequence(shape.seed).spawn(shape.clients)
    clients = [_Client(np.random.default_rng(seed)) for seed in seeds]

    async def one_round(client: _Client, turn: int) -> None:
        if client.failed:
            return
        drawn = client.rng.integers(len(vocabulary), size=shape.request_len)
        client.history += vocabulary[drawn].tolist()
        request = BenchRequest(client.history, shape.output_len)
        async with slots:
            result = await backend.send(session, request, options)
        client.history = [*client.history, *result.output_ids]
        client.failed = not result.success
        results[turn].append(result)
        on_done(result)

    async def whole(client: _Client) -> None:
        for turn in range(shape.rounds):
            await one_round(client, turn)

    if between_rounds is None:
        await asyncio.gather(*(whole(client) for client in clients))
        return results
    for turn in range(shape.rounds):
        if turn:
            await between_rounds()
        await asyncio.gather(*(one_round(client, turn) for client in clients))
    return results


def round_figures(number: int, results: list[RequestResult]) -> dict[str, Any]:
    """TTFT, latency (ms), hit rate and cached tokens by tier of one round (from 1)."""
    good = [one for one in results if one.success]
    prompts = sum(one.prompt_tokens for one in good)
    cached = sum(one.cached_tokens for one in good)
    ttft = np.asarray([one.ttft for one in good] or [0.0]) * 1000
    latency = np.asarray([one.latency for one in good] or [0.0]) * 1000
    return {
        "round": number,
        "completed": len(good),
        "failed": len(results) - len(good),
        "prompt_tokens": prompts,
        "cached_tokens": cached,
        "cached_tokens_details": {
            tier: sum(one.cached_details.get(tier, 0) for one in good) for tier in TIERS
        },
        "hit_rate": cached / prompts if prompts else 0.0,
        "mean_ttft_ms": float(ttft.mean()),
        "median_ttft_ms": float(np.median(ttft)),
        "p90_ttft_ms": float(np.percentile(ttft, 90)),
        "p99_ttft_ms": float(np.percentile(ttft, 99)),
        "mean_latency_ms": float(latency.mean()),
        "ttfts_ms": ttft.round(3).tolist() if good else [],
    }
