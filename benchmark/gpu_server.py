"""Qwen3-8B's shape with dummy weights through the whole engine on a GPU, against the targets.

    python benchmark/gpu_server.py scheduler [--json FILE]
    python benchmark/gpu_server.py server [--layout auto] [--json FILE]

`scheduler`: CPU time of a decode step with up to 256 running requests, in this process, without
HTTP. `server`: TTFT cold, from L2 and from L1, and decoding of one sequence, over HTTP. Prompts are
random; each line has the figure expected before. `gpu_hicache.py` measures the benefit of the
tiers for conversations and their cost without hits.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rigs.models.qwen3_8b import DUMMY_FLAGS, dummy_model
from rigs.servers.engine_server import EngineServer
from sglang.benchmark.api_backends import RequestOptions, SglangBackend
from sglang.benchmark.load_generator import open_session
from sglang.benchmark.report import emit, provenance
from sglang.benchmark.request_result import RequestResult
from sglang.benchmark.workload import BenchRequest
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.managers.messages.io_struct import Tick, TokenizedGenerateReqInput
from sglang.srt.managers.scheduler.launched_step import StepResult
from sglang.srt.managers.scheduler.process.build import build_scheduler
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

Emit = Callable[[dict[str, Any]], None]


_VOCABULARY = 100_000
"""Ids that every measured model has."""


def random_prompt(seed: int, length: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, _VOCABULARY, length).tolist()
    return ids


# ---- the scheduler in this process -----------------------------------------------------------


class Waiting:
    """Seconds that the CPU spent waiting for steps to end; wraps `StepResult.wait`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        wait = StepResult.wait

        def timed(result: StepResult) -> None:
            begun = time.perf_counter()
            wait(result)
            self.seconds += time.perf_counter() - begun

        StepResult.wait = timed  # type: ignore[method-assign, assignment]


def measure_steps(scheduler: Scheduler, waiting: Waiting, count: int, context: int) -> list[Any]:
    """(whole, waiting) seconds of the ticks in which `count` requests decode."""
    messages = []
    for i in range(count):
        params = SamplingParams(max_new_tokens=128, temperature=0.0, ignore_eos=True)
        params.normalize()
        messages.append(
            TokenizedGenerateReqInput(
                rid=f"{count}-{i}", input_ids=token_array(random_prompt(i, context)),
                sampling_params=params, seed=i, stream=True,
            )
        )  # fmt: skip
    scheduler.step(Tick(time.monotonic(), messages))
    times = []
    while not scheduler.is_idle():
        before = scheduler.state.counters.decode_steps
        begun, waited = time.perf_counter(), waiting.seconds
        scheduler.step(Tick(time.monotonic(), []))
        seconds = time.perf_counter() - begun
        is_decode = scheduler.state.counters.decode_steps > before
        if is_decode and len(scheduler.state.queues.decoding) == count:
            times.append((seconds, waiting.seconds - waited))
    return times


def part_scheduler(model: str, out: Emit) -> None:
    args = ServerArgs.from_kwargs(
        model_path=model, tokenizer_path=str(BUILTIN_MODEL_DIR), load_format="dummy",
        device="cuda", page_size=64, max_total_tokens=131072,
    )  # fmt: skip
    begun = time.monotonic()
    built = build_scheduler(args.resolve())
    out({"what": "scheduler built", "seconds": time.monotonic() - begun})
    parts = built.scheduler._parts
    waiting = Waiting()
    for count, context, expected in ((1, 1024, 4.4), (64, 256, 5.95), (256, 256, 10.8)):
        for overlap in (False, True):
            resources = dataclasses.replace(parts.resources, overlap=overlap)
            scheduler = Scheduler(dataclasses.replace(parts, resources=resources))
            times = measure_steps(scheduler, waiting, count, context)
            whole, waited = (statistics.median(part) * 1e3 for part in zip(*times, strict=True))
            out(
                {
                    "what": f"decode step, {count} requests, streamed",
                    "overlap": overlap,
                    "expected_step_ms_with_overlap": expected,
                    "target_cpu_ms": 1.5,
                    "cpu_ms": whole - waited,
                    "step_ms": whole,
                    "steps": len(times),
                }
            )
    built.scheduler.close()


# ---- servers ---------------------------------------------------------------------------------


async def ask(url: str, prompts: Sequence[list[int]], tokens: int) -> list[RequestResult]:
    """Send the prompts one after the other."""
    backend, options = SglangBackend(), RequestOptions(base_url=url)
    async with open_session(None) as session:
        return [await backend.send(session, BenchRequest(ids, tokens), options) for ids in prompts]


def measure_ttft(server: EngineServer, out: Emit) -> None:
    # L1 holds 40,960 tokens, so that each prompt has left L1 before it is sent again; the last one
    # is sent again at once.
    expected = {(8192, "cold"): 205, (8192, "L2"): 27, (8192, "L1"): 7,
                (32768, "cold"): 1255, (32768, "L2"): 97, (32768, "L1"): 10.5}  # fmt: skip
    target = {(8192, "L2"): 34, (32768, "L2"): 105, (32768, "L1"): 10.5}
    asyncio.run(ask(server.url, [random_prompt(seed, 2048) for seed in (1, 2, 1)], 4))
    for length, count in ((8192, 7), (32768, 3)):
        prompts = [random_prompt(length + i, length) for i in range(count)]
        for source in ("cold", "L2", "L2", "L1"):
            sent = prompts[-1:] * 9 if source == "L1" else prompts
            results = asyncio.run(ask(server.url, sent, 2))
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
            time.sleep(0.3)  # The copies to L2 land meanwhile.


def measure_decode(server: EngineServer, out: Emit) -> None:
    results = asyncio.run(ask(server.url, [random_prompt(seed, 1024) for seed in (71, 72)], 257))
    rates = [1 / result.tpot for result in results if result.tpot]
    out({"what": "decode of one sequence over HTTP, token/s", "expected": 205, "target": 205,
         "rates": rates})  # fmt: skip


def part_server(model: str, layout: str, out: Emit) -> None:
    flags = ("--max-total-tokens", "40960", "--enable-hierarchical-cache", "--hicache-size", "24",
             "--hicache-mem-layout", layout)  # fmt: skip
    with EngineServer("--device", "cuda", *DUMMY_FLAGS, *flags, model=model) as server:
        out({"what": "tiers", "tiers": server.request("GET", "/server_info").body["tiers"]})
        measure_ttft(server, out)
        measure_decode(server, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=("scheduler", "server"))
    parser.add_argument("--layout", default="auto", help="layout of L2, for the server")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    def out(record: dict[str, Any]) -> None:
        emit(record, args.json)

    out(provenance())
    with dummy_model() as directory:
        if args.part == "scheduler":
            part_scheduler(directory, out)
        else:
            part_server(directory, args.layout, out)


if __name__ == "__main__":
    main()
