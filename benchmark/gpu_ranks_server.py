"""Two GPUs against one behind HTTP, and why a decode step of two takes more than half the time.

    python benchmark/gpu_ranks_server.py [ttft unused kernels] [--json FILE] [--tiny]

Qwen3-8B's shape with dummy weights. Servers start together; only one works at a time. `ttft`:
prompts cold and from L2, with one and two ranks; the target for L2 is 0.6 of one rank's time,
because each rank loads its share over a link of its own. `unused`: two ranks with and without L2
under the same load in turn, random prompts that hit nothing; the target is 2% around 1.
`kernels`: see `gpu_step_profile.py`. Without names all of them, in about five minutes. `--tiny`:
the same on a CPU with a small model, to try the script. Each line has the figure expected before
the measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gpu_step_profile
import numpy as np

from rigs.models.qwen3_8b import DUMMY_FLAGS, VOCAB_SIZE, dummy_model
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.servers.engine_server import EngineServer
from sglang.benchmark.api_backends import RequestOptions, SglangBackend
from sglang.benchmark.load_generator import generate_load, open_session
from sglang.benchmark.report import emit, provenance
from sglang.benchmark.request_result import RequestResult
from sglang.benchmark.workload import BenchRequest
from sglang.srt.constants import BUILTIN_MODEL_DIR

Emit = Callable[[dict[str, Any]], None]

TTFT_TARGET: Final = 0.6
TTFT_EXPECTED: Final = {8192: 0.63, 32768: 0.58}
"""Expected shares of one rank's time from L2, whose loads take 22 and 88 ms of 30 and 106."""
UNUSED_TARGET: Final = 0.98
UNUSED_EXPECTED: Final = 0.985
LANDS_S: Final = 0.3
"""Seconds within which copies to L2 land."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The sizes of a run."""

    flags: tuple[str, ...]
    vocab_size: int
    prompts: dict[int, int]
    """Tokens of a prompt to number of prompts; together they do not fit into `small_l1`."""
    small_l1: int
    large_l1: int
    l2_gb: dict[str, float]
    """L2 of one rank alone, in GB, by part; two ranks have half of it each."""
    concurrent: int
    input_len: int
    output_len: int
    requests: int
    repeats: int


WHOLE: Final = Scale(
    flags=("--device", "cuda", "--page-size", "64", *DUMMY_FLAGS),
    vocab_size=VOCAB_SIZE,
    prompts={8192: 7, 32768: 3},
    small_l1=40_960,
    large_l1=98_304,
    l2_gb={"ttft": 24.0, "unused": 12.0},
    concurrent=32,
    input_len=2048,
    output_len=128,
    requests=96,
    repeats=5,
)
TINY_MODEL: Final[dict[str, Any]] = {
    "num_attention_heads": 8,
    "vocab_size": 2176,
    "max_position_embeddings": 4096,
}
TINY: Final = Scale(
    flags=("--device", "cpu", "--page-size", "16", "--tokenizer-path", str(BUILTIN_MODEL_DIR)),
    vocab_size=2048,
    prompts={128: 7, 512: 3},
    small_l1=640,
    large_l1=2048,
    l2_gb={"ttft": 0.01, "unused": 0.002},
    concurrent=4,
    input_len=64,
    output_len=8,
    requests=8,
    repeats=2,
)


def random_prompt(scale: Scale, seed: int, length: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, scale.vocab_size, length).tolist()
    return ids


@contextmanager
def started(
    model: str, flags: dict[str, tuple[str, ...]], out: Emit
) -> Iterator[dict[str, EngineServer]]:
    """Servers of one model, which start together and end with the block."""
    begun = time.monotonic()
    servers = {name: EngineServer(*own, model=model) for name, own in flags.items()}
    with ExitStack() as stack:
        for server in servers.values():
            stack.callback(server.kill)
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(EngineServer.start, servers.values()))
        out({"what": "servers started", "names": list(servers),
             "seconds": time.monotonic() - begun})  # fmt: skip
        yield servers


def ask(server: EngineServer, prompts: Sequence[list[int]], tokens: int) -> list[RequestResult]:
    """Send the prompts one after the other."""
    options = RequestOptions(base_url=server.url)

    async def run() -> list[RequestResult]:
        async with open_session(None) as session:
            return [
                await SglangBackend().send(session, BenchRequest(ids, tokens), options)
                for ids in prompts
            ]

    results = asyncio.run(run())
    assert all(result.success for result in results), results
    return results


# ---- the first token from L2 -------------------------------------------------------------------


