"""The cost of HiCache without hits, and its benefit for conversations, on one GPU.

    python benchmark/gpu_hicache.py unused turns [--store own] [--json FILE]

Qwen3-8B's shape with dummy weights over HTTP. L3 is a Mooncake Store on this host.

`unused`: three servers (no HiCache; L2; L2 and L3) on the same GPU get the same load in turn, round
by round, because clocks and neighbours drift. Only one server works at a time. Prompts are random,
so that every page is written to the lower tiers and none is ever read. Figures are ratios to the
server without HiCache in the same round; the target for their medians is 2% around 1.

`turns`: 20 clients, 10 rounds of 2,048 new tokens, one token of answer, at most 4 requests under
way, the next client drawn at random: 60 GB of KV, with L1 of 10% and L2 of 40% of it. Servers: GPU
only, with L2, with Mooncake, and with a Mooncake store filled by the same conversations before.

`--store standalone`: a `mooncake_client` process holds the objects and shares the engine's L2.
`--store own`: the engine's own segment holds them, so that one server fills the store and reads it
after a flush. Needs about 100 GB of host memory. Each line has the figure expected before the
measurement. `hicache/plot_gpu_hicache.py` plots the lines.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gpu_server import Emit, random_prompt

from rigs.bench.multiturn import Conversations, converse, round_figures
from rigs.models.qwen3_8b import DUMMY_FLAGS, KV_BYTES, VOCAB_SIZE, dummy_model
from rigs.servers.engine_server import EngineServer
from rigs.stores.store_processes import StandaloneClient
from sglang.benchmark.api_backends import RequestOptions, SglangBackend
from sglang.benchmark.load_generator import LoadResult, generate_load, open_session
from sglang.benchmark.report import emit, provenance
from sglang.benchmark.request_result import TIERS, RequestResult
from sglang.benchmark.workload import BenchRequest
from sglang.embedded_mooncake import MooncakeMaster
from sglang.srt.distributed.device_communicators.mooncake_library import load_mooncake
from sglang.srt.mem_cache.storage.mooncake_store.host_allocator import MooncakeHostTensorAllocator

CONVERSATIONS: Final = Conversations(
    clients=20, rounds=10, request_len=2048, output_len=1, parallel=4, fixed_answers=True, seed=5
)
WORKING_SET: Final = CONVERSATIONS.clients * CONVERSATIONS.rounds * CONVERSATIONS.request_len
STORE_BYTES: Final = int(1.3 * WORKING_SET * KV_BYTES)
"""The store evicts from 95% on, and rounds object sizes up. With 1.1 times the working set it lost
the first pages of some conversations, which makes all later pages useless."""
L1: Final = ("--page-size", "64", "--max-total-tokens", str(WORKING_SET // 10))
L2: Final = ("--enable-hierarchical-cache", "--hicache-size", f"{4e-10 * WORKING_SET * KV_BYTES:f}")
L3: Final = ("--hicache-storage-backend", "mooncake")
EXPECTED_S: Final = {"GPU only": 66.0, "+ L2": 31.0, "+ Mooncake": 27.0, "pre-populated": 23.0}
"""Expected seconds by server. The first two are from earlier runs. The others were 29.9 and 30.1 s
when requests waited for all reads; now a read is cut if computing is faster. For a filled store
read at 4.9 GB/s, `hicache/simulate_store.py` predicts 0.74 of the time (18.3 instead of 24.7 s).
With a store that starts empty, the device was busy for half of the run and the reader for two
thirds; in the simulation, which has no other costs, cutting costs 6% there."""

_TOUCH_BYTES: Final = 32 << 20

CONCURRENT, INPUT, OUTPUT = 32, 2048, 128
REQUESTS, REPEATS = 96, 4
SMALL_L2_GB: Final = "12"
_START_S: Final = 300.0
"""Limit for servers that start at once: kernels of linear attention tune themselves first."""
EXPECTED_RATIO: Final = {"+ L2": 0.985, "+ Mooncake": 0.98}


class Store:
    """A Mooncake Store on this host, and the environment for engines that use it."""

    def __init__(self, *, standalone: bool, stack: ExitStack) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        master = MooncakeMaster(folder)
        stack.callback(master.kill)
        master.start()
        self.is_standalone = standalone
        if not standalone:
            self.env = master.engine_env() | {
                "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(STORE_BYTES),
                "MC_STORE_MEMCPY": "1",
            }
            return
        client = StandaloneClient(master, folder, segment_bytes=STORE_BYTES)
        stack.callback(client.kill)
        client.start(timeout=120)
        self.env = client.engine_env()

    def touch(self, out: Emit) -> None:
        """Write all memory of the client once, as in a store that has served for long.

        The kernel's first allocation of a page takes longer than a copy into it.
        """
        client = load_mooncake().MooncakeDistributedStore()
        assert client.setup_dummy(0, 16 << 20, self.env["MOONCAKE_CLIENT"]) == 0
        block = MooncakeHostTensorAllocator().allocate((_TOUCH_BYTES,), torch.uint8)
        assert client.register_buffer(block.data_ptr(), block.nbytes) == 0

        def put(index: int) -> int:
            buffers = [[block.data_ptr()]], [[block.nbytes]]
            code: int = client.batch_put_from_multi_buffers([f"touch/{index}"], *buffers)[0]
            return code

        begun = time.monotonic()
        count = int(0.93 * STORE_BYTES) // _TOUCH_BYTES
        with ThreadPoolExecutor(16) as pool:
            failed = sum(code != 0 for code in pool.map(put, range(count)))
        seconds = time.monotonic() - begun
        removed = client.remove_by_regex("^touch/", True)
        client.close()
        rate = count * _TOUCH_BYTES / seconds / 1e9
        out({"what": "store touched", "seconds": seconds, "gb_s": rate, "failed": failed,
             "removed": removed})  # fmt: skip


def start(model: str, flags: Mapping[str, tuple[str, ...]], env: dict[str, str],
          stack: ExitStack, out: Emit) -> dict[str, EngineServer]:  # fmt: skip
    """Start several servers of one model in parallel."""
    begun = time.monotonic()
    servers = {
        name: EngineServer("--device", "cuda", *DUMMY_FLAGS, *own, model=model, env=env)
        for name, own in flags.items()
    }
    for server in servers.values():
        stack.callback(server.kill)
    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(lambda server: server.start(_START_S), servers.values()))
    out({"what": "servers started", "names": list(servers), "seconds": time.monotonic() - begun,
         "tiers": {name: server.request("GET", "/server_info").body["tiers"]
                   for name, server in servers.items()}})  # fmt: skip
    return servers


# ---- without hits ------------------------------------------------------------------------------


def load(server: EngineServer, first_seed: int, count: int) -> LoadResult:
    requests = [BenchRequest(random_prompt(first_seed + i, INPUT), OUTPUT) for i in range(count)]

    async def run() -> LoadResult:
        async with open_session(None) as session:
            return await generate_load(
                session, SglangBackend(), requests, RequestOptions(base_url=server.url),
                times=[0.0] * count, max_concurrency=CONCURRENT,
            )  # fmt: skip

    result = asyncio.run(run())
    assert all(one.success and not one.cached_tokens for one in result.results), result.results
    return result


def part_unused(model: str, store: Store, out: Emit) -> None:
    memory = ("--page-size", "64", "--max-total-tokens", "98304")
    small_l2 = ("--enable-hierarchical-cache", "--hicache-size", SMALL_L2_GB)
    flags = {
        "GPU only": memory,
        "+ L2": (*memory, *small_l2),
        "+ Mooncake": (*memory, *small_l2, *L3),
    }
    with ExitStack() as stack:
        servers = start(model, flags, store.env, stack, out)
        compare_unused(servers, EXPECTED_RATIO, out)
        if store.is_standalone:
            clear_store(servers["+ Mooncake"], out)


def compare_unused(
    servers: Mapping[str, EngineServer], expected: Mapping[str, float], out: Emit
) -> None:
    """The same load in turn, round after round; then throughput and time per token of each server
    over those of the first, which has no entry in `expected`."""
    names = list(servers)
    base = names[0]
    rates: dict[str, list[float]] = {name: [] for name in names}
    token_ms: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        load(servers[name], 10_000_000, CONCURRENT)
    for repeat in range(REPEATS):
        # Another server begins each round.
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            seed = 1 + REQUESTS * (repeat * len(names) + names.index(name))
            result = load(servers[name], seed, REQUESTS)
            tpots = [one.tpot for one in result.results if one.tpot]
            rates[name].append(REQUESTS * (INPUT + OUTPUT) / result.duration)
            token_ms[name].append(statistics.mean(tpots) * 1e3)
            out({"what": "unused, one round", "name": name, "repeat": repeat,
                 "s": result.duration, "tokens_per_s": rates[name][-1],
                 "mean_tpot_ms": token_ms[name][-1]})  # fmt: skip
    for name, wanted in expected.items():
        out(
            {
                "what": f"unused, {name} over {base}",
                "expected": wanted,
                "target": 0.98,
                "throughput_ratio": _median_ratio(rates[name], rates[base]),
                "tpot_ratio": _median_ratio(token_ms[name], token_ms[base]),
                "throughput_ratios": _ratios(rates[name], rates[base]),
                "tpot_ratios": _ratios(token_ms[name], token_ms[base]),
            }
        )


def _ratios(values: list[float], base: list[float]) -> list[float]:
    return [value / other for value, other in zip(values, base, strict=True)]


def _median_ratio(values: list[float], base: list[float]) -> float:
    return statistics.median(_ratios(values, base))


# ---- conversations -----------------------------------------------------------------------------


async def talk(server: EngineServer) -> tuple[list[list[RequestResult]], float]:
    async with open_session(None) as session:
        begun = time.perf_counter()
        options = RequestOptions(base_url=server.url)
        results = await converse(
            session, np.arange(VOCAB_SIZE, dtype=np.uint32), CONVERSATIONS, options
        )
        return results, time.perf_counter() - begun


def measure_turns(name: str, server: EngineServer, out: Emit) -> None:
    asyncio.run(_warm_up(server))
    rounds, seconds = asyncio.run(talk(server))
    flat = [result for turn in rounds for result in turn]
    good = [result for result in flat if result.success]
    prompts = sum(result.prompt_tokens for result in good)
    figures = [round_figures(number, turn) for number, turn in enumerate(rounds, 1)]
    out(
        {
            "what": f"conversations, {name}",
            "expected_s": EXPECTED_S[name],
            "s": seconds,
            "failed": len(flat) - len(good),
            "first_error": next((r.error for r in flat if not r.success), ""),
            "input_tokens_per_s": prompts / seconds,
            "mean_ttft_ms": statistics.mean(r.ttft for r in good) * 1e3,
            "median_ttft_ms": statistics.median(r.ttft for r in good) * 1e3,
            "prompt_tokens": prompts,
            "cached": {tier: sum(r.cached_details.get(tier, 0) for r in good) for tier in TIERS},
            "rounds": [
                {key: one[key] for key in ("round", "median_ttft_ms", "hit_rate",
                                           "cached_tokens_details", "prompt_tokens")}
                for one in figures
            ],
        }
    )  # fmt: skip
    out({"what": f"counters after {name}", "counters": tier_counters(server)})


async def _warm_up(server: EngineServer) -> None:
    """Send two short prompts, so that no first call is measured."""
    async with open_session(None) as session:
        for seed in (71, 72):
            request = BenchRequest(random_prompt(seed, 4096), 2)
            await SglangBackend().send(session, request, RequestOptions(base_url=server.url))


def tier_counters(server: EngineServer) -> dict[str, float]:
    """The metrics of the tiers, without buckets and creation times of histograms."""
    return {
        name: value
        for name, value in server.metrics().items()
        if ("hicache" in name or "fetched" in name or "backup" in name or "load_back" in name)
        and "_bucket" not in name
        and "_created" not in name
        and value
    }


def clear_store(server: EngineServer, out: Emit) -> None:
    server.flush(timeout=120)
    begun = time.monotonic()
    reply = server.request("POST", "/hicache/storage-backend/clear", admin=True)
    assert reply.status == 200, reply
    out({"what": "store cleared", "seconds": time.monotonic() - begun})


def part_turns(model: str, store: Store, out: Emit) -> None:
    metrics = ("--enable-metrics",)
    tiered = {"+ Mooncake": (*L1, *L2, *L3, *metrics)}
    with ExitStack() as stack:
        first = start(model, {"GPU only": (*L1, *metrics), **tiered}, store.env, stack, out)
        measure_turns("GPU only", first["GPU only"], out)
        first["GPU only"].kill()
        measure_turns("+ Mooncake", first["+ Mooncake"], out)
        first["+ Mooncake"].flush(timeout=120)
        if store.is_standalone:
            first["+ Mooncake"].kill()
            fresh = start(model, tiered, store.env, stack, out)["+ Mooncake"]
        else:
            fresh = first["+ Mooncake"]
        measure_turns("pre-populated", fresh, out)
        fresh.flush(timeout=120)
        reply = fresh.request("DELETE", "/hicache/storage-backend", admin=True)
        assert reply.status == 200, reply
        measure_turns("+ L2", fresh, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=("unused", "turns"))
    parser.add_argument("--store", choices=("standalone", "own"), default="standalone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    def out(record: dict[str, Any]) -> None:
        emit({"at_s": round(time.monotonic() - begun, 1), **record}, args.json)

    begun = time.monotonic()
    out({**provenance(), "store": args.store})
    parts = {"unused": part_unused, "turns": part_turns}
    with ExitStack() as stack:
        directory = stack.enter_context(dummy_model())
        store = Store(standalone=args.store == "standalone", stack=stack)
        if store.is_standalone:
            store.touch(out)
        for part in args.parts:
            parts[part](directory, store, out)


if __name__ == "__main__":
    main()
