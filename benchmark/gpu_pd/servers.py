"""TTFT, time per token and throughput of prefill and decode apart, against the targets.

Qwen3-8B's shape with dummy weights; random prompts, so that nothing is cached. One pair of servers
(1P1D) behind the router for all sections, then two servers of whole requests.

`ttft`: TTFT of 8,192 and 32,768 tokens through the router, and the transfer that computing does not
hide: `stages.transfer` of the prefill server's own answer, which the router drops; these requests
therefore go to both servers directly. Target at 32,768: at most 3% of TTFT. `tpot`: requests of
long prompts and short answers at fixed times. p99 of the time per output token of a request, of
1P1D against one server that does both at the same times. Target: 25% lower. `throughput`: as many
requests as `--concurrency`, 1P1D against two servers behind the same router.

`--device cpu` tries all of it without GPUs: the built-in model, over TCP.
"""

from __future__ import annotations

import argparse
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

from benchmark.command import Command
from benchmark.prompts import random_prompt
from benchmark.report import Report
from benchmark.servers import load, started
from benchmark.timing import percentile
from rigs.models.qwen3_8b import DUMMY_FLAGS, VOCAB_SIZE, dummy_model
from rigs.servers.engine_server import EngineServer
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
        return random_prompt(next(self._seeds), length, 10, self._vocab_size)


@dataclass(frozen=True, slots=True)
class Pair:
    """1P1D, and the router."""

    prefill: EngineServer
    decode: EngineServer
    bootstrap_port: int
    url: str


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
def pair_of(size: Size, model: str | None, second_gpu: int, report: Report) -> Iterator[Pair]:
    port = get_free_port()
    mode = "--disaggregation-mode"
    bootstrap = ("--disaggregation-bootstrap-port", str(port))
    prefill = server(size, model, 0, mode, "prefill", *bootstrap)
    decode = server(size, model, second_gpu, mode, "decode")
    both = {"prefill": prefill, "decode": decode}
    with started(both, report), routed([(prefill.url, port)], [decode.url]) as url:
        yield Pair(prefill, decode, port, url)


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


def measure_ttft(pair: Pair, size: Size, prompts: Prompts, report: Report) -> None:
    rooms = itertools.count(1)
    for length, count in size.ttft.items():
        draw = [prompts.draw(length) for _ in range(2 * count + 2)]
        load(pair.url, draw[:2], 2, concurrency=1)
        routed_results = load(pair.url, draw[2 : 2 + count], 2, concurrency=1).results
        ttft = statistics.median(one.ttft for one in routed_results)
        found = [both_servers(pair, ids, next(rooms)) for ids in draw[2 + count :]]
        left_ms = [prefill["transfer"] * 1e3 for prefill, _ in found]
        left = statistics.median(left_ms)
        case = {"tokens": length}
        report.add("ttft", ttft * 1e3, "ms", case)
        report.add("transfer_not_hidden", left, "ms", case, raw=left_ms)
        is_longest = length == max(size.ttft)
        report.add("not_hidden_of_ttft", left / ttft / 1e3, "share", case,
                   target="at most 0.03" if is_longest else None)  # fmt: skip
        for metric, stage in (("read", "transfer"), ("queue", "queue"), ("prefill", "prefill")):
            median = statistics.median(decode[stage] for _, decode in found)
            report.add(metric, median * 1e3, "ms", case)


def measure_tpot(name: str, url: str, size: Size, prompts: Prompts, report: Report) -> float:
    """Returns the 99th percentile of the time per token in milliseconds."""
    rng = np.random.default_rng(7)
    times = np.cumsum(rng.exponential(1 / size.tpot_rate, size.tpot_requests)).tolist()
    draw = [prompts.draw(size.load_input) for _ in times]
    found = load(url, draw, size.load_output, times=times)
    tpot = [result.tpot * 1e3 for result in found.results if result.tpot is not None]
    between = [gap * 1e3 for result in found.results for gap in result.itl]
    ttft = [result.ttft * 1e3 for result in found.results]
    case = {"servers": name, "requests_per_s": size.tpot_rate, "requests": len(draw)}
    p99 = percentile(tpot, 99)
    figures = {
        "tpot_p50": percentile(tpot, 50),
        "tpot_p99": p99,
        "between_tokens_p99": percentile(between, 99),
        "ttft_p50": percentile(ttft, 50),
        "ttft_p99": percentile(ttft, 99),
    }
    report.add_all("ms", figures, case)
    report.add_all("s", {"duration": found.duration, "client_cpu": found.client_cpu_seconds}, case)
    return p99


def measure_throughput(
    name: str, url: str, size: Size, prompts: Prompts, concurrency: int, report: Report
) -> float:
    """Returns output tokens a second."""
    draw = [prompts.draw(size.load_input) for _ in range(size.throughput_requests)]
    found = load(url, draw, size.load_output, concurrency=concurrency)
    out = sum(result.completion_tokens for result in found.results)
    case = {"servers": name, "concurrency": concurrency, "requests": len(draw)}
    report.add("output", out / found.duration, "token/s", case)
    report.add("all", (out + sum(map(len, draw))) / found.duration, "token/s", case)
    report.add("request_rate", len(draw) / found.duration, "request/s", case)
    report.add("client_cpu", found.client_cpu_seconds, "s", case)
    return out / found.duration


def run_sections(args: argparse.Namespace, size: Size, model: str | None, report: Report) -> None:
    prompts = Prompts(size.vocab_size)
    found: dict[tuple[str, str], float] = {}
    second_gpu = 0 if args.device == "cpu" else 1

    def loads(name: str, urls: dict[str, str]) -> None:
        """The sections that both kinds of servers have; `urls` by section."""
        for section, url in urls.items():
            if section not in args.sections:
                continue
            # Warm up: some things are made on first use.
            load(url, [prompts.draw(size.load_input) for _ in range(8)], size.load_output)
            if section == "tpot":
                found[section, name] = measure_tpot(name, url, size, prompts, report)
            else:
                found[section, name] = measure_throughput(
                    name, url, size, prompts, args.concurrency, report
                )

    with pair_of(size, model, second_gpu, report) as pair:
        if "ttft" in args.sections:
            measure_ttft(pair, size, prompts, report)
        loads("1P1D", {"tpot": pair.url, "throughput": pair.url})
    if not {"tpot", "throughput"} & set(args.sections):
        return
    plain = {str(place): server(size, model, gpu) for place, gpu in enumerate((0, second_gpu))}
    urls = [one.url for one in plain.values()]
    with started(plain, report), routed([], [], urls) as url:
        loads("unified", {"tpot": urls[0], "throughput": url})
    if "tpot" in args.sections:
        apart, together = (found["tpot", name] for name in ("1P1D", "unified"))
        case = {"of": "1P1D, against one server that does both"}
        report.add("p99_lower_by", 1 - apart / together, "share", case, target="at least 0.25")
    if "throughput" in args.sections:
        apart, together = (found["throughput", name] for name in ("1P1D", "unified"))
        case = {"of": "1P1D, against two servers that do both"}
        report.add("output_ratio", apart / together, "ratio", case)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--concurrency", type=int, default=48)


def run(args: argparse.Namespace, report: Report) -> None:
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        is_tiny = args.device == "cpu"
        model = None if is_tiny else stack.enter_context(dummy_model())
        run_sections(args, TINY if is_tiny else FULL, model, report)
    report.add("whole_run", time.monotonic() - begun, "s")


COMMAND: Final = Command(
    run=run,
    add_options=add_options,
    devices=("cuda", "cpu"),
    gpus=2,
    quick={"device": "cpu", "sections": ["ttft"]},
)
