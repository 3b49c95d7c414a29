"""Cost of different splits of heads on prefill and decode servers.

One peer process has the pages of all prefill ranks; this one reads them as a decode rank does, TCP
over loopback, one rank after the other. The shape is Qwen3-8B's: 36 layers, 8 KV heads of 128, 16
bits, pages of 64 tokens, in order. `--by-token` also reads the heads of each token by themselves,
once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Final

import torch

from benchmark.command import Command
from benchmark.report import Report
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.disaggregation.common.geometry import STAGING_BYTES, PoolGeometry, ShardSlice
from sglang.srt.disaggregation.common.staging import Staging, rounds
from sglang.srt.disaggregation.control.protocol import KVLayout
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.device_communicators.transfer_types import Block, TransferOp
from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.environ import envs
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.device.state_spec import KVSpec, RankShare, RankSplit

LAYERS, HEADS, HEAD_DIM, PAGE = 36, 8, 128, 64
CASES: Final = {
    "1 rank to 1": ([(0, 8)], (0, 8)),
    "2 ranks to 1": ([(0, 4), (4, 8)], (0, 8)),
    "1 rank to 2": ([(0, 8)], (0, 4)),
}
"""Cases by name: heads of each prefill rank, and of the decode rank."""


def make_pool(begin: int, end: int, tokens: int) -> MHATokenToKVPool:
    share = RankShare(RankSplit.HEADS, begin, end, HEADS)
    layers = tuple(range(LAYERS))
    spec = KVSpec.of_heads(layers, end - begin, HEAD_DIM, torch.bfloat16, share=share)
    return MHATokenToKVPool.from_spec(spec, tokens, PAGE, "cpu")


def num_bytes_of(pool: MHATokenToKVPool) -> list[int]:
    return pool.get_contiguous_buf_infos()[1]


def start_engine() -> MooncakeTransferEngine:
    mark_device_set("cpu")
    envs.MOONCAKE_PROTOCOL.set("tcp")
    return MooncakeTransferEngine(LOOPBACK)


def serve(tokens: int, pipe: Connection) -> None:
    """The prefill ranks: tell their layouts, and stay until told to end."""
    engine = start_engine()
    layouts: dict[tuple[int, int], KVLayout] = {}
    pools = []
    for ranks, _ in CASES.values():
        for heads in ranks:
            pools.append(make_pool(*heads, tokens))
            geometry = PoolGeometry.of(pools[-1:], "w", torch.float32)
            engine.batch_register(geometry.addresses, num_bytes_of(pools[-1]))
            layouts[heads] = geometry.layout("peer", engine.get_session_id())
    pipe.send(layouts)
    pipe.recv()


def staged(shard_slice: ShardSlice, pages: Sequence[int], read: Callable[[Sequence[Block]], None],
           staging: Staging) -> int:  # fmt: skip
    """Read as a decode server does. Returns the bytes read."""
    blocks = shard_slice.page_blocks(pages, pages)
    num_bytes = sum(block.length for block in blocks)
    if blocks:
        read(blocks)
    index = staging.index(pages)
    for pieces in rounds([cut.page_bytes for cut in shard_slice.cuts], len(pages), STAGING_BYTES):
        buffer = staging.take(0)
        assert buffer is not None
        blocks = [
            block
            for piece in pieces
            for block in piece.blocks(buffer.address, shard_slice.cuts[piece.place].address, pages)
        ]
        read(blocks)
        buffer.unpack(shard_slice.cuts, pieces, index)
        buffer.give_back()
        num_bytes += sum(block.length for block in blocks)
    return num_bytes


def by_token(shard_slice: ShardSlice, pages: Sequence[int]) -> list[Block]:
    """Blocks that read the heads of each token by themselves."""
    blocks = []
    for cut in shard_slice.cuts:
        word, item = cut.own.element_size(), cut.own.shape[2] * cut.own.element_size()
        their_item = cut.page_bytes // PAGE
        for here, there, length in cut.ranges:
            for page in pages:
                for slot in range(page * PAGE, (page + 1) * PAGE):
                    local = cut.own.data_ptr() + slot * item + here * word
                    remote = cut.address + slot * their_item + there * word
                    blocks.append(Block(local, remote, length * word))
    return blocks


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=1024, help="of the prompt")
    parser.add_argument("--by-token", action="store_true", help="also token by token, once")


def run(args: argparse.Namespace, report: Report) -> None:
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    peer = context.Process(target=serve, args=(args.tokens, there), daemon=True)
    peer.start()
    engine = start_engine()
    layouts = here.recv()
    pages = list(range(1, args.tokens // PAGE + 1))
    staging = Staging(engine, torch.device("cpu"))

    def reader(layout: KVLayout) -> Callable[[Sequence[Block]], None]:
        def read(blocks: Sequence[Block]) -> None:
            transfer = engine.transfer(layout.session_id, TransferOp.READ, blocks, timeout=None)
            assert transfer.is_done

        return read

    for name, (ranks, own) in CASES.items():
        pool = make_pool(*own, args.tokens)
        geometry = PoolGeometry.of([pool], "w", torch.float32)
        engine.batch_register(geometry.addresses, num_bytes_of(pool))
        told = [layouts[heads] for heads in ranks]
        parts = list(zip(geometry.slices(told, 0), map(reader, told), strict=True))
        seconds = []
        for _ in range(args.repeats + 1):
            started = time.perf_counter()
            num_bytes = sum(
                staged(shard_slice, pages, read, staging) for shard_slice, read in parts
            )
            seconds.append(time.perf_counter() - started)
        median = statistics.median(seconds[1:])
        case = {"ranks": name}
        report.add("read", num_bytes, "bytes", case)
        used = sum(num_bytes_of(pool)) * args.tokens // (args.tokens + PAGE)
        report.add("used", used, "bytes", case)
        report.add("duration", median, "s", case, raw=seconds[1:])
        report.add("rate", num_bytes / median / 1e9, "GB/s", case)
        if args.by_token and parts[0][0].cuts:
            started = time.perf_counter()
            for shard_slice, read in parts:
                read(by_token(shard_slice, pages))
            report.add("by_token", time.perf_counter() - started, "s", case)
        engine.batch_deregister(geometry.addresses)
    here.send(None)
    peer.join()


_QUICK: Final = {"tokens": 128, "repeats": 1}
COMMAND: Final = Command(run=run, add_options=add_options, repeats=5, quick=_QUICK)
