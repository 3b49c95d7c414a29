"""Simulates the benefit of each tier for conversations, on the real tree and allocators.

    python benchmark/hicache/simulate_turns.py [--orders 4:random 20:fifo] [--policies lru slru] \\
        [--ignore-queue] [--output-file turns.jsonl]

The conversations are those of `bench_multiturn.py`: a ready queue chooses the next client while
fewer requests than the number in `--orders` are under way. The server's queue serves them one after
the other, and eviction considers that queue unless `--ignore-queue` is given.

One JSON line for each order, arrangement of the tiers and policy: hit rates, and the resulting
input throughput if computing takes the times measured on an H200 (Qwen3-8B's shape: 8,192 tokens
in 0.214 s, 32,768 in 1.28 s) and overlaps with loading from L2; means over three random orders.
`one_tier` is only L1. Then a line with the hit rates of Belady's choice. About 10 s.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any, Final

import numpy as np
import torch
from tqdm import tqdm

from rigs.bench.belady import belady_hits, unlimited_hits
from rigs.bench.cache_simulation import Arrangement, CacheSizes, SimulatedCache
from rigs.bench.multiturn import ReadyQueuePolicy
from rigs.bench.page_trace import make_page_trace
from sglang.benchmark.report import emit, provenance, writable_file

_PER_TOKEN_S: Final = 2.10e-5
_PER_TOKEN_PAIR_S: Final = 1.10e-9
_PER_REQUEST_S: Final = 0.004
_LOAD_TOKENS_PER_S: Final = 50e9 / 147456
_SEEDS: Final = (5, 6, 7)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    parser.add_argument("--output-file", type=writable_file, help="also append the JSON lines here")
    args = parser.parse_args(argv)
    if args.l1 * args.num_clients < 1 or args.request_length % args.page_size:
        parser.error("--l1 must hold a whole conversation, --request-length be whole pages")
    for order in args.orders:
        count, _, policy = order.partition(":")
        if not count.isdecimal() or int(count) < 1 or policy not in list(ReadyQueuePolicy):
            parser.error(f"--orders {order}: a number, a colon, and random or fifo")
    return args


class Talk:
    """The requests of the conversations as (client, round), in the order of service."""

    def __init__(self, args: argparse.Namespace, order: str, seed: int) -> None:
        count, _, policy = order.partition(":")
        self._parallel, self._is_random = int(count), policy == ReadyQueuePolicy.RANDOM
        self._rounds, self._barrier = args.num_rounds, args.enable_round_barrier
        self._rng = np.random.default_rng(seed)
        self._ready = [(client, 0) for client in range(args.num_clients)]
        self._resting: list[tuple[int, int]] = []
        self.waiting: list[tuple[int, int]] = []
        """Requests in the server's queue, the next one first."""

    def send(self) -> list[tuple[int, int]]:
        """Fill the server's queue. Returns the new requests."""
        if not self._ready and not self.waiting:
            self._ready, self._resting = self._resting, []
        sent = []
        while self._ready and len(self.waiting) < self._parallel:
            index = int(self._rng.integers(len(self._ready))) if self._is_random else 0
            sent.append(self._ready.pop(index))
            self.waiting.append(sent[-1])
        return sent

    def served(self, place: int = 0) -> None:
        """Note that the request at `place` of the queue was answered."""
        client, turn = self.waiting.pop(place)
        if turn + 1 < self._rounds:
            (self._resting if self._barrier else self._ready).append((client, turn + 1))


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
    talk = Talk(args, order, seed)
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


def request_seconds(cached: int, total: int, loaded: int) -> float:
    """Seconds of one prompt. Each new token has a fixed cost, and one for each token before it."""
    pairs = (total**2 - cached**2) / 2
    computing = _PER_TOKEN_S * (total - cached) + _PER_TOKEN_PAIR_S * pairs
    return max(computing, loaded / _LOAD_TOKENS_PER_S) + _PER_REQUEST_S


def best_hits(args: argparse.Namespace, order: str, seed: int) -> dict[str, float]:
    """Hit rates of Belady's choice with L1, with L2, with both, and without a limit."""
    pages_of_turn = args.request_length // args.page_size
    talk = Talk(args, order, seed)
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


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    torch.set_num_threads(1)
    emit({"benchmark": "simulate_turns", **provenance(), **vars(args)}, args.output_file)
    bar = tqdm(total=len(args.orders) * len(Arrangement) * len(args.policies), disable=None)
    for order in args.orders:
        best = [best_hits(args, order, seed) for seed in _SEEDS]
        base = None
        for arrangement in Arrangement:
            for policy in args.policies:
                runs = [replay(args, order, arrangement, policy, seed) for seed in _SEEDS]
                means = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
                base = base or means
                record: dict[str, Any] = {
                    "order": order, "arrangement": arrangement.value, "policy": policy,
                    **{key: round(value, 4) for key, value in means.items()},
                    "over_l1_alone": round(base["seconds"] / means["seconds"], 3),
                }  # fmt: skip
                bar.update()
                with bar.external_write_mode(file=sys.stdout):
                    emit(record, args.output_file)
        means = {key: round(statistics.mean(one[key] for one in best), 4) for key in best[0]}
        with bar.external_write_mode(file=sys.stdout):
            emit({"order": order, "best_hit_rates": means}, args.output_file)
    bar.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
