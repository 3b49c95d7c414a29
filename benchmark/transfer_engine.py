"""Transfers between two processes: this engine's wrapper against a bare loop over Mooncake's own.

    python benchmark/transfer_engine.py [--megabytes 256] [--rounds 4] [--repeat 5] [--out FILE]

One peer process and this one, TCP over loopback. The same blocks, bytes and order in the same run;
the two take turns. Each round connects both anew: some connections are slower than others for as
long as they last. Blocks lie apart, so that none are merged, and side by side, where the wrapper
merges them and the bare loop does not. Target: 0.8 of the bare rate for blocks apart.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rigs.stores.transfer_peer import TransferPeer
from sglang.benchmark.report import emit, provenance, writable_file
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
BARE_BATCH = 1024
"""Requests of one call of the bare loop: half of what the transport takes."""


class Case(NamedTuple):
    """The case of one line of the results."""

    op: TransferOp
    size: int
    placement: str


class Bench:
    """Both ways of moving the same blocks."""

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
                started = time.perf_counter()
                move(op, blocks)
                rate = self._num_bytes / (time.perf_counter() - started) / 1e9
                if turn:
                    rates[name].append(round(rate, 3))
        return rates


def memory_bytes(num_bytes: int) -> int:
    """Bytes that hold the blocks of any size with their gaps."""
    return num_bytes + GAP * (num_bytes // min(BLOCK_SIZES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256, help="Moved in one turn.")
    parser.add_argument("--rounds", type=int, default=4, help="How often both connect.")
    parser.add_argument("--repeat", type=int, default=5, help="Turns of a round that count.")
    parser.add_argument("--out", type=writable_file, help="Append the lines to this file.")
    args = parser.parse_args()
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
                rates = bench.compare(case.op, case.size, GAPS[case.placement], args.repeat)
                for name, values in rates.items():
                    raw[case].setdefault(name, []).extend(values)
            bench.close()
    for case, rates in raw.items():
        median = {name: statistics.median(values) for name, values in rates.items()}
        record = {
            "benchmark": "transfer_engine",
            **provenance(),
            "op": case.op.value,
            "block_bytes": case.size,
            "blocks": num_bytes // case.size,
            "placement": case.placement,
            "gb_per_second": median,
            "ratio": round(median["wrapped"] / median["bare"], 3),
            "raw": rates,
        }
        emit(record, args.out)


if __name__ == "__main__":
    main()
