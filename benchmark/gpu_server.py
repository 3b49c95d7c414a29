"""Qwen3-8B's shape with dummy weights through the whole engine on a GPU, against the targets.

    python benchmark/gpu_server.py scheduler [--json FILE]
    python benchmark/gpu_server.py server [--json FILE]

`scheduler`: what a decode step costs the CPU at 256 running requests, in this process, without
HTTP. `server`: TTFT cold and from L2, decoding of one sequence, and conversations of 20 clients
whose KV is ten times L1 and 2.5 times L2, over HTTP. Prompts are random; each line says what was
expected before it was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_forward import QWEN3_8B

from sglang.benchmark.api_backends import RequestOptions, SglangBackend
from sglang.benchmark.load_generator import open_session
from sglang.benchmark.multiturn import Conversations, converse, round_figures
from sglang.benchmark.report import emit, provenance
from sglang.benchmark.request_result import TIERS, RequestResult
from sglang.benchmark.workload import BenchRequest
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler, Tick
from sglang.srt.managers.scheduler_process import build_scheduler
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.test.engine_server import EngineServer
from sglang.test.mooncake_cluster import MooncakeCluster

VOCABULARY = 151936
KV_BYTES = 36 * 2 * 8 * 128 * 2
CLIENTS, ROUNDS, TURN, ANSWER = 20, 10, 1024, 8
WORKING_SET = CLIENTS * ROUNDS * (TURN + ANSWER)
DUMMY = ("--load-format", "dummy", "--tokenizer-path", str(BUILTIN_MODEL_DIR))

Emit = Callable[[dict[str, Any]], None]


def random_prompt(seed: int, length: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()
    return ids


# ---- the scheduler in this process -----------------------------------------------------------


class TimedWorker:
    """Wraps a worker's forward: how long a step has the GPU busy or the CPU waiting for it."""

    def __init__(self, worker: Any) -> None:
        self._forward = worker.forward_batch_generation
        self.launch = self.waited = 0.0
        worker.forward_batch_generation = self

    def __call__(self, batch: Any) -> Any:
        begun = time.perf_counter()
        result = self._forward(batch)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        self.launch = launched - begun
        self.waited = time.perf_counter() - launched
        return result


def measure_steps(scheduler: Scheduler, worker: TimedWorker, count: int, context: int) -> list[Any]:
    """(whole, launching, waiting) seconds of the decode steps of `count` requests."""
    messages = []
    for i in range(count):
        params = SamplingParams(max_new_tokens=128, temperature=0.0, ignore_eos=True)
        params.normalize(tokenizer=object())
        messages.append(
            TokenizedGenerateReqInput(
                rid=f"{count}-{i}", input_ids=random_prompt(i, context), sampling_params=params,
                seed=i, stream=True,
            )
        )  # fmt: skip
    scheduler.step(Tick(time.time(), messages))
    times = []
    while not scheduler.is_idle():
        before = scheduler.state.counters.decode_steps
        begun = time.perf_counter()
        scheduler.step(Tick(time.time(), []))
        seconds = time.perf_counter() - begun
        is_decode = scheduler.state.counters.decode_steps > before
        if is_decode and len(scheduler.state.decoding) == count:
            times.append((seconds, worker.launch, worker.waited))
    return times


def part_scheduler(model: str, out: Emit) -> None:
    args = ServerArgs.from_kwargs(
        model_path=model, tokenizer_path=str(BUILTIN_MODEL_DIR), load_format="dummy",
        device="cuda", page_size=64, max_total_tokens=131072,
    )  # fmt: skip
    begun = time.monotonic()
    scheduler = build_scheduler(args.resolve()).scheduler
    out({"what": "scheduler built", "seconds": time.monotonic() - begun})
    worker = TimedWorker(scheduler._parts.worker)
    for count, context, expected in ((1, 1024, 0.3), (64, 256, 0.8), (256, 256, 2.0)):
        times = measure_steps(scheduler, worker, count, context)
        whole, launch, waited = (
            statistics.median(column) * 1e3 for column in zip(*times, strict=True)
        )
        out(
            {
                "what": f"decode step, {count} requests, streamed",
                "expected_cpu_ms": expected,
                "target_cpu_ms": 1.5,
                "cpu_ms": whole - waited,
                "of_it_launching_ms": launch,
                "step_ms": whole,
                "steps": len(times),
            }
        )
    scheduler.close()


# ---- servers ---------------------------------------------------------------------------------


