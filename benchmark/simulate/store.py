"""Benefit of L3 for conversations, by its read rate.

The conversations of `simulate turns` on the real tree, with eviction that considers the queue.
One thread reads the store, prompt after prompt, in calls of 64 pages. One device computes prompts
one after the other; the next is the first in the queue that does not wait for the store. In `whole`
runs, requests wait for all reads. In `overtaken` runs, a read is cut if computing will be faster.
The engine's own rule decides this, with its estimates of both rates (`prefetch_cost.py`).

The `empty` store has only pages that were computed before; the `filled` one has all pages from the
start, as after an earlier server with the same conversations. Writing and HTTP cost nothing here.
Means over random orders; `none` is L1 and L2 without a store. 10 s.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from benchmark.command import Command
from benchmark.report import Report
from benchmark.simulate.talk import SEEDS, Talk, request_seconds
from rigs.bench.cache_simulation import Arrangement, CacheSizes, SimulatedCache
from sglang.srt.mem_cache.l3.prefetch_cost import PendingRead, slower_reads
from sglang.srt.mem_cache.l3.storage_writes import PAGES_PER_CALL
from sglang.srt.mem_cache.l3.store_calls import RateEstimate
from sglang.srt.mem_cache.tree.tick_sync import Rates

_TURN, _CLIENTS, _ROUNDS, _PAGE = 2048, 20, 10, 64
_CALL: Final = PAGES_PER_CALL * _PAGE
_TOKEN_BYTES: Final = 147456
_WORKING_SET: Final = _CLIENTS * _ROUNDS * _TURN // _PAGE
_SIZES: Final = CacheSizes(l1_pages=_WORKING_SET // 10, l2_pages=4 * _WORKING_SET // 10)
_THRESHOLD: Final = 256


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--read-gb-s", type=float, nargs="+", default=[2.0, 4.9, 10.0])
    parser.add_argument("--order", default="4:random", help="as in `simulate turns`")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of the random orders")


@dataclass(eq=False)
class Request:
    """A request in the server's queue. Lengths are tokens."""

    client: int
    round: int
    total: int
    known: int
    """Tokens that L1 and L2 had at its arrival."""
    hit: int
    """Further tokens that the store has."""
    landed: int = 0
    reads: bool = True
    """True if it waits for a read."""

    @property
    def name(self) -> str:
        return f"{self.client}-{self.round}"


