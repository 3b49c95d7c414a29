"""Conversations: each client asks in rounds, and each prompt contains the conversation so far.

The prompt of a round is the last prompt, its answer and new tokens: the workload of a prefix cache.
Clients that may ask next wait in a ready queue. While fewer than `parallel` requests are under way,
the next one is sent, not earlier than the request rate allows. asyncio; one thread.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

import aiohttp
import numpy as np

from sglang.benchmark.api_backends import TIERS, RequestOptions, RequestResult, SglangBackend
from sglang.benchmark.workload import BenchRequest, Vocabulary

_FLAGS: Final = {
    "clients": "--num-clients",
    "rounds": "--num-rounds",
    "request_len": "--request-length",
    "output_len": "--output-length",
}


class ReadyQueuePolicy(StrEnum):
    """The choice of the next client in the ready queue."""

    RANDOM = "random"
    FIFO = "fifo"
    """The client that has waited longest: all clients in turn, the worst order for LRU."""


class Distribution(StrEnum):
    """Distribution of the times between requests."""

    POISSON = "poisson"
    UNIFORM = "uniform"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Number, lengths and order of the requests. Lengths are tokens."""

    clients: int
    rounds: int
    request_len: int
    """New tokens in each round."""
    output_len: int
    shared_len: int = 0
    """Tokens that all conversations begin with."""
    first_len: int | None = None
    """Tokens after the shared ones in the first round; None: as in the others."""
    parallel: int | None = None
    """Most requests under way; None: one for each client."""
    request_rate: float = math.inf
    """Most requests sent per second."""
    distribution: Distribution = Distribution.POISSON
    ready_queue_policy: ReadyQueuePolicy = ReadyQueuePolicy.RANDOM
    fixed_answers: bool = False
    """True to continue with random tokens in place of the model's answers. Two runs then send
    the same prompts, even if rounding changes the answers."""
    seed: int = 1

    def __post_init__(self) -> None:
        for name, flag in _FLAGS.items():
            if getattr(self, name) < 1:
                raise ValueError(f"{flag} {getattr(self, name)}: must be 1 or more")
        if self.parallel is not None and self.parallel < 1:
            raise ValueError(f"--max-parallel {self.parallel}: must be 1 or more")
        if not self.request_rate > 0:
            raise ValueError(f"--request-rate {self.request_rate}: must be more than 0")


@dataclass(slots=True)
class _Client:
    rng: np.random.Generator
    turn: int = 0
    """Number of finished rounds."""
    history: list[int] = field(default_factory=list)


class _Pace:
    """The times at which requests may be sent."""

    def __init__(self, shape: Conversations, rng: np.random.Generator) -> None:
        self._mean_s = 1 / shape.request_rate
        self._is_even = shape.distribution is Distribution.UNIFORM
        self._rng = rng
        self._next = time.perf_counter()

    async def wait(self) -> None:
        """Wait for the time of the next request. Late requests catch up."""
        if not self._mean_s:
            return
        await asyncio.sleep(max(0.0, self._next - time.perf_counter()))
        self._next += self._mean_s if self._is_even else self._rng.exponential(self._mean_s)


async def converse(
    session: aiohttp.ClientSession,
    vocabulary: Vocabulary,
    shape: Conversations,
    options: RequestOptions,
    *,
    between_rounds: Callable[[], Awaitable[None]] | None = None,
    on_done: Callable[[RequestResult], object] = lambda result: None,
    base_urls: Sequence[str] = (),
) -> list[list[RequestResult]]:
    """Run all conversations. A failed request ends its conversation.

    Args:
        base_urls: Servers that get the requests in turn, in place of the one in `options`.
        between_rounds: Awaited between two rounds, each of which waits for the slowest client.
            None lets clients continue independently.

    Returns:
        The results of each round.
    """
    backend = SglangBackend()
    results: list[list[RequestResult]] = [[] for _ in range(shape.rounds)]
    seeds = np.random.SeedSequence(shape.seed).spawn(shape.clients + 3)
    order, times, *own, common = (np.random.default_rng(seed) for seed in seeds)
    pace = _Pace(shape, times)
    shared = vocabulary[common.integers(len(vocabulary), size=shape.shared_len)].tolist()
    ready = [_Client(rng, history=shared) for rng in own]
    turns = itertools.cycle([replace(options, base_url=url) for url in base_urls] or [options])
    answered: asyncio.Queue[tuple[_Client, bool]] = asyncio.Queue()
    """Clients whose request ended, and whether it succeeded."""

    async def ask(client: _Client) -> None:
        is_first = not client.turn and shape.first_len is not None
        new = shape.first_len if is_first else shape.request_len
        drawn = client.rng.integers(len(vocabulary), size=new)
        client.history = client.history + vocabulary[drawn].tolist()
        request = BenchRequest(client.history, shape.output_len)
        result = await backend.send(session, request, next(turns))
        answer = result.output_ids
        if shape.fixed_answers:
            drawn = client.rng.integers(len(vocabulary), size=shape.output_len)
            answer = vocabulary[drawn].tolist()
        client.history = [*client.history, *answer]
        results[client.turn].append(result)
        client.turn += 1
        on_done(result)
        answered.put_nowait((client, result.success))

    async def serve(queue: list[_Client], last_round: int) -> list[_Client]:
        """Run the clients in `queue` up to `last_round`; return those that have finished it."""
        finished: list[_Client] = []
        under_way = 0
        async with asyncio.TaskGroup() as tasks:
            while queue or under_way:
                if queue and under_way < (shape.parallel or shape.clients):
                    await pace.wait()
                    random = shape.ready_queue_policy is ReadyQueuePolicy.RANDOM
                    chosen = queue.pop(int(order.integers(len(queue))) if random else 0)
                    tasks.create_task(ask(chosen))
                    under_way += 1
                    continue
                client, success = await answered.get()
                under_way -= 1
                if success:
                    (queue if client.turn < last_round else finished).append(client)
        return finished

    if between_rounds is None:
        await serve(ready, shape.rounds)
        return results
    for turn in range(shape.rounds):
        if turn:
            await between_rounds()
        ready = await serve(ready, turn + 1)
    return results


def round_figures(number: int, results: list[RequestResult]) -> dict[str, Any]:
    """TTFT and latency (ms), hit rate and cached tokens by tier of one round (from 1).

    Times and rates are None if no request of the round succeeded.
    """
    good = [one for one in results if one.success]
    prompts = sum(one.prompt_tokens for one in good)
    cached = sum(one.cached_tokens for one in good)
    ttft = np.asarray([one.ttft for one in good]) * 1000
    latency = np.asarray([one.latency for one in good]) * 1000

    def figure(statistic: Callable[..., Any], *args: Any) -> float | None:
        return float(statistic(*args)) if good else None

    return {
        "round": number,
        "completed": len(good),
        "failed": len(results) - len(good),
        "prompt_tokens": prompts,
        "cached_tokens": cached,
        "cached_tokens_details": {
            tier: sum(one.cached_details.get(tier, 0) for one in good) for tier in TIERS
        },
        "hit_rate": cached / prompts if prompts else None,
        "mean_ttft_ms": figure(np.mean, ttft),
        "median_ttft_ms": figure(np.median, ttft),
        "p90_ttft_ms": figure(np.percentile, ttft, 90),
        "p99_ttft_ms": figure(np.percentile, ttft, 99),
        "mean_latency_ms": figure(np.mean, latency),
        "ttfts_ms": ttft.round(3).tolist(),
    }
