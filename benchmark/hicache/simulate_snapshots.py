"""Costs and benefits of snapshots of answers for models with recurrent states; runs no model.

    python benchmark/hicache/simulate_snapshots.py [--intervals 0 64 256 1024] \\
        [--fractions 0.2 0.5 1] [--state-pages 16 64] [--output-file snapshots.jsonl]

The conversations are those of `simulate_turns.py`, with answers that become part of the next
prompt. While it decodes, a request leaves a snapshot every `--intervals` tokens (0: none, as with
`--mamba-scheduler-strategy no_buffer`). L1 has the memory of a fraction of all pages, divided
between pages and states; `state_pages` is the memory of one state in pages. Eviction considers the
server's queue.

One JSON line for each, after one for the run: the hit rate as a share of the whole pages of all
prompts, the snapshots that the tree took over, and how many of them were evicted; means over three
random orders. `unlimited` is a cache that never evicts, `dense_hit_rate` that of a model without
states and all of the memory for pages. About 20 s.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from simulate_turns import Talk
from tqdm import tqdm

from rigs.bench.cache_simulation import Arrangement, CacheSizes, ReplayResult
from rigs.bench.state_simulation import SimulatedStateCache, StateSettings, divide_memory
from sglang.benchmark.report import emit, provenance, writable_file

_SEEDS: Final = (5, 6, 7)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--num-clients", type=int, default=20)
    add("--num-rounds", type=int, default=10)
    add("--request-length", type=int, default=500, help="new prompt tokens of a round")
    add("--output-length", type=int, default=1000, help="tokens of an answer")
    add("--page-size", type=int, default=64)
    add("--chunked-prefill-size", type=int, default=8192)
    add("--alignment", type=int, default=64, help="tokens between possible snapshots")
    add("--intervals", type=int, nargs="+", default=[0, 64, 256, 1024])
    add("--fractions", type=float, nargs="+", default=[0.2, 0.5, 1.0])
    add("--state-pages", type=int, nargs="+", default=[16, 64])
    add("--memory-ratio", type=float, default=0.9, help="bytes of states per byte of pages")
    add("--order", default="4:random", help="as in simulate_turns.py")
    add("--enable-round-barrier", action="store_true")
    add("--output-file", type=writable_file, help="also append the JSON lines here")
    args = parser.parse_args(argv)
    if args.alignment % args.page_size or args.chunked_prefill_size % args.page_size:
        parser.error("--alignment and --chunked-prefill-size: whole pages each")
    if any(interval % args.alignment for interval in args.intervals):
        parser.error(f"--intervals: multiples of {args.alignment} tokens")
    return args


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
        runs = [self._replay_order(pages, states, seed) for seed in _SEEDS]
        return {key: round(statistics.mean(run[key] for run in runs), 4) for key in runs[0]}

    def _replay_order(
        self, pages: int, states: StateSettings | None, seed: int
    ) -> dict[str, float]:
        args, texts = self._args, self._texts
        question, turn = args.request_length, args.request_length + args.output_length
        cache = SimulatedStateCache(
            CacheSizes(l1_pages=pages, l2_pages=0),
            states,
            page_size=args.page_size,
            arrangement=Arrangement.ONE_TIER,
            max_tokens=self.longest_pages * args.page_size,
            chunk_tokens=args.chunked_prefill_size,
        )
        talk, result, arrivals = Talk(args, args.order, seed), ReplayResult(), 0
        while True:
            for client, at in talk.send():
                cache.arrive(f"{client}-{at}", arrivals, texts[client][: at * turn + question])
                arrivals += 1
            if not talk.waiting:
                break
            client, at = talk.waiting[0]
            prompt = texts[client][: at * turn + question]
            answer = texts[client][len(prompt) : (at + 1) * turn]
            result.device_tokens += cache.serve_with_answer(prompt, answer, rid=f"{client}-{at}")[0]
            result.page_tokens += len(prompt) // args.page_size * args.page_size
            talk.served()
        cache.close()
        return {
            "hit_rate": result.hit_tokens / result.page_tokens,
            "snapshots": cache.snapshots_kept,
            "states_evicted": cache.snapshots_kept - cache.states_in_l1,
        }


def replays(args: argparse.Namespace, talks: Conversations) -> Iterator[dict[str, Any]]:
    """All records."""

    def settings(num_states: int, interval: int) -> StateSettings:
        return StateSettings(
            num_states=num_states, alignment=args.alignment, track_interval=interval
        )

    # No two snapshots of a conversation have the same position.
    most = talks.num_pages * args.page_size // args.alignment + 3
    for interval in args.intervals:
        found = talks.replay(talks.num_pages, settings(most, interval))
        yield {"interval": interval, "unlimited": found}
    for fraction in args.fractions:
        total = round(fraction * talks.num_pages)
        if total < talks.longest_pages:
            raise ValueError(f"--fractions {fraction:g}: less than the longest conversation")
        dense = talks.replay(total, None)["hit_rate"]
        for cost in args.state_pages:
            record = {"fraction": fraction, "state_pages": cost}
            divided = divide_memory(
                total,
                ratio=args.memory_ratio,
                state_pages=cost,
                longest_pages=talks.longest_pages,
            )
            if divided is None:
                yield {**record, "fits": False}
                continue
            record |= {"l1_pages": divided[0], "l1_states": divided[1]}
            for interval in args.intervals:
                found = talks.replay(divided[0], settings(divided[1], interval))
                yield {**record, "interval": interval, **found, "dense_hit_rate": dense}


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    torch.set_num_threads(1)
    talks = Conversations(args)
    header = {"benchmark": "simulate_snapshots", **provenance(), **vars(args)}
    emit({**header, "working_set_pages": talks.num_pages}, args.output_file)
    try:
        with tqdm(replays(args, talks), unit="replay", disable=None) as bar:
            for record in bar:
                with bar.external_write_mode(file=sys.stdout):
                    emit(record, args.output_file)
    except ValueError as error:
        print(f"simulate_snapshots: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
