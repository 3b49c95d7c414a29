"""What HiCache costs where nothing hits, and what it brings to conversations, on one GPU.

    python benchmark/gpu_hicache.py unused turns [--store own] [--json FILE]

Qwen3-8B's shape with dummy weights over HTTP. L3 is a Mooncake Store on this host.

`unused`: three servers (no HiCache; L2; L2 and L3) on the same GPU are asked in turn, round by
round, since clocks and neighbours drift; while one is asked the others idle. Prompts are random,
so that every page is written down and none is ever read. Figures are ratios to the server without
HiCache in the same round; their medians are to be within 2% of 1.

`turns`: 20 clients, 10 rounds of 2,048 new tokens, one token of answer, at most 4 requests under
way, the next client drawn at random: 60 GB of KV with L1 of 10% and L2 of 40% of it. GPU only,
with L2, with Mooncake, and Mooncake that an earlier server has filled with the same conversations.

`--store`: `standalone`: a `mooncake_client` process holds the objects, and maps the engine's L2;
`own`: the engine's own segment does, so that the server that fills the store also is the one that
reads it, after a flush. Needs about 100 GB of host memory. Each line says what was
expected before it was measured. `hicache/plot_gpu_hicache.py` draws the lines.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gpu_server import Emit, random_prompt

from sglang.benchmark.api_backends import RequestOptions, SglangBackend
from sglang.benchmark.load_generator import LoadResult, generate_load, open_session
from sglang.benchmark.multiturn import Conversations, converse, round_figures
from sglang.benchmark.report import emit, provenance
from sglang.benchmark.request_result import TIERS, RequestResult
from sglang.benchmark.workload import BenchRequest
from sglang.embedded_mooncake import MooncakeMaster, StandaloneClient
from sglang.srt.distributed.device_communicators.mooncake_library import load_mooncake
from sglang.srt.mem_cache.storage.mooncake_store.host_allocator import MooncakeHostTensorAllocator
from sglang.test.engine_server import EngineServer
from sglang.test.qwen3_8b import DUMMY_FLAGS, KV_BYTES, VOCAB_SIZE, dummy_model

CONVERSATIONS: Final = Conversations(
    clients=20, rounds=10, request_len=2048, output_len=1, parallel=4, fixed_answers=True, seed=5
)
WORKING_SET: Final = CONVERSATIONS.clients * CONVERSATIONS.rounds * CONVERSATIONS.request_len
STORE_BYTES: Final = int(1.3 * WORKING_SET * KV_BYTES)
"""The store evicts from 95% on, and rounds objects up: of 1.1 times the working set it had lost the
first pages of some conversations, and with them the use of all that follow."""
L1: Final = ("--page-size", "64", "--max-total-tokens", str(WORKING_SET // 10))
L2: Final = ("--enable-hierarchical-cache", "--hicache-size", f"{4e-10 * WORKING_SET * KV_BYTES:f}")
L3: Final = ("--hicache-storage-backend", "mooncake")
EXPECTED_S: Final = {"GPU only": 66.0, "+ L2": 31.0, "+ Mooncake": 27.0, "pre-populated": 23.0}
"""The first two from earlier runs. The others were 29.9 and 30.1 when every read was waited for;
now a read is cut where computing is sooner. `hicache/simulate_store.py` gives that 0.74 of the time
where the store is filled and read at 4.9 GB/s (24.7 and 18.3 s). Where it begins empty the device
was busy for half of the run and the reader for two thirds; but in the simulation, where nothing
else is in the way, cutting costs 6%."""

_TOUCH_BYTES: Final = 32 << 20

CONCURRENT, INPUT, OUTPUT = 32, 2048, 128
REQUESTS, REPEATS = 96, 4
SMALL_L2_GB: Final = "12"
EXPECTED_RATIO: Final = {"+ L2": 0.985, "+ Mooncake": 0.98}


class Store:
    """A Mooncake Store on this host, and what an engine needs to use it."""

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
        """Write all over the client's memory once, as a store that has served for long has been:
        the kernel takes longer to give pages than a copy takes to fill them."""
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


def start(model: str, flags: dict[str, tuple[str, ...]], store: Store, stack: ExitStack,
          out: Emit) -> dict[str, EngineServer]:  # fmt: skip
    """Servers of one model, started side by side."""
    begun = time.monotonic()
    servers = {
        name: EngineServer("--device", "cuda", *DUMMY_FLAGS, *own, model=model, env=store.env)
        for name, own in flags.items()
    }
    for server in servers.values():
        stack.callback(server.kill)
    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(EngineServer.start, servers.values()))
    out({"what": "servers started", "names": list(servers), "seconds": time.monotonic() - begun,
         "tiers": {name: server.request("GET", "/server_info").body["tiers"]
                   for name, server in servers.items()}})  # fmt: skip
    return servers


# ---- where nothing hits ------------------------------------------------------------------------


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
    rates: dict[str, list[float]] = {name: [] for name in flags}
    token_ms: dict[str, list[float]] = {name: [] for name in flags}
    with ExitStack() as stack:
        servers = start(model, flags, store, stack, out)
        names = list(servers)
        for name in names:
            load(servers[name], 10_000_000, CONCURRENT)
        for repeat in range(REPEATS):
            # Another one begins each time.
            for name in names[repeat % 3 :] + names[: repeat % 3]:
                seed = 1 + REQUESTS * (repeat * len(names) + names.index(name))
                result = load(servers[name], seed, REQUESTS)
                tpots = [one.tpot for one in result.results if one.tpot]
                rates[name].append(REQUESTS * (INPUT + OUTPUT) / result.duration)
                token_ms[name].append(statistics.mean(tpots) * 1e3)
                out({"what": "unused, one round", "name": name, "repeat": repeat,
                     "s": result.duration, "tokens_per_s": rates[name][-1],
                     "mean_tpot_ms": token_ms[name][-1]})  # fmt: skip
        if store.is_standalone:
            clear_store(servers["+ Mooncake"], out)
    for name, expected in EXPECTED_RATIO.items():
        out(
            {
                "what": f"unused, {name} over GPU only",
                "expected": expected,
                "target": 0.98,
                "throughput_ratio": _median_ratio(rates[name], rates["GPU only"]),
                "tpot_ratio": _median_ratio(token_ms[name], token_ms["GPU only"]),
                "throughput_ratios": _ratios(rates[name], rates["GPU only"]),
                "tpot_ratios": _ratios(token_ms[name], token_ms["GPU only"]),
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
        results = await converse(session, np.arange(VOCAB_SIZE), CONVERSATIONS, options)
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
    """Two short prompts, so that no first call is measured."""
    async with open_session(None) as session:
        for seed in (71, 72):
            request = BenchRequest(random_prompt(seed, 4096), 2)
            await SglangBackend().send(session, request, RequestOptions(base_url=server.url))


def tier_counters(server: EngineServer) -> dict[str, float]:
    """What the tiers' metrics say, histograms' buckets and births left out."""
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
        first = start(model, {"GPU only": (*L1, *metrics), **tiered}, store, stack, out)
        measure_turns("GPU only", first["GPU only"], out)
        first["GPU only"].kill()
        measure_turns("+ Mooncake", first["+ Mooncake"], out)
        first["+ Mooncake"].flush(timeout=120)
        if store.is_standalone:
            first["+ Mooncake"].kill()
            fresh = start(model, tiered, store, stack, out)["+ Mooncake"]
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
