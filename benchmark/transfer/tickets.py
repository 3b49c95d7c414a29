"""Scatter tickets of Mooncake's engine beside its batch reads, over TCP on loopback.

A ticket (`submit_scatter_read`, since Mooncake 0.3.14) tells when its read no longer touches
memory. `read` times both ways. The other cases stop or kill the peer under a read, and time how
long requests can still write into this process's memory: until the ticket is drained, or until the
batch read has returned and its engine object has ended. Each case has its own process.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

from benchmark.command import Command, Refused
from benchmark.report import Report
from benchmark.transfer.limits import run_beside_peer
from benchmark.transfer.limits_peer import METADATA
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.constants import KIB, MIB
from sglang.srt.distributed.device_communicators.mooncake_library import load_transfer_engine
from sglang.srt.environ import envs

PAGE_BYTES: Final = 64 * KIB
FRAGMENT_BYTES: Final = MIB
"""Size of a request under which the peer is stopped or killed."""
CASES: Final = ("read", "stopped", "killed")
LOST_S: Final = 90.0
"""Seconds after which a ticket that is not drained counts as one that never is."""


class Reader:
    """An engine object that reads the beginning of the peer's memory."""

    def __init__(self, peer: dict[str, Any], num_bytes: int) -> None:
        self._engine: Any = load_transfer_engine().TransferEngine()
        assert self._engine.initialize(LOOPBACK, METADATA, "tcp", "") == 0
        self._memory = np.zeros(num_bytes, np.uint8)
        address = self._memory.ctypes.data
        assert self._engine.batch_register_memory([address], [num_bytes]) == 0
        self._peer = peer
        self._tickets: list[Any] = []
        """Kept, since the end of a ticket blocks until it is drained."""
        assert self.batch(1, PAGE_BYTES) == 0, "opens the connection"

    def batch(self, count: int, length: int) -> int:
        """Read `count` requests of `length` bytes in one call. Returns Mooncake's code."""
        starts = range(0, count * length, length)
        code: int = self._engine.batch_transfer_sync_read(
            self._peer["session"],
            [self._memory.ctypes.data + start for start in starts],
            [self._peer["address"] + start for start in starts],
            [length] * count,
        )
        return code

    def submit(self, count: int, length: int) -> Any:
        """Begin to read the same. Returns the ticket."""
        starts = list(range(0, count * length, length))
        size = [self._memory.nbytes]
        ticket = self._engine.submit_scatter_read(
            self._peer["session"],
            [self._memory.ctypes.data],
            size,
            [self._peer["address"]],
            size,
            [starts],
            [starts],
            [[length] * count],
        )
        self._tickets.append(ticket)
        return ticket

    def end(self) -> None:
        """End the engine object, and with it all requests. Holds the GIL meanwhile."""
        self._engine = None


def read(reader: Reader, count: int, repeats: int) -> dict[str, Any]:
    """Median milliseconds of both ways, in turn."""
    batch, ticket = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        assert reader.batch(count, PAGE_BYTES) == 0
        batch.append(time.perf_counter() - began)
        began = time.perf_counter()
        assert reader.submit(count, PAGE_BYTES).drain(60_000).name == "COMPLETED"
        ticket.append(time.perf_counter() - began)
    return {"batch_ms": 1e3 * float(np.median(batch)), "ticket_ms": 1e3 * float(np.median(ticket))}


def settle(reader: Reader, count: int, has_ticket: bool, disturb: Callable[[], None]) -> float:
    """Seconds from the disturbance until no request can touch memory; `LOST_S`: not in that."""
    if not has_ticket:
        disturb()
        began = time.monotonic()
        reader.batch(count, FRAGMENT_BYTES)
        reader.end()
        return time.monotonic() - began
    ticket = reader.submit(count, FRAGMENT_BYTES)
    disturb()
    began = time.monotonic()
    while not ticket.drained and time.monotonic() - began < LOST_S:
        ticket.drain(1000)
    return min(time.monotonic() - began, LOST_S)


def run_case(facts: dict[str, Any], case: str, count: int, repeats: int, out: Connection) -> None:
    """Run a case in this process, and send its figures."""
    reader = Reader(facts, max(count * FRAGMENT_BYTES, 64 * MIB))
    if case == "read":
        out.send(read(reader, count, repeats))
    else:
        kind, _, way = case.partition(" ")
        signum = signal.SIGSTOP if kind == "stopped" else signal.SIGKILL
        seconds = settle(reader, count, way == "ticket", lambda: os.kill(facts["pid"], signum))
        out.send({f"{way}_s": seconds})
    os._exit(0)  # The end of an undrained ticket may never return.


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=12)


def run(args: argparse.Namespace, report: Report) -> None:
    if not hasattr(load_transfer_engine().TransferEngine, "submit_scatter_read"):
        raise Refused("this Mooncake has no scatter tickets: install 0.3.14 or a later one")
    envs.MC_FORCE_TCP.set("1")
    for case in args.cases:
        ways = [case] if case == "read" else [f"{case} batch", f"{case} ticket"]
        for count in args.requests:
            for way in ways:
                figures = run_beside_peer(run_case, way, count, args.repeats)
                assert figures is not None, "there is no limit of time"
                for metric, value in figures.items():
                    about = {"case": case, "requests": count}
                    report.add(metric, value, metric.rpartition("_")[2], about)


_QUICK: Final = {"requests": [4], "cases": ["read"]}
COMMAND: Final = Command(run=run, add_options=add_options, quick=_QUICK)
