"""Hit rates of a request trace, by size, eviction policy and arrangement of tiers.

For each arrangement of tiers, each size (L1 and L2 together, as a fraction of the trace's working
set) and each eviction policy: the share of the prompts that L1 and L2 had, compared with an
unlimited cache and with Belady's choice for one tier of the same size. Requests are served one
after the other and answers are not cached, so that the figures depend only on the cache.

About 2 minutes for the whole synthetic trace at the default scale on a shared core. It stops
between replays after `--max-seconds`, reports that, and exits with 1.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmark.command import Command, Failed, Refused
from benchmark.report import Report
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
from sglang.benchmark.report import writable_file
from sglang.benchmark.workload import TraceRequest, TraceScale, read_trace

_POLICIES = ("lru", "lfu", "fifo", "slru")
_FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
EXCERPT = Path(__file__).parents[1] / "data" / "mooncake_synthetic_excerpt.jsonl"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset-path", default=str(EXCERPT), help="a trace, JSON lines")
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
    parser.add_argument("--plot", type=writable_file, help="write a PNG here")
    parser.add_argument("--max-seconds", type=float, default=600.0)


def check_fractions(fractions: Sequence[float], pages: PageTrace) -> None:
    """Raise Refused if a cache cannot hold the longest request."""
    if any(not 0 < fraction <= 1 for fraction in fractions):
        raise Refused("--fractions: each must be in (0, 1]")
    least = pages.longest_pages / pages.num_pages
    if min(fractions) < least:
        raise Refused(
            f"--fractions {min(fractions):g}: of {pages.num_pages} pages that is less than the "
            f"longest request's {pages.longest_pages}; begin at {math.ceil(least * 100) / 100:g}"
        )


def add_trace(
    report: Report, args: argparse.Namespace, trace: list[TraceRequest], pages: PageTrace
) -> dict[str, float]:
    """Report figures of the trace itself, and return them."""
    references = sum(len(request.pages) for request in pages.requests)
    case = {"trace": Path(args.dataset_path).name}
    counts = {
        "requests": len(trace),
        "page_references": references,
        "working_set_pages": pages.num_pages,
        "longest_request_pages": pages.longest_pages,
    }
    unlimited = unlimited_hits(pages).hit_pages / references
    report.add_all("count", counts, case)
    report.add("unlimited_hit_rate", unlimited, "share", case)
    return {**counts, "unlimited_hit_rate": unlimited}


def replays(
    args: argparse.Namespace, prompts: TracePrompts, facts: dict[str, float], pages: PageTrace
) -> Iterator[dict[str, Any]]:
    """A record of each replay. Raises Failed after `--max-seconds`."""
    started = time.monotonic()
    belady: dict[float, float] = {}
    for arrangement, fraction, policy in itertools.product(
        args.arrangements, args.fractions, args.policies
    ):
        if time.monotonic() - started > args.max_seconds:
            raise Failed("stopped after --max-seconds; the missing replays were not run")
        size = max(1, round(fraction * pages.num_pages))
        if fraction not in belady:
            belady[fraction] = belady_hits(pages, size).hit_pages / facts["page_references"]
        record = replay_once(args, prompts, arrangement, size, policy)
        yield {
            "fraction": fraction,
            **record,
            "belady_hit_rate": belady[fraction],
            "behind_belady": belady[fraction] - record["hit_rate"],
        }


def replay_once(
    args: argparse.Namespace,
    prompts: TracePrompts,
    arrangement: Arrangement,
    size: int,
    policy: str,
) -> dict[str, Any]:
    """Run one replay. Returns hit rates by tier, as shares of the whole pages of all prompts."""
    sizes = CacheSizes.divide(
        size, arrangement, ratio=args.hicache_ratio, longest_pages=prompts.longest_pages
    )
    cache = SimulatedCache(sizes, page_size=args.page_size, policy=policy, arrangement=arrangement)
    result = ReplayResult()
    for result in replay(cache, prompts):  # noqa: B007
        pass
    cache.close()
    tokens = result.page_tokens
    return {
        "arrangement": arrangement.value,
        "policy": policy,
        "l1_pages": sizes.l1_pages,
        "l2_pages": sizes.l2_pages,
        "device_hit_rate": result.device_tokens / tokens,
        "host_hit_rate": result.host_tokens / tokens,
        "hit_rate": result.hit_tokens / tokens,
        "seconds": result.seconds,
    }


def add_replay(report: Report, record: dict[str, Any], unlimited: float) -> None:
    case = {name: record[name] for name in ("arrangement", "fraction", "policy")}
    report.add_all("pages", {name: record[name] for name in ("l1_pages", "l2_pages")}, case)
    rates = ("device_hit_rate", "host_hit_rate", "hit_rate", "belady_hit_rate", "behind_belady")
    report.add_all("share", {name: record[name] for name in rates}, case)
    of_unlimited = record["hit_rate"] / unlimited if unlimited else None
    report.add_all("ratio", {"of_unlimited": of_unlimited}, case)
    report.add("replay_time", record["seconds"], "s", case)


def run(args: argparse.Namespace, report: Report) -> None:
    torch.set_num_threads(1)
    scale = TraceScale(length=1 / args.scale)
    try:
        trace = read_trace(args.dataset_path, args.num_prompts)
    except ValueError as error:
        raise Refused(str(error)) from None
    if "priority" in args.policies and len({one.priority for one in trace}) < 2:
        raise Refused(
            "--policies priority: the trace has no priorities, so it would be lru; add a "
            '"priority" to its lines'
        )
    pages = page_trace_of(trace, scale, args.page_size)
    check_fractions(args.fractions, pages)
    facts = add_trace(report, args, trace, pages)
    prompts = TracePrompts(trace, scale, args.page_size)
    records: list[dict[str, Any]] = []
    try:
        for record in replays(args, prompts, facts, pages):
            add_replay(report, record, facts["unlimited_hit_rate"])
            records.append(record)
    finally:
        if args.plot and records:
            from benchmark.simulate.trace_plot import draw  # Loads matplotlib.

            draw({**vars(args), **facts}, records, args.plot)


_QUICK: Final = {"num_prompts": 100, "fractions": [1.0], "policies": ["lru"]}
COMMAND: Final = Command(run=run, add_options=add_options, quick=_QUICK)
