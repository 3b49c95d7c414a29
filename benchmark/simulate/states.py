"""Hit rates of a model with recurrent states, by the division of memory.

The model can use a prefix only if the cache has the pages of the prefix and a snapshot of the state
at its end. The replays have two parts.

- `sizes`: L1 has a fraction of the pages and a fraction of the snapshots of an unlimited cache.
  Compared with that, and with a dense model and as many pages. `write_through` adds L2.
- `division`: L1 has the memory of a fraction of the pages. `state_pages` is the memory of one state
  in pages, `memory_ratio` the bytes of states for each byte of pages, `per_path` the value of
  `--mamba-max-states-per-path`. Compared with a dense model
  that has all of the memory for pages. A division that cannot hold the longest request has no
  figure but `fits`. Snapshots are the first of `--alignments` apart, or more.
Hit rates are shares of the whole pages of all prompts. Requests are served one after the other and
answers are not cached. `--copies` lets several groups of users send the trace at once, each group
with its own prompts: there are more pages, and the longest prompt is a smaller part of them. Takes
about 3 minutes. `simulate snapshots` covers snapshots of answers.
"""

from __future__ import annotations

import argparse
import itertools
import math
from typing import Any, Final

import torch

from benchmark.command import Command, Refused
from benchmark.report import Report
from benchmark.simulate.trace import EXCERPT
from rigs.bench.cache_simulation import (
    Arrangement,
    CacheSizes,
    ReplayResult,
    TracePrompts,
    replay,
)
from rigs.bench.page_trace import page_trace_of, several
from rigs.bench.state_simulation import (
    MIN_STATES,
    SimulatedStateCache,
    StateSettings,
    divide_memory,
)
from sglang.benchmark.workload import TraceScale, read_trace

_ARRANGEMENTS: Final = (Arrangement.ONE_TIER, Arrangement.WRITE_THROUGH)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dataset-path", default=str(EXCERPT), help="a trace, JSON lines")
    add("--num-prompts", type=int, help="number of requests, from the first one")
    add("--copies", type=int, default=5, help="groups of users that send the trace")
    add("--scale", type=float, default=1.0, help="divisor of the prompts' lengths")
    add("--page-size", type=int, default=64)
    add("--chunked-prefill-size", type=int, default=8192)
    add("--fractions", type=float, nargs="+", default=[0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0])
    add("--alignments", type=int, nargs="+", default=[64, 256, 1024])
    add("--hicache-ratio", type=float, default=2.0, help="pages of L2 per page of L1")
    add("--state-pages", type=int, nargs="+", default=[16, 64, 256])
    add("--memory-ratios", type=float, nargs="+", default=[0.1, 0.3, 0.9, 2.0])
    add("--max-states-per-path", type=int, nargs="+", default=[-1], help="of `division`; -1: none")


