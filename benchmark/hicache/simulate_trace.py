"""Hit rates of the prefix cache for a request trace, on the real tree and allocators, no model.

    python benchmark/hicache/simulate_trace.py --dataset-path mooncake_synthetic_trace.jsonl \\
        [--fractions 0.01 0.1 1] [--policies lru slru] [--arrangements one_tier write_back] \\
        [--scale 8] [--output-file hits.jsonl] [--plot hits.png] [--max-seconds 600]

For each arrangement of tiers, each size (L1 and L2 together, as a fraction of the trace's working
set) and each eviction policy: the share of the prompts that L1 and L2 had, compared with an
unlimited cache and with Belady's choice for one tier of the same size. Prints JSON lines: first the
run (command, commit, machine, trace), then one for each replay. Requests are served one after the
other and answers are not cached, so that the figures depend only on the cache.

About 2 minutes for the whole synthetic trace at the default scale on a shared core. It stops
between replays after `--max-seconds`, reports that, and exits with 1.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from plot_trace import draw
from tqdm import tqdm

from rigs.bench.belady import belady_hits, unlimited_hits
from rigs.bench.cache_simulation import (
    Arrangement,
    CacheSizes,
    ReplayResult,
    SimulatedCache,
    TracePrompts,
    replay,
)
from rigs.bench.page_trace import PageTrace, page_trace_of
from sglang.benchmark.mooncake_trace import TraceRequest, TraceScale, read_trace
from sglang.benchmark.report import append, emit, provenance, writable_file

_POLICIES = ("lru", "lfu", "fifo", "slru")
_FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_EXCERPT = Path(__file__).parents[1] / "data" / "mooncake_synthetic_excerpt.jsonl"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset-path", default=str(_EXCERPT), help="a trace, JSON lines")
    parser.add_argument("--num-prompts", type=int, help="number of requests, from the first one")
    parser.add_argument("--scale", type=float, default=8.0, help="divisor of the prompts' lengths")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--fractions", type=float, nargs="+", default=_FRACTIONS)
    parser.add_argument(
        "--policies", nargs="+", default=_POLICIES, choices=[*_POLICIES, "priority"]
    )
    parser.add_argument(
        "--arrangements",
        nargs="+",
        default=list(Arrangement),
        type=Arrangement,
        choices=list(Arrangement),
    )
    parser.add_argument(
        "--hicache-ratio", type=float, default=2.0, help="pages of L2 per page of L1"
    )
    parser.add_argument("--output-file", type=writable_file, help="also append the JSON lines here")
    parser.add_argument("--plot", type=writable_file, help="write a PNG here")
    parser.add_argument("--max-seconds", type=float, default=600.0)
    parser.add_argument("--disable-tqdm", action="store_true")
    args = parser.parse_args(argv)
    if any(not 0 < fraction <= 1 for fraction in args.fractions):
        parser.error("--fractions: each must be in (0, 1]")
    return args


def check_fractions(fractions: Sequence[float], pages: PageTrace) -> None:
    """Raise ValueError if a cache cannot hold the longest request."""
    least = pages.longest_pages / pages.num_pages
    if min(fractions) < least:
        raise ValueError(
            f"--fractions {min(fractions):g}: of {pages.num_pages} pages that is less than the "
            f"longest request's {pages.longest_pages}; begin at {math.ceil(least * 100) / 100:g}"
        )


def run_header(
    args: argparse.Namespace, trace: list[TraceRequest], pages: PageTrace
) -> dict[str, Any]:
    """The line that describes the run and its trace."""
    total = sum(len(request.pages) for request in pages.requests)
    return {
        "benchmark": "simulate_trace",
        **provenance(),
        "trace": Path(args.dataset_path).name,
        "requests": len(trace),
        "scale": args.scale,
        "page_size": args.page_size,
        "hicache_ratio": args.hicache_ratio,
        "page_references": total,
        "working_set_pages": pages.num_pages,
        "longest_request_pages": pages.longest_pages,
        "unlimited_hit_rate": round(unlimited_hits(pages).hit_pages / total, 4),
    }


def simulate(
    args: argparse.Namespace, prompts: TracePrompts, header: dict[str, Any], pages: PageTrace
) -> tuple[list[dict[str, Any]], bool]:
    """Run all replays. Returns their records, and whether the time sufficed."""
    plan = list(itertools.product(args.arrangements, args.fractions, args.policies))
    started = time.monotonic()
    records: list[dict[str, Any]] = []
    belady: dict[float, float] = {}
    bar = tqdm(total=len(plan) * len(prompts), unit="req", disable=args.disable_tqdm or None)
    with bar:
        for arrangement, fraction, policy in plan:
            if time.monotonic() - started > args.max_seconds:
                return records, False
            bar.set_description(f"{arrangement} {fraction:.0%} {policy}")
            size = max(1, round(fraction * pages.num_pages))
            if fraction not in belady:
                belady[fraction] = belady_hits(pages, size).hit_pages / header["page_references"]
            record = replay_once(args, prompts, arrangement, size, policy, bar)
            record |= compare(record, header["unlimited_hit_rate"], belady[fraction])
            records.append({"fraction": fraction, **record})
            with bar.external_write_mode(file=sys.stdout):
                emit(records[-1], args.output_file)
    return records, True


def replay_once(
    args: argparse.Namespace,
    prompts: TracePrompts,
    arrangement: Arrangement,
    size: int,
    policy: str,
    bar: tqdm,
) -> dict[str, Any]:
    """Run one replay. Returns hit rates by tier, as shares of the whole pages of all prompts."""
    sizes = CacheSizes.divide(
        size, arrangement, ratio=args.hicache_ratio, longest_pages=prompts.longest_pages
    )
    cache = SimulatedCache(sizes, page_size=args.page_size, policy=policy, arrangement=arrangement)
    result = ReplayResult()
    for so_far in replay(cache, prompts):
        result = so_far
        bar.update()
    cache.close()
    tokens = result.page_tokens
    return {
        "arrangement": arrangement.value,
        "policy": policy,
        "l1_pages": sizes.l1_pages,
        "l2_pages": sizes.l2_pages,
        "device_hit_rate": round(result.device_tokens / tokens, 4),
        "host_hit_rate": round(result.host_tokens / tokens, 4),
        "hit_rate": round(result.hit_tokens / tokens, 4),
        "seconds": round(result.seconds, 2),
    }


def compare(record: dict[str, Any], unlimited: float, belady: float) -> dict[str, Any]:
    """Compare a hit rate with those of the unlimited and of the clairvoyant cache."""
    return {
        "of_unlimited": round(record["hit_rate"] / unlimited, 4) if unlimited else None,
        "belady_hit_rate": round(belady, 4),
        "behind_belady": round(round(belady, 4) - record["hit_rate"], 4),
    }


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    torch.set_num_threads(1)
    try:
        scale = TraceScale(length=1 / args.scale)
        trace = read_trace(args.dataset_path, args.num_prompts)
        if "priority" in args.policies and len({one.priority for one in trace}) < 2:
            raise ValueError(
                "--policies priority: the trace has no priorities, so it would be lru; add a "
                '"priority" to its lines'
            )
        pages = page_trace_of(trace, scale, args.page_size)
        check_fractions(args.fractions, pages)
        header = run_header(args, trace, pages)
        emit(header, args.output_file)
        records, complete = simulate(
            args, TracePrompts(trace, scale, args.page_size), header, pages
        )
    except ValueError as error:
        print(f"simulate_trace: {error}", file=sys.stderr)
        return 2
    if args.plot and records:
        draw(header, records, args.plot)
    if not complete:
        left = "stopped after --max-seconds; the replays that are missing were not run"
        append({"incomplete": left}, args.output_file)
        print(f"simulate_trace: {left}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
