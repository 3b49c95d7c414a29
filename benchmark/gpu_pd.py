"""Prefill and decode on two GPUs of a machine, over NVLink, against the targets.

    python benchmark/gpu_pd.py [ttft tpot throughput] [--json FILE]

Qwen3-8B's shape with dummy weights; random prompts, so that nothing is cached. One pair of servers
(1P1D) behind the router for all sections, then two servers of whole requests.

`ttft`: TTFT of 8,192 and 32,768 tokens through the router, and the transfer that computing does not
hide: `stages.transfer` of the prefill server's own answer, which the router drops, so that these
requests go to both servers directly. Target at 32,768: at most 3% of TTFT.
`tpot`: requests of long prompts and short answers at fixed times. p99 of the time per output token
of a request, of 1P1D against one server that does both at the same times. Target: 25% lower.
`throughput`: as many requests as `--concurrency`, 1P1D against two servers behind the same router.

`--tiny` tries all of it without GPUs: the built-in model, over TCP.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

from rigs.models.qwen3_8b import DUMMY_FLAGS, VOCAB_SIZE, dummy_model
from rigs.servers.engine_server import EngineServer
from sglang.benchmark.api_backends import RequestOptions, SglangBackend
from sglang.benchmark.load_generator import LoadResult, generate_load, open_session
from sglang.benchmark.report import emit, provenance
from sglang.benchmark.workload import BenchRequest
from sglang.embedded_mooncake import LOOPBACK
from sglang.embedded_router import Router
from sglang.srt.utils.network import get_free_port

SECTIONS: Final = ("ttft", "tpot", "throughput")
_START_S: Final = 240.0
_REQUEST_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of a run."""

    flags: tuple[str, ...]
    """Flags of every server."""
    env: dict[str, str]
    vocab_size: int
    ttft: dict[int, int]
    """Lengths of prompts in tokens, and how many of each."""
    load_input: int
    """Tokens of a prompt under load."""
    load_output: int
    tpot_requests: int
    tpot_rate: float
    """Requests per second."""
    throughput_requests: int


FULL: Final = Size(
    flags=("--device", "cuda", *DUMMY_FLAGS, "--page-size", "64", "--max-total-tokens", "393216"),
    env={
        "MOONCAKE_PROTOCOL": "nvlink_intra",
        "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "INTRA_NODE_NVLINK",
        "MOONCAKE_LOCAL_HOSTNAME": LOOPBACK,
    },
    vocab_size=VOCAB_SIZE,
    ttft={8192: 9, 32768: 5},
    load_input=4096,
    load_output=128,
    tpot_requests=150,
    # Two thirds of what one GPU can prefill: a chunk is computed most of the time.
    tpot_rate=6.0,
    throughput_requests=256,
)
TINY: Final = Size(
    flags=("--page-size", "16"),
    env={"MOONCAKE_PROTOCOL": "tcp", "MOONCAKE_LOCAL_HOSTNAME": LOOPBACK},
    vocab_size=2000,
    ttft={256: 2, 512: 2},
    load_input=128,
    load_output=16,
    tpot_requests=8,
    tpot_rate=4.0,
    throughput_requests=8,
)


class Prompts:
    """Random prompts, each of them new."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._seeds = itertools.count()

    def draw(self, length: int) -> list[int]:
        rng = np.random.default_rng(next(self._seeds))
        ids: list[int] = rng.integers(10, self._vocab_size, length).tolist()
        return ids


@dataclass(frozen=True, slots=True)
class Pair:
    """1P1D, and the router."""

    prefill: EngineServer
    decode: EngineServer
    bootstrap_port: int
    url: str


@contextlib.contextmanager
def started(servers: Sequence[EngineServer]) -> Iterator[None]:
    """Start the servers at the same time; they run inside the block."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.kill)
        with ThreadPoolExecutor(len(servers)) as pool:
            for future in [pool.submit(server.start) for server in servers]:
                future.result()
        yield


@contextlib.contextmanager
def routed(
    prefills: Sequence[tuple[str, int]], decodes: Sequence[str], plain: Sequence[str] = ()
) -> Iterator[str]:
    """The URL of a router."""
    with tempfile.TemporaryDirectory() as log_dir, contextlib.ExitStack() as stack:
        process = Router(
            prefills,
            decodes,
            port=get_free_port(),
            log_dir=Path(log_dir),
            flags=("--policy", "round_robin", "--disable-retries", "--disable-circuit-breaker"),
            plain=plain,
        )
        stack.callback(process.kill)
        process.start(_START_S)
        yield process.url