class TraceReplays:
    """Replays of one trace with caches of different sizes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        scale = TraceScale(length=1 / args.scale)
        trace = several(read_trace(args.dataset_path, args.num_prompts), args.copies)
        pages = page_trace_of(trace, scale, args.page_size)
        self._prompts = TracePrompts(trace, scale, args.page_size)
        self._dense: dict[tuple[int, Arrangement], float] = {}
        self.num_requests = len(trace)
        self.num_pages = pages.num_pages
        self.longest_pages = pages.longest_pages + 1  # Its last page may be a part of one.
        least = self.longest_pages / self.num_pages
        if min(args.fractions) < least:
            raise Refused(
                f"--fractions {min(args.fractions):g}: of {self.num_pages} pages that is less than "
                f"the longest request's {self.longest_pages}; begin at "
                f"{math.ceil(least * 100) / 100:g}, or raise --copies"
            )

    def pages_of(self, fraction: float) -> int:
        """A fraction of the working set."""
        return max(self.longest_pages, round(fraction * self.num_pages))

    def once(
        self, l1_pages: int, states: StateSettings | None, arrangement: Arrangement
    ) -> dict[str, Any]:
        """Hit rates and counts of one replay. `states` is None for a dense model."""
        l2_pages = round(l1_pages * self._args.hicache_ratio)
        one_tier = arrangement is Arrangement.ONE_TIER
        cache = SimulatedStateCache(
            CacheSizes(l1_pages=l1_pages, l2_pages=0 if one_tier else l2_pages),
            states,
            page_size=self._args.page_size,
            arrangement=arrangement,
            max_tokens=self.longest_pages * self._args.page_size,
            chunk_tokens=self._args.chunked_prefill_size,
        )
        result = ReplayResult()
        for result in replay(cache, self._prompts):  # noqa: B007
            pass
        cache.close()
        return {
            "l1_pages": l1_pages,
            **rates(result),
            "snapshots": cache.snapshots_kept,
            "states_in_l1": cache.states_in_l1,
        }

    def dense(self, l1_pages: int, arrangement: Arrangement = Arrangement.ONE_TIER) -> float:
        """The hit rate of a dense model."""
        key = l1_pages, arrangement
        if key not in self._dense:
            self._dense[key] = self.once(l1_pages, None, arrangement)["hit_rate"]
        return self._dense[key]

    def unlimited(self, alignment: int) -> dict[str, Any]:
        """A cache that never evicts."""
        # Requests may end with a part of a page each.
        pages = self.num_pages + self.longest_pages
        at_most = pages * self._args.page_size // alignment + self.num_requests + MIN_STATES
        settings = StateSettings(num_states=at_most, alignment=alignment)
        return self.once(pages, settings, Arrangement.ONE_TIER)


def rates(result: ReplayResult) -> dict[str, float]:
    """Hit rates by tier, as shares of the whole pages of all prompts."""
    tokens = result.page_tokens
    return {
        "device_hit_rate": result.device_tokens / tokens,
        "host_hit_rate": result.host_tokens / tokens,
        "hit_rate": result.hit_tokens / tokens,
    }


def add_replay(report: Report, case: dict[str, Any], found: dict[str, Any]) -> None:
    """Figures of a replay: hit rates as shares, all else as counts."""
    for name, value in found.items():
        report.add(name, value, "share" if name.endswith("_rate") else "count", case)


def sizes(args: argparse.Namespace, trace: TraceReplays, report: Report) -> None:
    """Fractions of the pages and of the snapshots that an unlimited cache holds."""
    for alignment in args.alignments:
        unlimited = trace.unlimited(alignment)
        aligned = {"part": "sizes", "alignment": alignment}
        add_replay(report, {**aligned, "fraction": "unlimited"}, unlimited)
        for arrangement in _ARRANGEMENTS:
            for fraction in args.fractions:
                pages = trace.pages_of(fraction)
                num_states = max(MIN_STATES, round(fraction * unlimited["states_in_l1"]))
                states = StateSettings(num_states=num_states, alignment=alignment)
                found = {
                    "l1_states": num_states,
                    **trace.once(pages, states, arrangement),
                    "dense_hit_rate": trace.dense(pages, arrangement),
                }
                case = {**aligned, "arrangement": arrangement, "fraction": fraction}
                add_replay(report, case, found)


def division(args: argparse.Namespace, trace: TraceReplays, report: Report) -> None:
    """The memory of a fraction of the pages, divided in different ways."""
    kinds = args.state_pages, args.memory_ratios, args.max_states_per_path
    for fraction in args.fractions:
        total = trace.pages_of(fraction)
        for cost, ratio, limit in itertools.product(*kinds):
            case = {
                "part": "division",
                "fraction": fraction,
                "state_pages": cost,
                "memory_ratio": ratio,
                "per_path": limit,
            }
            divided = divide_memory(
                total, ratio=ratio, state_pages=cost, longest_pages=trace.longest_pages
            )
            report.add("fits", divided is not None, "yes or no", case)
            if divided is None:
                continue
            pages, num_states = divided
            states = StateSettings(
                num_states=num_states, alignment=args.alignments[0], max_per_path=limit
            )
            found = {
                "l1_states": num_states,
                **trace.once(pages, states, Arrangement.ONE_TIER),
                "dense_hit_rate": trace.dense(total),
            }
            add_replay(report, case, found)


def run(args: argparse.Namespace, report: Report) -> None:
    if any(one % args.page_size for one in [*args.alignments, args.chunked_prefill_size]):
        raise Refused("--alignments and --chunked-prefill-size: whole pages each")
    torch.set_num_threads(1)
    try:
        trace = TraceReplays(args)
    except ValueError as error:
        raise Refused(str(error)) from None
    report.add("requests", trace.num_requests, "count")
    report.add("working_set", trace.num_pages, "pages")
    report.add("longest_request", trace.longest_pages, "pages")
    unlimited = trace.dense(trace.num_pages + trace.longest_pages)
    report.add("dense_hit_rate", unlimited, "share", {"fraction": "unlimited"})
    sizes(args, trace, report)
    division(args, trace, report)


_QUICK: Final = {
    "num_prompts": 30,
    "copies": 1,
    "scale": 8.0,
    "fractions": [1.0],
    "alignments": [64],
    "state_pages": [16],
    "memory_ratios": [0.9],
}
COMMAND: Final = Command(run=run, add_options=add_options, quick=_QUICK)
