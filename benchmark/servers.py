"""Servers under measurement: start several at once, ask them, load them, compare them."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from benchmark.report import Report
from benchmark.timing import median_ratio
from rigs.bench.multiturn import Conversations, converse
from rigs.servers.engine_server import EngineServer
from sglang.benchmark.api_backends import RequestOptions, RequestResult, SglangBackend
from sglang.benchmark.serving_metrics import LoadResult, generate_load, open_session
from sglang.benchmark.workload import BenchRequest, Vocabulary

VOCABULARY: Final = (0, 100_000)
"""Token ids that every large model has, the last excluded."""
_START_S: Final = 300.0
"""Limit for servers that start at once: kernels are compiled first."""
_REQUEST_S: Final = 600.0
_WARM_UP_SEED: Final = 10_000_000


@contextmanager
def started(servers: Mapping[str, EngineServer], report: Report) -> Iterator[None]:
    """Start the servers at the same time; they end with the block."""
    begun = time.monotonic()
    with ExitStack() as stack:
        for server in servers.values():
            stack.callback(server.kill)
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(lambda server: server.start(_START_S), servers.values()))
        seconds = time.monotonic() - begun
        tiers = {
            name: server.request("GET", "/server_info").body.get("tiers")
            for name, server in servers.items()
        }
        report.add("start", seconds, "s", {"servers": ", ".join(servers)}, tiers=tiers)
        yield


def ask(server: EngineServer, prompts: Sequence[list[int]], tokens: int) -> list[RequestResult]:
    """Send the prompts one after the other, for answers of `tokens`. All must succeed."""
    return load(server.url, prompts, tokens, concurrency=1).results


def load(
    url: str,
    prompts: Sequence[list[int]],
    output_tokens: int,
    *,
    times: Sequence[float] | None = None,
    concurrency: int | None = None,
) -> LoadResult:
    """`load_requests` with answers of one length."""
    requests = [BenchRequest(prompt, output_tokens) for prompt in prompts]
    return load_requests(url, requests, times=times, concurrency=concurrency)


def load_requests(
    url: str,
    requests: Sequence[BenchRequest],
    *,
    times: Sequence[float] | None = None,
    concurrency: int | None = None,
) -> LoadResult:
    """Send all requests. All must succeed.

    Args:
        times: Seconds after the start, ascending, one for each request; None: all at once.
        concurrency: Most requests under way; None: no limit.
    """

    async def run() -> LoadResult:
        async with open_session(timeout_s=_REQUEST_S) as session:
            return await generate_load(
                session,
                SglangBackend(),
                requests,
                RequestOptions(base_url=url),
                times=[0.0] * len(requests) if times is None else times,
                max_concurrency=concurrency,
            )

    result = asyncio.run(run())
    failed = [one.error for one in result.results if not one.success]
    assert not failed, f"{len(failed)} of {len(requests)} failed: {failed[0]}"
    return result


def talk(
    urls: Sequence[str], vocabulary: Vocabulary, shape: Conversations, *, barrier: bool = False
) -> tuple[list[list[RequestResult]], float]:
    """Have conversations with servers, which get the requests in turn. Returns the results of each
    round, and seconds.

    Args:
        barrier: True if no client runs ahead of the others.
    """

    async def between_rounds() -> None:
        pass

    async def run() -> tuple[list[list[RequestResult]], float]:
        async with open_session() as session:
            begun = time.perf_counter()
            rounds = await converse(
                session,
                vocabulary,
                shape,
                RequestOptions(base_url=urls[0]),
                between_rounds=between_rounds if barrier else None,
                base_urls=urls,
            )
            return rounds, time.perf_counter() - begun

    return asyncio.run(run())


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedLoad:
    """Prompts that nothing reuses, for servers that are compared."""

    prompt: Callable[[int, int], list[int]]
    """A random prompt of a seed and a length."""
    concurrent: int = 32
    input_tokens: int = 2048
    output_tokens: int = 128
    requests: int = 96
    """Requests of a round."""
    rounds: int = 4

    def send(self, server: EngineServer, first_seed: int, count: int) -> LoadResult:
        """Send `count` prompts, `concurrent` at a time. No prompt may hit a cache."""
        prompts = [self.prompt(first_seed + index, self.input_tokens) for index in range(count)]
        result = load(server.url, prompts, self.output_tokens, concurrency=self.concurrent)
        assert not any(one.cached_tokens for one in result.results), result.results
        return result


def compare_unused(
    servers: Mapping[str, EngineServer],
    unused: UnusedLoad,
    expected: Mapping[str, float],
    report: Report,
    *,
    target: float = 0.98,
) -> None:
    """The same load in turn, round after round; then throughput and time per token of each server
    over those of the first.

    Args:
        expected: Ratio of throughput of each server but the first.
    """
    names = list(servers)
    base = names[0]
    rates: dict[str, list[float]] = {name: [] for name in names}
    token_ms: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        unused.send(servers[name], _WARM_UP_SEED, unused.concurrent)
    for turn in range(unused.rounds):
        # Another server begins each round.
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seed = 1 + unused.requests * (turn * len(names) + names.index(name))
            result = unused.send(servers[name], seed, unused.requests)
            tpots = [one.tpot for one in result.results if one.tpot]
            tokens = unused.requests * (unused.input_tokens + unused.output_tokens)
            rates[name].append(tokens / result.duration)
            token_ms[name].append(statistics.mean(tpots) * 1e3)
            case = {"load": "unused", "server": name, "round": turn}
            report.add("duration", result.duration, "s", case)
            report.add("throughput", rates[name][-1], "token/s", case)
            report.add("mean_tpot", token_ms[name][-1], "ms", case)
    for name, ratio in expected.items():
        case = {"load": "unused", "server": name, "over": base}
        for metric, of_servers, goal in (
            ("throughput_ratio", rates, f"at least {target:g}"),
            ("tpot_ratio", token_ms, None),
        ):
            ours, theirs = of_servers[name], of_servers[base]
            rounds = [one / other for one, other in zip(ours, theirs, strict=True)]
            wanted = ratio if goal else None
            report.add(metric, median_ratio(ours, theirs), "ratio", case,
                       expected=wanted, target=goal, raw=rounds)  # fmt: skip