def server(size: Size, model: str | None, gpu: int, *flags: str) -> EngineServer:
    return EngineServer(*size.flags, "--base-gpu-id", str(gpu), *flags, model=model, env=size.env)


@contextlib.contextmanager
def pair_of(size: Size, model: str | None, second_gpu: int) -> Iterator[Pair]:
    port = get_free_port()
    mode = "--disaggregation-mode"
    bootstrap = ("--disaggregation-bootstrap-port", str(port))
    prefill = server(size, model, 0, mode, "prefill", *bootstrap)
    decode = server(size, model, second_gpu, mode, "decode")
    with started([prefill, decode]), routed([(prefill.url, port)], [decode.url]) as url:
        yield Pair(prefill, decode, port, url)


# ---- load --------------------------------------------------------------------------------------


def load(
    url: str,
    prompts: Sequence[list[int]],
    output_len: int,
    times: Sequence[float],
    concurrency: int | None = None,
) -> LoadResult:
    """Send all prompts; every request must succeed."""

    async def run() -> LoadResult:
        requests = [BenchRequest(ids, output_len) for ids in prompts]
        options = RequestOptions(base_url=url)
        async with open_session(timeout_s=_REQUEST_S) as session:
            return await generate_load(
                session,
                SglangBackend(),
                requests,
                options,
                times=times,
                max_concurrency=concurrency,
            )

    found = asyncio.run(run())
    failed = [result.error for result in found.results if not result.success]
    assert not failed, f"{len(failed)} of {len(prompts)} failed: {failed[0]}"
    return found


def one_by_one(url: str, prompts: Sequence[list[int]], output_len: int) -> list[float]:
    """TTFT of each prompt, sent one after the other, in seconds."""
    found = load(url, prompts, output_len, [0.0] * len(prompts), concurrency=1)
    return [result.ttft for result in found.results]


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, 100 * share))


# ---- sections ----------------------------------------------------------------------------------


