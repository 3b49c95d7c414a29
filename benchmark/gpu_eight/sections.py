"""The sections of `gpu-eight` that measure: each gives the figures of a server to the report."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any, Final

import numpy as np

from benchmark.gpu_eight.shapes import Shape
from benchmark.gpu_pd.servers import Prompts, Size, pair_of
from benchmark.gpu_pd.servers import measure_ttft as measure_pd_ttft
from benchmark.ranks.collectives import PRELOAD
from benchmark.ranks.collectives import measure_tick as measure_rank_tick
from benchmark.report import Report
from benchmark.servers import UnusedLoad, ask, load, load_requests, started
from benchmark.simulate.trace import EXCERPT
from rigs.bench.multiturn import converse
from rigs.schedulers.rank_processes import run_ranks
from rigs.servers.engine_server import EngineServer
from sglang.benchmark.api_backends import TIERS, RequestOptions, RequestResult
from sglang.benchmark.serving_metrics import open_session
from sglang.benchmark.workload import arrival_times, read_trace, trace_requests
from sglang.embedded_mooncake import LOOPBACK

_LANDS_S: Final = 0.5
"""Seconds within which copies to L2 and writes to the store land."""
_FLUSH_S: Final = 120.0
_WARM_UP_SEED: Final = 1_000_000


def measure_tick(ranks: int, ticks: int, report: Report) -> float:
    """Returns the median of a tick with its agreement on rank 0, in microseconds."""
    first, *_ = run_ranks(ranks, measure_rank_tick, 0, True, ticks, preload=PRELOAD)
    case = {"tick": "with its agreement", "ranks": ranks}
    for what in ("tick_us", "tick_sync_us"):
        name = what.removesuffix("_us")
        report.add_all("us", {f"{name}_{p}": us for p, us in first[what].items()}, case)
    report.add("bytes", first["bytes"], "bytes/tick", case)
    median: float = first["tick_us"]["p50"] + first["tick_sync_us"]["p50"]
    return median


def measure_decode(server: EngineServer, shape: Shape, report: Report) -> None:
    """Time per token of several requests at once, with new prompts."""
    seed = _WARM_UP_SEED
    for requests in shape.decodes:
        for is_warm in (False, True):
            seed += requests
            prompts = [shape.prompt(seed + i, shape.decode_input) for i in range(requests)]
            found = load(server.url, prompts, shape.decode_output).results
            if not is_warm:
                continue
            gaps = [gap * 1e3 for one in found for gap in one.itl]
            tpots = [one.tpot * 1e3 for one in found if one.tpot]
            case = {"decode": requests, "context": shape.decode_input}
            report.add("mean_tpot", statistics.mean(tpots), "ms", case)
            report.add("median_between_tokens", statistics.median(gaps), "ms", case)


def measure_ttft(server: EngineServer, shape: Shape, report: Report) -> None:
    """Prompts that together do not fit into L1: cold, from L2, and from the store."""
    for length, count in shape.prompts.items():
        prompts = [shape.prompt(length + i, length) for i in range(count)]
        for source in ("cold", "L2", "L2 again", "Mooncake"):
            if source == "Mooncake":
                server.flush(timeout=_FLUSH_S)
            found = ask(server, prompts, 2)
            ttft_ms = [one.ttft * 1e3 for one in found]
            case = {"tokens": length, "from": source}
            report.add("ttft", statistics.median(ttft_ms), "ms", case, raw=ttft_ms)
            report.add_all("tokens", cached_tokens(found), case)
            time.sleep(_LANDS_S)


def cached_tokens(found: list[RequestResult]) -> dict[str, int]:
    """Tokens of all prompts that each tier had."""
    return {
        f"cached_from_{tier}": sum(one.cached_details.get(tier, 0) for one in found)
        for tier in TIERS
    }


def report_load(found: list[RequestResult], seconds: float, case: dict[str, Any],
                report: Report) -> None:  # fmt: skip
    """Figures of requests that were under way for `seconds`. All must have succeeded."""
    failed = [one.error for one in found if not one.success]
    assert not failed, f"{len(failed)} of {len(found)} failed: {failed[0]}"
    prompt_tokens = sum(one.prompt_tokens for one in found)
    ttft_ms = [one.ttft * 1e3 for one in found]
    report.add("duration", seconds, "s", case)
    report.add("input_throughput", prompt_tokens / seconds, "token/s", case)
    report.add("mean_ttft", statistics.mean(ttft_ms), "ms", case)
    report.add("median_ttft", statistics.median(ttft_ms), "ms", case)
    report.add("prompts", prompt_tokens, "tokens", case)
    report.add_all("tokens", cached_tokens(found), case)


def measure_turns(server: EngineServer, shape: Shape, report: Report) -> None:
    """Conversations of many clients."""

    async def talk() -> list[list[RequestResult]]:
        vocabulary = np.arange(3, shape.vocab_size, dtype=np.uint32)
        async with open_session(None) as session:
            options = RequestOptions(base_url=server.url)
            return await converse(session, vocabulary, shape.talk, options)

    server.flush(timeout=_FLUSH_S)
    begun = time.perf_counter()
    rounds = asyncio.run(talk())
    seconds = time.perf_counter() - begun
    case = {"load": "turns", "clients": shape.talk.clients}
    report_load([one for turn in rounds for one in turn], seconds, case, report)


def measure_trace(server: EngineServer, shape: Shape, report: Report) -> None:
    """The excerpt of Mooncake's trace, at its times."""
    vocabulary = np.arange(3, shape.vocab_size, dtype=np.uint32)
    requests = trace_requests(vocabulary, read_trace(EXCERPT, shape.trace_requests), shape.trace)
    server.flush(timeout=_FLUSH_S)
    times = arrival_times(requests, None, 0)
    result = load_requests(server.url, requests, times=times)
    case = {"load": "trace", "requests": len(requests)}
    report_load(result.results, result.duration, case, report)


