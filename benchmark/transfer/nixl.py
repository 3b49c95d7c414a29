"""Reads of two processes over loopback: NIXL beside Mooncake.

The same blocks in the same run; the ways take turns, each with a peer process of its own. NIXL
reads as servers do (shared memory of the host). `--emulated`: over TCP, which servers refuse.
Blocks lie apart, so that none are merged.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from functools import partial
from typing import Final

import numpy as np

import rigs.disaggregation.nixl_package as package
from benchmark.command import Command, Refused
from benchmark.report import Report
from benchmark.timing import gb_per_second
from rigs.stores.transfer_peer import TransferPeer
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.arg_groups.disaggregation import TransferBackend
from sglang.srt.constants import MIB
from sglang.srt.disaggregation.common.sessions import Engine
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.device_communicators.nixl_transfer_engine import NixlTransferEngine
from sglang.srt.distributed.device_communicators.transfer_types import Block, TransferOp
from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.environ import envs

BLOCK_SIZES: Final = (64 << 10, MIB, 16 * MIB)
GAP: Final = 4096
"""Bytes between two blocks."""


def read(engine: Engine, session_id: str, blocks: list[Block]) -> None:
    transfer = engine.begin(session_id, TransferOp.READ, blocks, timeout=None)
    assert transfer.wait() and transfer.is_done, transfer.error


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=int, default=256, help="moved in one turn")
    parser.add_argument("--emulated", action="store_true", help="NIXL reads over TCP")


def run(args: argparse.Namespace, report: Report) -> None:
    if not package.has_nixl():
        raise Refused("no package nixl-cu13: install the extra nixl")
    mark_device_set("cpu")
    envs.MOONCAKE_PROTOCOL.set("tcp")
    if args.emulated:
        envs.UCX_TLS.set("tcp")
        envs.UCX_PROTO_EMULATION_ENABLE.set("y")
    num_bytes = args.megabytes * MIB
    size = num_bytes + GAP * (num_bytes // min(BLOCK_SIZES))
    memory = np.zeros(size, dtype=np.uint8)
    engines: dict[TransferBackend, MooncakeTransferEngine | NixlTransferEngine] = {
        TransferBackend.MOONCAKE: MooncakeTransferEngine(LOOPBACK),
        TransferBackend.NIXL: NixlTransferEngine(LOOPBACK),
    }
    env = {name: field.get() for name, field in _FIELDS.items() if field.is_set()}
    with ExitStack() as stack:
        peers = {way: stack.enter_context(TransferPeer(size, way, env)) for way in engines}
        for engine in engines.values():
            engine.batch_register([memory.ctypes.data], [size])
        for block_bytes in BLOCK_SIZES:
            rates: dict[TransferBackend, list[float]] = {way: [] for way in engines}
            for turn in range(args.repeats + 1):
                for way, engine in engines.items():
                    peer = peers[way]
                    blocks = [
                        Block(memory.ctypes.data + at, peer.address + at, block_bytes)
                        for at in range(0, num_bytes, block_bytes + GAP)
                        if at + block_bytes <= size
                    ]
                    moved = block_bytes * len(blocks)
                    rate = gb_per_second(moved, partial(read, engine, peer.session_id, blocks))
                    if turn:  # The first connects.
                        rates[way].append(rate)
            of = {"block_bytes": block_bytes, "emulated": args.emulated}
            for way, values in rates.items():
                report.add(way, statistics.median(values), "GB/s", of, raw=values)
    for engine in engines.values():
        engine.close()


_FIELDS: Final = {
    field.name: field
    for field in (envs.MOONCAKE_PROTOCOL, envs.UCX_TLS, envs.UCX_PROTO_EMULATION_ENABLE)
}
_QUICK: Final = {"megabytes": 16, "repeats": 1}
COMMAND: Final = Command(run=run, add_options=add_options, repeats=5, quick=_QUICK)
