"""L2 as a cache beside L2 as a buffer: hit rates by tier and mean TTFT, by the size of L2.

A trace and the conversations of `simulate turns`, on the real tree. L3 has every page that was ever
computed. A buffer keeps no page: prompts are found in L1 and L3 alone. `buffer_pages` bounds the
parts in which they are read. Each part costs a look-up and a tick beside its bytes. A read that
would take longer than computing does not begin. One thread reads, one device computes, in the order
of arrival. Computing takes an H200's times with Qwen3-8B's shape; writes cost nothing.

Lengths of the trace are divided by `--scale` for the tree alone, with pages as much shorter: times
are those of the whole lengths. About 3 minutes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from benchmark.command import Command, Refused
from benchmark.report import Report
from benchmark.simulate.talk import SEEDS, Talk, request_seconds
from benchmark.simulate.trace import EXCERPT
from rigs.bench.cache_simulation import Arrangement, CacheSizes, SimulatedCache, TracePrompts
from rigs.bench.page_trace import page_trace_of
from sglang.benchmark.workload import TraceScale, read_trace
from sglang.srt.mem_cache.tree.radix_key import TokenArray

_PAGE: Final = 64
"""Tokens of a page, of whole lengths."""
_TOKEN_BYTES: Final = 147456
_PART_S: Final = 0.003
"""Seconds of a part's look-up and tick."""
_PART_SHARE: Final = 4
"""A part has at most this fraction of a buffer."""
_MARGIN: Final = 1.25
_SLACK_S: Final = 0.01
_CLIENTS, _ROUNDS, _TURN = 20, 10, 2048


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset-path", default=str(EXCERPT), help="a trace, JSON lines")
    parser.add_argument("--num-prompts", type=int, help="number of requests, from the first one")
    parser.add_argument("--scale", type=int, default=8, help="divisor of the prompts' lengths")
    parser.add_argument(
        "--time", type=float, default=3.0, help="factor of the times between requests"
    )
    parser.add_argument("--l1", type=float, default=0.1, help="share of the working set")
    parser.add_argument(
        "--l2", type=float, nargs="+", default=[0.1, 0.2, 0.5], help="shares of the working set"
    )
    parser.add_argument("--buffer-pages", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--read-gb-s", type=float, nargs="+", default=[2.0, 10.0, 25.0])


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt. Lengths are whole tokens."""

    arrival: float
    """Seconds."""
    device: int
    host: int
    store: int
    """Further tokens that L3 has."""
    total: int


@dataclass(slots=True, kw_only=True)
class Line:
    """What is ahead of a request: the ends of the reads and computations that came before."""

    read_gb_s: float
    part_tokens: int | None
    """Tokens of a part of a read; None: reads have one part."""
    reader: float = 0.0
    device: float = 0.0
    read_tokens: int = 0

    def first_token(self, one: Request) -> float:
        """Seconds from the arrival of `one` to its first token."""
        known, store = one.device + one.host, one.store
        seconds = store * _TOKEN_BYTES / (self.read_gb_s * 1e9) + _PART_S
        if self.part_tokens is not None:
            seconds += _PART_S * (store // self.part_tokens)
        saved = request_seconds(known, one.total, one.host) - request_seconds(
            known + store, one.total, one.host
        )
        ready = one.arrival
        if store and seconds <= _MARGIN * saved + _SLACK_S:
            ready = self.reader = max(one.arrival, self.reader) + seconds
            self.read_tokens += store
        else:
            store = 0
        loaded = one.host + (store if self.part_tokens is None else min(store, self.part_tokens))
        begin = max(ready, self.device)
        self.device = begin + request_seconds(known + store, one.total, loaded)
        return self.device - one.arrival


def make_cache(l1_pages: int, l2_pages: int, page: int) -> SimulatedCache:
    return SimulatedCache(
        CacheSizes(l1_pages=l1_pages, l2_pages=l2_pages),
        page_size=page,
        policy="lru",
        arrangement=Arrangement.WRITE_THROUGH if l2_pages else Arrangement.ONE_TIER,
    )


def trace_requests(args: argparse.Namespace, l2: float) -> Iterator[Request]:
    """The requests of the trace; L2 has the share `l2` of the working set, 0: it keeps nothing."""
    scale = TraceScale(length=1 / args.scale)
    page = _PAGE // args.scale
    trace = read_trace(args.dataset_path, args.num_prompts)
    prompts = TracePrompts(trace, scale, page)
    pages = page_trace_of(trace, scale, page).num_pages
    l1_pages = max(prompts.longest_pages, round(args.l1 * pages))
    cache = make_cache(l1_pages, round(l2 * pages), page)
    seen: set[int] = set()
    for one, (ids, _) in zip(trace, prompts, strict=True):
        blocks = next(
            (at for at, block in enumerate(one.hash_ids) if block not in seen), len(one.hash_ids)
        )
        seen.update(one.hash_ids)
        device, host = cache.serve(ids)
        stored = min(blocks * scale.block_tokens, (len(ids) - 1) // page * page)
        store = max(0, stored - device - host)
        yield Request(
            args.time * one.timestamp_ms / 1e3,
            *(n * args.scale for n in (device, host, store, len(ids))),
        )
    cache.close()


def talk_requests(args: argparse.Namespace, l2: float, seed: int) -> Iterator[Request]:
    """The conversations, each request sent when the one before was answered."""
    working_set = _CLIENTS * _ROUNDS * _TURN // _PAGE
    cache = make_cache(round(args.l1 * working_set), round(l2 * working_set), _PAGE)
    rng = np.random.default_rng(1)
    texts: TokenArray = rng.integers(0, 1 << 17, (_CLIENTS, _ROUNDS * _TURN), dtype=np.uint32)
    talk = Talk("4:random", seed, clients=_CLIENTS, rounds=_ROUNDS)
    while talk.send() or talk.waiting:
        client, turn = talk.waiting[0]
        total = (turn + 1) * _TURN
        device, host = cache.serve(texts[client][:total])
        talk.served()
        store = max(0, turn * _TURN - device - host)
        # Alone: the next one comes when this one was answered.
        yield Request(1e6 * len(texts) * (turn + 1), device, host, store, total)
    cache.close()


def add_figures(
    report: Report, args: argparse.Namespace, case: dict[str, object], runs: list[list[Request]],
    buffer_pages: int | None, *, in_turn: bool,
) -> None:  # fmt: skip
    total = sum(one.total for run in runs for one in run)
    for gb_s in args.read_gb_s:
        part = None if buffer_pages is None else max(1, buffer_pages // _PART_SHARE) * _PAGE
        times: list[float] = []
        read = 0
        for requests in runs:
            line = Line(read_gb_s=gb_s, part_tokens=part)
            for one in requests:
                if not in_turn:
                    line.reader = line.device = one.arrival
                times.append(line.first_token(one))
            read += line.read_tokens
        here = {**case, "read_gb_s": gb_s}
        shares = {
            "device_hit_rate": sum(one.device for run in runs for one in run) / total,
            "host_hit_rate": sum(one.host for run in runs for one in run) / total,
            "storage_hit_rate": read / total,
        }
        report.add_all("share", shares, here)
        report.add("ttft_mean", statistics.mean(times), "s", here)
        report.add("ttft_p90", float(np.quantile(times, 0.9)), "s", here)


def run(args: argparse.Namespace, report: Report) -> None:
    torch.set_num_threads(1)
    if args.scale < 1 or _PAGE % args.scale:
        raise Refused(f"--scale {args.scale}: it must divide {_PAGE}")
    for load in ("trace", "conversations"):
        for l2 in (0.0, *args.l2):
            in_turn = load == "trace"
            runs = (
                [list(trace_requests(args, l2))]
                if in_turn
                else [list(talk_requests(args, l2, seed)) for seed in SEEDS]
            )
            sizes: list[int | None] = [None] if l2 else args.buffer_pages
            for pages in sizes:
                case: dict[str, object] = {"load": load}
                case |= {"l2": l2} if pages is None else {"buffer_pages": pages}
                add_figures(report, args, case, runs, pages, in_turn=in_turn)


COMMAND: Final = Command(
    run=run,
    add_options=add_options,
    quick={"num_prompts": 100, "l1": 0.5, "l2": [0.5], "buffer_pages": [64], "read_gb_s": [10.0]},
)