def measure_unused(
    name: str, server: EngineServer, shape: Shape, report: Report
) -> tuple[float, float]:
    """Returns tokens/s and the mean milliseconds per token of prompts that hit nothing."""
    unused = UnusedLoad(
        prompt=shape.prompt,
        concurrent=max(shape.decodes) // 2,
        input_tokens=2 * shape.decode_input,
        output_tokens=shape.decode_output,
        requests=shape.unused_requests,
    )
    unused.send(server, 2 * _WARM_UP_SEED, unused.concurrent)
    result = unused.send(server, 3 * _WARM_UP_SEED, unused.requests)
    tokens = unused.requests * (unused.input_tokens + unused.output_tokens)
    rate = tokens / result.duration
    tpot_ms = statistics.mean(one.tpot for one in result.results if one.tpot) * 1e3
    case = {"load": "unused", "server": name}
    report.add("throughput", rate, "token/s", case)
    report.add("mean_tpot", tpot_ms, "ms", case)
    return rate, tpot_ms


def measure_throughput(shape: Shape, model: str, gpus: int, report: Report) -> None:
    """Requests at once, each with a new prompt, on a server whose L1 holds them all."""
    requests, inputs, outputs = shape.throughput
    pages = requests * ((inputs + outputs) // shape.page_size + 2)
    flags = (*shape.server_flags(pages * shape.page_size), "--tp-size", str(gpus))
    server = EngineServer(*flags, "--max-running-requests", str(requests), model=model)
    with started({"throughput": server}, report):
        load(server.url, [shape.prompt(4 * _WARM_UP_SEED + i, inputs) for i in range(2)], 4)
        prompts = [shape.prompt(5 * _WARM_UP_SEED + i, inputs) for i in range(requests)]
        result = load(server.url, prompts, outputs)
        case = {"load": "throughput", "requests": requests, "input": inputs, "output": outputs}
        report_load(result.results, result.duration, case, report)
        rate = requests * (inputs + outputs) / result.duration / gpus
        report.add("throughput_of_a_gpu", rate, "token/s", case)
        tpots = [one.tpot * 1e3 for one in result.results if one.tpot]
        report.add("median_tpot", statistics.median(tpots), "ms", case)


def report_costs(
    tiers: tuple[float, float], plain: tuple[float, float], tick_us: float | None, report: Report
) -> None:
    """Report the cost of tiers without hits, and the share of the agreement that steps hide.

    Args:
        tiers, plain: Of `measure_unused`.
        tick_us: Of `measure_tick`; None: it was not measured.
    """
    case = {"load": "unused", "server": "all tiers over GPU only"}
    report.add("throughput_ratio", tiers[0] / plain[0], "ratio", case, target="at least 0.98")
    report.add("tpot_ratio", tiers[1] / plain[1], "ratio", case)
    if tick_us is not None:
        seen_us = max(0.0, tiers[1] - plain[1]) * 1e3
        report.add("agreement_hidden", max(0.0, 1 - seen_us / tick_us), "share", case,
                   agreement_us=tick_us, seen_us=seen_us)  # fmt: skip


def measure_pd(shape: Shape, model: str, ranks: int, report: Report) -> None:
    """TTFT and transfers of one prefill and one decode server of `ranks` each."""
    size = Size(
        flags=(*shape.server_flags(), "--tp-size", str(ranks)),
        env={"MOONCAKE_LOCAL_HOSTNAME": LOOPBACK, **shape.pd_env},
        vocab_size=shape.vocab_size,
        ttft=dict(shape.prompts),
        load_input=shape.decode_input,
        load_output=shape.decode_output,
        tpot_requests=0,
        tpot_rate=1.0,
        throughput_requests=0,
    )
    second_gpu = 0 if shape.device == "cpu" else ranks
    with pair_of(size, model, second_gpu, report) as pair:
        measure_pd_ttft(pair, size, Prompts(shape.vocab_size), report)