def both_servers(pair: Pair, ids: list[int], room: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Stages of a request as measured by the prefill and by the decode server."""
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True},
        "bootstrap_host": LOOPBACK,
        "bootstrap_port": pair.bootstrap_port,
        "bootstrap_room": room,
    }

    def post(url: str) -> dict[str, Any]:
        answer = httpx.post(f"{url}/generate", json=body, timeout=_REQUEST_S)
        assert answer.status_code == 200, answer.text
        stages: dict[str, Any] = answer.json()["meta_info"]["stages"]
        return stages

    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(post, one.url) for one in (pair.prefill, pair.decode))
        return first.result(), second.result()


def measure_ttft(pair: Pair, size: Size, prompts: Prompts) -> Iterator[dict[str, Any]]:
    rooms = itertools.count(1)
    for length, count in size.ttft.items():
        draw = [prompts.draw(length) for _ in range(2 * count + 2)]
        one_by_one(pair.url, draw[:2], 2)
        ttft = statistics.median(one_by_one(pair.url, draw[2 : 2 + count], 2))
        found = [both_servers(pair, ids, next(rooms)) for ids in draw[2 + count :]]
        left = statistics.median(prefill["transfer"] for prefill, _ in found)
        yield {
            "section": "ttft",
            "tokens": length,
            "ttft_ms": round(ttft * 1e3, 2),
            "not_hidden_ms": round(left * 1e3, 3),
            "not_hidden_share": round(left / ttft, 4),
            "target_share": 0.03 if length == max(size.ttft) else None,
            "read_ms": round(statistics.median(d["transfer"] for _, d in found) * 1e3, 3),
            "queue_ms": round(statistics.median(d["queue"] for _, d in found) * 1e3, 3),
            "prefill_ms": round(statistics.median(d["prefill"] for _, d in found) * 1e3, 2),
            "all_not_hidden_ms": [round(p["transfer"] * 1e3, 3) for p, _ in found],
        }


def measure_tpot(name: str, url: str, size: Size, prompts: Prompts) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    times = np.cumsum(rng.exponential(1 / size.tpot_rate, size.tpot_requests)).tolist()
    draw = [prompts.draw(size.load_input) for _ in times]
    found = load(url, draw, size.load_output, times)
    tpot = [result.tpot for result in found.results if result.tpot is not None]
    between = [gap for result in found.results for gap in result.itl]
    ttft = [result.ttft for result in found.results]
    return {
        "section": "tpot",
        "servers": name,
        "input": size.load_input,
        "output": size.load_output,
        "requests": len(draw),
        "rate": size.tpot_rate,
        "tpot_p50_ms": round(percentile(tpot, 0.5) * 1e3, 2),
        "tpot_p99_ms": round(percentile(tpot, 0.99) * 1e3, 2),
        "between_tokens_p99_ms": round(percentile(between, 0.99) * 1e3, 2),
        "ttft_p50_ms": round(percentile(ttft, 0.5) * 1e3, 1),
        "ttft_p99_ms": round(percentile(ttft, 0.99) * 1e3, 1),
        "seconds": round(found.duration, 1),
        "client_cpu_s": round(found.client_cpu_seconds, 1),
    }


def measure_throughput(
    name: str, url: str, size: Size, prompts: Prompts, concurrency: int
) -> dict[str, Any]:
    draw = [prompts.draw(size.load_input) for _ in range(size.throughput_requests)]
    found = load(url, draw, size.load_output, [0.0] * len(draw), concurrency)
    out = sum(result.completion_tokens for result in found.results)
    return {
        "section": "throughput",
        "servers": name,
        "input": size.load_input,
        "output": size.load_output,
        "requests": len(draw),
        "concurrency": concurrency,
        "output_tokens_s": round(out / found.duration, 1),
        "all_tokens_s": round((out + sum(map(len, draw))) / found.duration, 1),
        "requests_s": round(len(draw) / found.duration, 3),
        "client_cpu_s": round(found.client_cpu_seconds, 1),
    }


def run(args: argparse.Namespace, size: Size, model: str | None) -> Iterator[dict[str, Any]]:
    prompts = Prompts(size.vocab_size)
    wanted = args.sections or SECTIONS
    found: dict[tuple[str, str], dict[str, Any]] = {}
    second_gpu = 0 if args.tiny else 1

    def loads(name: str, urls: dict[str, str]) -> Iterator[dict[str, Any]]:
        """The sections that both kinds of servers have; `urls` by section."""
        for section, url in urls.items():
            if section not in wanted:
                continue
            # Warm up: some things are made on first use.
            warm = [prompts.draw(size.load_input) for _ in range(8)]
            load(url, warm, size.load_output, [0.0] * len(warm))
            if section == "tpot":
                found[section, name] = measure_tpot(name, url, size, prompts)
            else:
                found[section, name] = measure_throughput(
                    name, url, size, prompts, args.concurrency
                )
            yield found[section, name]

    begun = time.monotonic()
    with pair_of(size, model, second_gpu) as pair:
        yield {"what": "1P1D is up", "seconds": round(time.monotonic() - begun, 1)}
        if "ttft" in wanted:
            yield from measure_ttft(pair, size, prompts)
        yield from loads("1P1D", {"tpot": pair.url, "throughput": pair.url})
    if not {"tpot", "throughput"} & set(wanted):
        return
    begun = time.monotonic()
    plain = [server(size, model, gpu) for gpu in (0, second_gpu)]
    with started(plain), routed([], [], [one.url for one in plain]) as url:
        yield {"what": "two servers are up", "seconds": round(time.monotonic() - begun, 1)}
        yield from loads("unified", {"tpot": plain[0].url, "throughput": url})
    if "tpot" in wanted:
        one, both = (found["tpot", name]["tpot_p99_ms"] for name in ("1P1D", "unified"))
        yield {
            "section": "tpot",
            "what": "1P1D against one server that does both",
            "p99_lower_by": round(1 - one / both, 3),
            "target": 0.25,
        }
    if "throughput" in wanted:
        apart, together = (
            found["throughput", name]["output_tokens_s"] for name in ("1P1D", "unified")
        )
        yield {
            "section": "throughput",
            "what": "1P1D against two servers that do both",
            "ratio": round(apart / together, 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="Default: all.")
    parser.add_argument("--concurrency", type=int, default=48)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    size = TINY if args.tiny else FULL
    begun = time.monotonic()
    emit({"benchmark": "gpu_pd", **provenance()}, args.json)
    with contextlib.ExitStack() as stack:
        model = None if args.tiny else stack.enter_context(dummy_model())
        for row in run(args, size, model):
            emit({"benchmark": "gpu_pd", **row}, args.json)
    emit(
        {"benchmark": "gpu_pd", "what": "whole run", "seconds": time.monotonic() - begun}, args.json
    )


if __name__ == "__main__":
    main()