class Server:
    """One run. Its events are the ends of calls to the store and of computations of prompts."""

    def __init__(self, order: str, seed: int, *, read_tokens_per_s: float, filled: bool,
                 cuts: bool) -> None:  # fmt: skip
        self._talk = Talk(order, seed, clients=_CLIENTS, rounds=_ROUNDS)
        self._cache = SimulatedCache(
            _SIZES, page_size=_PAGE, policy="lru", arrangement=Arrangement.WRITE_THROUGH
        )
        rng = np.random.default_rng(1)
        self._texts = rng.integers(0, 1 << 17, (_CLIENTS, _ROUNDS * _TURN), dtype=np.uint32)
        self._rate, self._filled, self._cuts = read_tokens_per_s, filled, cuts
        self._reads, self._prefills = RateEstimate(), RateEstimate()
        self._stored = [0] * _CLIENTS
        self._queue: list[Request] = []
        self._call: tuple[Request, int, float] | None = None
        """The call under way: its request, tokens and end."""
        self._step: tuple[Request, int, float] | None = None
        self._arrivals = 0
        self.now = self.busy_s = 0.0
        self.from_store = self.num_cut = 0

    def run(self) -> None:
        """Run until all requests were answered."""
        self._arrive()
        while self._queue:
            self._cut_overtaken()
            self._start_call()
            self._start_step()
            ends = [event[2] for event in (self._call, self._step) if event is not None]
            self.now = min(ends)
            if self._call is not None and self._call[2] <= self.now:
                request, tokens, _ = self._call
                request.landed += tokens
                request.reads = request.reads and request.landed < request.hit
                self._reads.add(tokens, tokens / self._rate)
                self._call = None
            if self._step is not None and self._step[2] <= self.now:
                self._answer(self._step[0])
        self._cache.close()

    def _arrive(self) -> None:
        for client, turn in self._talk.send():
            total = (turn + 1) * _TURN
            known = self._cache.arrive(
                f"{client}-{turn}", self._arrivals, self._texts[client][:total]
            )
            stored = total - _PAGE if self._filled else self._stored[client]
            hit = max(0, stored - known) if self._rate else 0
            self._arrivals += 1
            self._queue.append(Request(client, turn, total, known, hit, reads=hit >= _THRESHOLD))

    def _start_call(self) -> None:
        reading = [one for one in self._queue if one.reads]
        if self._call is None and reading:
            tokens = min(_CALL, reading[0].hit - reading[0].landed)
            self._call = reading[0], tokens, self.now + tokens / self._rate

    def _start_step(self) -> None:
        ready = [one for one in self._queue if not one.reads]
        if self._step is not None or not ready:
            return
        request = ready[0]
        ids = self._texts[request.client][: request.total]
        device, host = self._cache.serve(ids, rid=request.name)
        landed = max(0, request.known + request.landed - device - host)
        cached = device + host + landed
        seconds = request_seconds(cached, request.total, host + landed)
        self._prefills.add(request.total - cached, seconds)
        self.from_store += landed
        self.busy_s += seconds
        self._step = request, request.total - cached, self.now + seconds

    def _answer(self, request: Request) -> None:
        self._step = None
        self._stored[request.client] = request.total
        self._talk.served(self._queue.index(request))
        self._queue.remove(request)
        self._arrive()

    def _cut_overtaken(self) -> None:
        if not self._cuts:
            return
        step = None if self._step is None else self._step[0]
        waits = [one for one in self._queue if not one.reads and one is not step]
        reading = [one for one in self._queue if one.reads]
        half = self._call[1] // 2 if self._call is not None else 0
        whose = self._call[0] if self._call is not None else None
        later = slower_reads(
            [
                PendingRead(
                    one.hit - one.landed - (half if one is whose else 0),
                    one.hit - one.landed,
                    one.total - one.known - one.landed,
                )
                for one in reading
            ],
            Rates(self._reads.known, self._prefills.known),
            ahead=0 if whose is None or whose.reads else half,
            waiting=(0 if self._step is None else self._step[1])
            + sum(one.total - one.known - one.landed for one in waits),
        )
        for request, is_later in zip(reading, later, strict=True):
            if is_later:
                request.reads = False
                self.num_cut += 1


def simulate(
    args: argparse.Namespace, gb_s: float, *, filled: bool, cuts: bool
) -> dict[str, float]:
    """Means over the random orders."""
    runs = []
    for seed in args.seeds:
        server = Server(
            args.order, seed, read_tokens_per_s=gb_s * 1e9 / _TOKEN_BYTES, filled=filled, cuts=cuts
        )
        server.run()
        runs.append((server.now, server.busy_s, server.from_store, server.num_cut))
    names = ("duration", "device_busy", "from_store", "cut")
    return {
        name: statistics.mean(column)
        for name, column in zip(names, zip(*runs, strict=True), strict=True)
    }


def add_run(report: Report, case: dict[str, object], found: dict[str, float]) -> None:
    report.add_all("s", {name: found[name] for name in ("duration", "device_busy")}, case)
    report.add("from_store", found["from_store"], "tokens", case)
    report.add("cut", found["cut"], "reads", case)


def run(args: argparse.Namespace, report: Report) -> None:
    torch.set_num_threads(1)
    add_run(report, {"store": "none"}, simulate(args, 0.0, filled=False, cuts=False))
    for gb_s in args.read_gb_s:
        for store in ("empty", "filled"):
            for waits in ("whole", "overtaken"):
                found = simulate(args, gb_s, filled=store == "filled", cuts=waits == "overtaken")
                add_run(report, {"store": store, "read_gb_s": gb_s, "reads": waits}, found)


COMMAND: Final = Command(
    run=run, add_options=add_options, quick={"read_gb_s": [2.0], "seeds": SEEDS[:1]}
)
