"""Benefit of each tier for conversations of many clients, and of each eviction policy.

The conversations are those of `multiturn`: a ready queue chooses the next client while fewer
requests than the number in `--orders` are under way. The server's queue serves them one after the
other, and eviction considers that queue unless `--ignore-queue` is given.

For each order, arrangement of the tiers and policy: hit rates, and the resulting input throughput
if computing takes the times measured on an H200 (Qwen3-8B's shape) and overlaps with loading from
L2; means over three random orders. `one_tier` is only L1. Then the hit rates of Belady's choice.
About 10 s.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Final

import numpy as np
import torch

from benchmark.command import Command, Refused
from benchmark.report import Report
from benchmark.simulate.talk import SEEDS, Talk, request_seconds
from rigs.bench.belady import belady_hits, unlimited_hits
from rigs.bench.cache_simulation import Arrangement, CacheSizes, SimulatedCache
from rigs.bench.page_trace import make_page_trace


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-clients", type=int, default=20)
    parser.add_argument("--num-rounds", type=int, default=10)
    parser.add_argument("--request-length", type=int, default=2048)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--l1", type=float, default=0.1, help="size as a share of the working set")
    parser.add_argument("--l2", type=float, default=0.4, help="size as a share of the working set")
    parser.add_argument(
        "--orders", nargs="+", default=["4:random", "10:random", "20:fifo"],
        help="requests under way, and the policy of the ready queue",
    )  # fmt: skip
    parser.add_argument("--policies", nargs="+", default=["lru", "lfu", "slru", "fifo"])
    parser.add_argument("--enable-round-barrier", action="store_true")
    parser.add_argument("--ignore-queue", action="store_true", help="evict only by the policy")


def talk_of(args: argparse.Namespace, order: str, seed: int) -> Talk:
    return Talk(
        order,
        seed,
        clients=args.num_clients,
        rounds=args.num_rounds,
        barrier=args.enable_round_barrier,
    )


def replay(
    args: argparse.Namespace, order: str, arrangement: Arrangement, policy: str, seed: int
) -> dict[str, float]:
    """Simulate one run. Returns hit rates, seconds, and input tokens per second."""
    turn, page = args.request_length, args.page_size
    working_set = args.num_clients * args.num_rounds * turn // page
    two_tiers = arrangement is not Arrangement.ONE_TIER
    sizes = CacheSizes(
        l1_pages=round(args.l1 * working_set),
        l2_pages=round(args.l2 * working_set) if two_tiers else 0,
    )
    cache = SimulatedCache(sizes, page_size=page, policy=policy, arrangement=arrangement)
    rng = np.random.default_rng(1)
    texts = rng.integers(0, 1 << 17, (args.num_clients, args.num_rounds * turn), dtype=np.uint32)
    talk = talk_of(args, order, seed)
    prompts = device = host = arrivals = 0
    seconds = 0.0
    while True:
        for client, at in talk.send():
            if not args.ignore_queue:
                cache.arrive(f"{client}-{at}", arrivals, texts[client][: (at + 1) * turn])
            arrivals += 1
        if not talk.waiting:
            break
        client, at = talk.waiting[0]
        ids = texts[client][: (at + 1) * turn]
        from_device, from_host = cache.serve(ids, rid=f"{client}-{at}")
        talk.served()
        prompts, device, host = prompts + len(ids), device + from_device, host + from_host
        seconds += request_seconds(from_device + from_host, len(ids), from_host)
    cache.close()
    return {
        "device_hit_rate": device / prompts,
        "host_hit_rate": host / prompts,
        "seconds": seconds,
        "input_tokens_per_s": prompts / seconds,
    }


def best_hits(args: argparse.Namespace, order: str, seed: int) -> dict[str, float]:
    """Hit rates of Belady's choice with L1, with L2, with both, and without a limit."""
    pages_of_turn = args.request_length // args.page_size
    talk = talk_of(args, order, seed)
    paths = []
    while talk.send() or talk.waiting:
        client, at = talk.waiting[0]
        pages = (at + 1) * pages_of_turn
        base = client * args.num_rounds * pages_of_turn
        paths.append(([*range(base, base + pages)], pages - 1))
        talk.served()
    trace = make_page_trace(paths)
    total = sum(len(request.pages) for request in trace.requests)
    shares = {"l1": args.l1, "l2": args.l2, "both": args.l1 + args.l2}
    found = {
        name: belady_hits(trace, round(share * trace.num_pages)).hit_pages / total
        for name, share in shares.items()
    }
    return found | {"unlimited": unlimited_hits(trace).hit_pages / total}


def means(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.mean(run[key] for run in runs) for key in runs[0]}


def run(args: argparse.Namespace, report: Report) -> None:
    if args.l1 * args.num_clients < 1 or args.request_length % args.page_size:
        raise Refused("--l1 must hold a whole conversation, --request-length be whole pages")
    torch.set_num_threads(1)
    for order in args.orders:
        best = means([best_hits(args, order, seed) for seed in SEEDS])
        base_s = None
        for arrangement in Arrangement:
            for policy in args.policies:
                found = means([replay(args, order, arrangement, policy, seed) for seed in SEEDS])
                base_s = base_s or found["seconds"]
                case = {"order": order, "arrangement": arrangement, "policy": policy}
                rates = {name: found[name] for name in ("device_hit_rate", "host_hit_rate")}
                report.add_all("share", rates, case)
                report.add("duration", found["seconds"], "s", case)
                report.add("input_throughput", found["input_tokens_per_s"], "token/s", case)
                report.add("over_l1_alone", base_s / found["seconds"], "ratio", case)
        for size, rate in best.items():
            report.add("belady_hit_rate", rate, "share", {"order": order, "size": size})


_QUICK: Final = {
    "num_clients": 6,
    "num_rounds": 4,
    "request_length": 256,
    "l1": 0.2,
    "orders": ["3:random"],
    "policies": ["lru"],
}
COMMAND: Final = Command(run=run, add_options=add_options, quick=_QUICK)
