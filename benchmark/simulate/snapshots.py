"""Costs and benefits of snapshots of answers for models with recurrent states.

The conversations are those of `simulate turns`, with answers that become part of the next
prompt. While it decodes, a request leaves a snapshot every `--intervals` tokens (0: none, as with
`--mamba-scheduler-strategy no_buffer`). L1 has the memory of a fraction of all pages, divided
between pages and states; `state_pages` is the memory of one state in pages, `per_path` is
`--mamba-max-states-per-path`. Eviction considers the server's queue.

For each: the hit rate as a share of the whole pages of all
prompts, the snapshots that the tree took over, and how many of them were evicted; means over three
random orders. `unlimited` is a cache that never evicts. `dense_hit_rate` is the hit rate of a model
without states, with all of the memory for pages. About a minute.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from typing import Any, Final

import numpy as np
import torch

from benchmark.command import Command, Refused
from benchmark.report import Report
from benchmark.simulate.talk import SEEDS, Talk, replay_talk
from rigs.bench.cache_simulation import Arrangement, CacheSizes, ReplayResult
from rigs.bench.state_simulation import SimulatedStateCache, StateSettings, divide_memory


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--num-clients", type=int, default=20)
    add("--num-rounds", type=int, default=10)
    add("--request-length", type=int, default=500, help="new prompt tokens of a round")
    add("--output-length", type=int, default=1000, help="tokens of an answer")
    add("--page-size", type=int, default=64)
    add("--chunked-prefill-size", type=int, default=8192)
    add("--alignment", type=int, default=64, help="tokens between possible snapshots")
    add("--intervals", type=int, nargs="+", default=[0, 64, 256, 1024])
    add("--max-states-per-path", type=int, nargs="+", default=[-1, 1, 2, 3], help="-1: no limit")
    add("--fractions", type=float, nargs="+", default=[0.2, 0.5, 1.0])
    add("--state-pages", type=int, nargs="+", default=[16, 64])
    add("--memory-ratio", type=float, default=0.9, help="bytes of states per byte of pages")
    add("--order", default="4:random", help="as in `simulate turns`")
    add("--enable-round-barrier", action="store_true")


class Conversations:
    """Replays of the same conversations with caches of different sizes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        turn = args.request_length + args.output_length
        self.longest_pages = -(-turn * args.num_rounds // args.page_size)
        self.num_pages = self.longest_pages * args.num_clients
        rng = np.random.default_rng(1)
        shape = args.num_clients, args.num_rounds * turn
        self._texts = rng.integers(0, 1 << 17, shape, dtype=np.uint32)

    def replay(self, pages: int, states: StateSettings | None) -> dict[str, float]:
        """Hit rate and counts, means over the orders. `states` is None for a dense model."""
        runs = [self._replay_order(pages, states, seed) for seed in SEEDS]
        return {key: statistics.mean(run[key] for run in runs) for key in runs[0]}

    def _talk(self, seed: int) -> Talk:
        args = self._args
        return Talk(
            args.order,
            seed,
            clients=args.num_clients,
            rounds=args.num_rounds,
            barrier=args.enable_round_barrier,
        )

    def _replay_order(
        self, pages: int, states: StateSettings | None, seed: int
    ) -> dict[str, float]:
        args = self._args
        cache = SimulatedStateCache(
            CacheSizes(l1_pages=pages, l2_pages=0),
            states,
            page_size=args.page_size,
            arrangement=Arrangement.ONE_TIER,
            max_tokens=self.longest_pages * args.page_size,
            chunk_tokens=args.chunked_prefill_size,
        )
        result = ReplayResult()
        lengths = args.request_length, args.output_length
        for one in replay_talk(cache, self._talk(seed), self._texts, *lengths):
            result.device_tokens += one.device
            result.page_tokens += one.prompt // args.page_size * args.page_size
        cache.close()
        return {
            "hit_rate": result.hit_tokens / result.page_tokens,
            "snapshots": cache.snapshots_kept,
            "states_evicted": cache.snapshots_kept - cache.states_in_l1,
        }


def add_replay(report: Report, case: dict[str, Any], found: dict[str, float]) -> None:
    report.add("hit_rate", found["hit_rate"], "share", case)
    counts = {name: found[name] for name in ("snapshots", "states_evicted")}
    report.add_all("count", counts, case)


def measure(args: argparse.Namespace, talks: Conversations, report: Report) -> None:
    """All replays."""

    def settings(num_states: int, interval: int, limit: int = -1) -> StateSettings:
        return StateSettings(
            num_states=num_states,
            alignment=args.alignment,
            track_interval=interval,
            max_per_path=limit,
        )

    # No two snapshots of a conversation have the same position.
    most = talks.num_pages * args.page_size // args.alignment + 3
    for interval in args.intervals:
        found = talks.replay(talks.num_pages, settings(most, interval))
        add_replay(report, {"interval": interval, "fraction": "unlimited"}, found)
    for fraction in args.fractions:
        total = round(fraction * talks.num_pages)
        if total < talks.longest_pages:
            raise Refused(f"--fractions {fraction:g}: less than the longest conversation")
        dense = talks.replay(total, None)["hit_rate"]
        report.add("dense_hit_rate", dense, "share", {"fraction": fraction})
        for cost in args.state_pages:
            case = {"fraction": fraction, "state_pages": cost}
            divided = divide_memory(
                total,
                ratio=args.memory_ratio,
                state_pages=cost,
                longest_pages=talks.longest_pages,
            )
            report.add("fits", divided is not None, "yes or no", case)
            if divided is None:
                continue
            pages, states = divided
            report.add_all("count", {"l1_pages": pages, "l1_states": states}, case)
            for interval, limit in itertools.product(args.intervals, args.max_states_per_path):
                found = talks.replay(pages, settings(states, interval, limit))
                add_replay(report, {**case, "interval": interval, "per_path": limit}, found)


def run(args: argparse.Namespace, report: Report) -> None:
    if args.alignment % args.page_size or args.chunked_prefill_size % args.page_size:
        raise Refused("--alignment and --chunked-prefill-size: whole pages each")
    if any(interval % args.alignment for interval in args.intervals):
        raise Refused(f"--intervals: multiples of {args.alignment} tokens")
    torch.set_num_threads(1)
    talks = Conversations(args)
    report.add("working_set", talks.num_pages, "pages")
    measure(args, talks, report)


_QUICK: Final = {
    "num_clients": 4,
    "num_rounds": 4,
    "request_length": 100,
    "output_length": 200,
    "intervals": [0, 64],
    "max_states_per_path": [-1, 1],
    "fractions": [0.5],
    "state_pages": [4],
}
COMMAND: Final = Command(run=run, add_options=add_options, quick=_QUICK)