def make_servers(model: str, stack: ExitStack) -> dict[str, EngineServer]:
    """All servers, started side by side: what they idle costs the measured one nothing."""
    store_gb = 1 + round(1.2 * WORKING_SET * KV_BYTES / 1e9)
    store = stack.enter_context(MooncakeCluster(segment_size=f"{store_gb}gb"))
    l1 = ("--page-size", "64", "--max-total-tokens", str(WORKING_SET // 10 // 64 * 64))
    l2 = (
        "--enable-hierarchical-cache",
        "--hicache-size",
        f"{0.4 * WORKING_SET * KV_BYTES / 1e9:.1f}",
    )
    flags: dict[str, tuple[str, ...]] = {
        "ttft": ("--max-total-tokens", "40960", "--enable-hierarchical-cache",
                 "--hicache-size", "24"),
        "GPU only": l1,
        "+ L2": (*l1, *l2),
        "+ Mooncake": (*l1, *l2, "--hicache-storage-backend", "mooncake"),
    }  # fmt: skip
    servers = {
        name: EngineServer("--device", "cuda", *DUMMY, *own, model=model, env=store.engine_env())
        for name, own in flags.items()
    }
    for server in servers.values():
        stack.callback(server.kill)
    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(EngineServer.start, servers.values()))
    return servers


async def ask(url: str, prompts: Sequence[list[int]], tokens: int) -> list[RequestResult]:
    """One after the other."""
    backend, options = SglangBackend(), RequestOptions(base_url=url)
    async with open_session(None) as session:
        return [await backend.send(session, BenchRequest(ids, tokens), options) for ids in prompts]


def measure_ttft(server: EngineServer, out: Emit) -> None:
    # L1 holds 40,960 tokens: asked in turn, each prompt has left L1 when it is asked again.
    expected = {(8192, "cold"): 225, (8192, "L2"): 40, (32768, "cold"): 1350, (32768, "L2"): 115}
    target = {(8192, "L2"): 34, (32768, "L2"): 105}
    asyncio.run(ask(server.url, [random_prompt(seed, 2048) for seed in (1, 2, 1)], 4))
    for length, count in ((8192, 7), (32768, 3)):
        prompts = [random_prompt(length + i, length) for i in range(count)]
        for source in ("cold", "L2", "L2"):
            results = asyncio.run(ask(server.url, prompts, 2))
            assert all(result.success for result in results), results
            out(
                {
                    "what": f"TTFT of {length} tokens, {source}",
                    "expected_ms": expected[length, source],
                    "target_ms": target.get((length, source)),
                    "ms": statistics.median(result.ttft for result in results) * 1e3,
                    "all_ms": [round(result.ttft * 1e3, 1) for result in results],
                    "cached": results[-1].cached_details,
                }
            )
            time.sleep(0.3)  # until the copies to L2 have landed


def measure_decode(server: EngineServer, out: Emit) -> None:
    results = asyncio.run(ask(server.url, [random_prompt(seed, 1024) for seed in (71, 72)], 257))
    rates = [1 / result.tpot for result in results if result.tpot]
    out({"what": "decode of one sequence over HTTP, token/s", "expected": 205, "target": 205,
         "rates": rates})  # fmt: skip


async def talk(server: EngineServer) -> tuple[list[list[RequestResult]], float]:
    shape = Conversations(
        clients=CLIENTS, rounds=ROUNDS, request_len=TURN, output_len=ANSWER, seed=5
    )
    async with open_session(None) as session:
        begun = time.perf_counter()
        options = RequestOptions(base_url=server.url)
        results = await converse(session, np.arange(VOCABULARY), shape, options)
        return results, time.perf_counter() - begun


def measure_turns(name: str, server: EngineServer, expected_s: float, out: Emit) -> None:
    rounds, seconds = asyncio.run(talk(server))
    flat = [result for turn in rounds for result in turn]
    good = [result for result in flat if result.success]
    prompts = sum(result.prompt_tokens for result in good)
    cached = {tier: sum(r.cached_details.get(tier, 0) for r in good) for tier in TIERS}
    out(
        {
            "what": f"conversations, {name}",
            "expected_s": expected_s,
            "s": seconds,
            "failed": len(flat) - len(good),
            "first_error": next((r.error for r in flat if not r.success), ""),
            "input_tokens_per_s": prompts / seconds,
            "mean_ttft_ms": statistics.mean(r.ttft for r in good) * 1e3,
            "median_ttft_ms": statistics.median(r.ttft for r in good) * 1e3,
            "prompt_tokens": prompts,
            "cached": cached,
            "median_ttft_ms_by_round": [
                round_figures(n, turn)["median_ttft_ms"] for n, turn in enumerate(rounds, 1)
            ],
        }
    )


def part_server(model: str, out: Emit) -> None:
    with ExitStack() as stack:
        begun = time.monotonic()
        servers = make_servers(model, stack)
        out({"what": "four servers started side by side", "seconds": time.monotonic() - begun})
        for name, server in servers.items():
            out({"what": f"tiers of {name}",
                 "tiers": server.request("GET", "/server_info").body["tiers"]})  # fmt: skip
        measure_ttft(servers["ttft"], out)
        measure_decode(servers["ttft"], out)
        servers["ttft"].kill()
        for name, expected in (("GPU only", 30.0), ("+ L2", 27.0), ("+ Mooncake", 30.0)):
            measure_turns(name, servers[name], expected, out)
        servers["+ Mooncake"].flush()
        measure_turns("Mooncake pre-populated", servers["+ Mooncake"], 30.0, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=("scheduler", "server"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    def out(record: dict[str, Any]) -> None:
        emit(record, args.json)

    out(provenance())
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(QWEN3_8B), encoding="utf-8")
        (part_scheduler if args.part == "scheduler" else part_server)(directory, out)


if __name__ == "__main__":
    main()