def part_ttft(model: str, scale: Scale, out: Emit) -> None:
    flags = {
        f"TP {size}": (
            *scale.flags, "--tp-size", str(size), "--max-total-tokens", str(scale.small_l1),
            "--enable-hierarchical-cache", "--hicache-size", str(scale.l2_gb["ttft"] / size),
        )
        for size in (1, 2)
    }  # fmt: skip
    ms: dict[tuple[str, int, str], list[float]] = {}
    with started(model, flags, out) as servers:
        for name, server in servers.items():
            warm = [random_prompt(scale, seed, min(scale.prompts) // 4) for seed in (1, 2, 1)]
            ask(server, warm, 4)
            for length, count in scale.prompts.items():
                prompts = [random_prompt(scale, length + i, length) for i in range(count)]
                for source in ("cold", "L2", "L2"):
                    results = ask(server, prompts, 2)
                    found = [round(one.ttft * 1e3, 2) for one in results]
                    ms.setdefault((name, length, source), []).extend(found)
                    out({"what": f"TTFT of {length} tokens, {source}", "name": name,
                         "ms": statistics.median(found), "all_ms": found,
                         "cached": results[-1].cached_details})  # fmt: skip
                    time.sleep(LANDS_S)
    for length in scale.prompts:
        for source in ("cold", "L2"):
            one, two = (statistics.median(ms[f"TP {n}", length, source]) for n in (1, 2))
            is_l2 = source == "L2"
            out({"what": f"TTFT of {length} tokens, {source}, TP 2 over TP 1",
                 "ratio": two / one, "target": TTFT_TARGET if is_l2 else None,
                 "expected": TTFT_EXPECTED.get(length) if is_l2 else None})  # fmt: skip


# ---- a cache that nothing hits -----------------------------------------------------------------


def load(server: EngineServer, scale: Scale, first_seed: int, count: int) -> tuple[float, float]:
    """Tokens per second, and mean milliseconds of a token after the first."""
    requests = [
        BenchRequest(random_prompt(scale, first_seed + i, scale.input_len), scale.output_len)
        for i in range(count)
    ]

    async def run() -> Any:
        async with open_session(None) as session:
            return await generate_load(
                session, SglangBackend(), requests, RequestOptions(base_url=server.url),
                times=[0.0] * count, max_concurrency=scale.concurrent,
            )  # fmt: skip

    result = asyncio.run(run())
    assert all(one.success and not one.cached_tokens for one in result.results), result.results
    tpots = [one.tpot for one in result.results if one.tpot]
    tokens = count * (scale.input_len + scale.output_len)
    return tokens / result.duration, statistics.mean(tpots) * 1e3


def part_unused(model: str, scale: Scale, out: Emit) -> None:
    plain = (*scale.flags, "--tp-size", "2", "--max-total-tokens", str(scale.large_l1))
    l2 = ("--enable-hierarchical-cache", "--hicache-size", str(scale.l2_gb["unused"] / 2))
    found: dict[str, list[tuple[float, float]]] = {"TP 2": [], "TP 2 + L2": []}
    flags = {"TP 2": plain, "TP 2 + L2": (*plain, *l2)}
    with started(model, flags, out) as servers:
        for server in servers.values():
            load(server, scale, 10_000_000, scale.concurrent)
        names, seed = list(servers), 1
        for repeat in range(scale.repeats):
            # The other server begins each round.
            for name in names[:: 1 if repeat % 2 else -1]:
                found[name].append(load(servers[name], scale, seed, scale.requests))
                seed += scale.requests
                out({"what": "unused, one round", "name": name, "repeat": repeat,
                     "tokens_per_s": found[name][-1][0],
                     "mean_tpot_ms": found[name][-1][1]})  # fmt: skip
    ratios = [
        (with_l2[0] / without[0], with_l2[1] / without[1])
        for with_l2, without in zip(found["TP 2 + L2"], found["TP 2"], strict=True)
    ]
    rates, tpots = zip(*ratios, strict=True)
    out({"what": "unused, L2 over none, TP 2", "target": UNUSED_TARGET,
         "expected": UNUSED_EXPECTED, "throughput_ratio": statistics.median(rates),
         "tpot_ratio": statistics.median(tpots), "throughput_ratios": rates,
         "tpot_ratios": tpots})  # fmt: skip


# ---- all ---------------------------------------------------------------------------------------

SERVED: Final = {"ttft": part_ttft, "unused": part_unused}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parts = (*SERVED, "kernels")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to try the script")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(parts):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    begun = time.monotonic()

    def out(record: dict[str, Any]) -> None:
        emit({"at_s": round(time.monotonic() - begun, 1), **record}, args.json)

    out(provenance())
    with ExitStack() as stack:
        if args.tiny:
            model = stack.enter_context(tempfile.TemporaryDirectory())
            save_tiny_checkpoint(model, "qwen3", **TINY_MODEL)
        else:
            model = stack.enter_context(dummy_model())
        for part in args.parts or parts:
            if part == "kernels":
                gpu_step_profile.measure(out, tiny=model if args.tiny else None)
            else:
                SERVED[part](model, TINY if args.tiny else WHOLE, out)


if __name__ == "__main__":
    main()
