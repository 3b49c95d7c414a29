"""Transfers between two processes: this engine's wrapper against a bare loop over Mooncake's own.

One peer process and this one, TCP over loopback. The same blocks, bytes and order in the same run;
the two take turns. Each round connects both anew: some connections are slower than others for as
long as they last. Blocks lie apart, so that none are merged, and side by side, where the wrapper
merges them and the bare loop does not. Target: 0.8 of the bare rate for blocks apart.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from benchmark.command import Command
from benchmark.report import Report
from benchmark.timing import gb_per_second
from rigs.stores.transfer_peer import TransferPeer
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.constants import MIB
from sglang.srt.distributed.device_communicators.mooncake_library import load_transfer_engine
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.device_communicators.transfer_types import Block, TransferOp
from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.environ import envs

BLOCK_SIZES = (64 << 10, MIB, 16 * MIB)
GAP = 4096
GAPS = {"apart": GAP, "side by side": 0}
"""Bytes between two blocks."""
TARGET = "at least 0.8"
BARE_BATCH = 1024
"""Requests of one call of the bare loop: half of the transport's limit."""


class Case(NamedTuple):
    """The case of one line of the results."""

    op: TransferOp
    size: int
    placement: str


class Bench:
    """Wrapper and bare loop, which move the same blocks."""

    def __init__(self, peer: TransferPeer, num_bytes: int) -> None:
        self._peer = peer
        self._num_bytes = num_bytes
        size = memory_bytes(num_bytes)
        # Random bytes: untouched zero pages all map to the same physical page.
        self._memory = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        address = self._memory.ctypes.data
        self._wrapped = MooncakeTransferEngine(LOOPBACK)
        self._wrapped.register(address, size)
        self._bare = load_transfer_engine().TransferEngine()
        assert self._bare.initialize(LOOPBACK, "P2PHANDSHAKE", "tcp", "") == 0
        assert self._bare.register_memory(address, size) == 0

    def blocks(self, size: int, gap: int) -> list[Block]:
        """The blocks that are moved in one turn."""
        local, remote = self._memory.ctypes.data, self._peer.address
        offsets = [index * (size + gap) for index in range(self._num_bytes // size)]
        return [Block(local + offset, remote + offset, size) for offset in offsets]

    def wrapped(self, op: TransferOp, blocks: list[Block]) -> None:
        transfer = self._wrapped.transfer(self._peer.session_id, op, blocks, timeout=None)
        assert transfer.is_done

    def bare(self, op: TransferOp, blocks: list[Block]) -> None:
        move = (
            self._bare.batch_transfer_sync_write
            if op is TransferOp.WRITE
            else self._bare.batch_transfer_sync_read
        )
        for start in range(0, len(blocks), BARE_BATCH):
            batch = blocks[start : start + BARE_BATCH]
            code = move(
                self._peer.session_id,
                [block.local for block in batch],
                [block.remote for block in batch],
                [block.length for block in batch],
            )
            assert code == 0

    def close(self) -> None:
        self._wrapped.close()
        del self._bare

    def compare(self, op: TransferOp, size: int, gap: int, repeat: int) -> dict[str, list[float]]:
        """GB/s of each turn. The first turn of each connects and touches memory: not counted."""
        blocks = self.blocks(size, gap)
        ways: dict[str, Callable[[TransferOp, list[Block]], None]] = {
            "bare": self.bare,
            "wrapped": self.wrapped,
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(repeat + 1):
            for name, move in ways.items() if turn % 2 else reversed(ways.items()):
                rate = gb_per_second(self._num_bytes, partial(move, op, blocks))
                if turn:
                    rates[name].append(rate)
        return rates


def memory_bytes(num_bytes: int) -> int:
    """Bytes that hold the blocks of any size with their gaps."""
    return num_bytes + GAP * (num_bytes // min(BLOCK_SIZES))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=int, default=256, help="moved in one turn")
    parser.add_argument("--rounds", type=int, default=4, help="how often both connect")


def run(args: argparse.Namespace, report: Report) -> None:
    mark_device_set("cpu")
    envs.MOONCAKE_PROTOCOL.set("tcp")
    num_bytes = args.megabytes * MIB
    cases = [
        Case(op, size, placement) for placement in GAPS for size in BLOCK_SIZES for op in TransferOp
    ]
    raw: dict[Case, dict[str, list[float]]] = {case: {} for case in cases}
    with TransferPeer(memory_bytes(num_bytes)) as peer:
        for _ in range(args.rounds):
            bench = Bench(peer, num_bytes)
            for case in cases:
                rates = bench.compare(case.op, case.size, GAPS[case.placement], args.repeats)
                for name, values in rates.items():
                    raw[case].setdefault(name, []).extend(values)
            bench.close()
    for case, rates in raw.items():
        median = {name: statistics.median(values) for name, values in rates.items()}
        of = {"op": case.op, "block_bytes": case.size, "placement": case.placement}
        for name, rate in median.items():
            report.add(name, rate, "GB/s", of, raw=rates[name])
        target = TARGET if case.placement == "apart" else None
        ratio = median["wrapped"] / median["bare"]
        report.add("wrapped_to_bare", ratio, "ratio", of, target=target)


_QUICK: Final = {"megabytes": 16, "rounds": 1, "repeats": 1}
COMMAND: Final = Command(run=run, add_options=add_options, repeats=5, quick=_QUICK)
