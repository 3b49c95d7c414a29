"""KV pages from one GPU to another as a decode server reads them, against a peer copy.

Two processes with a pool of Qwen3-8B's shape each, pages of 64 tokens. The second reads prompts of
the first as a decode server does: questions, reads, copies. `run` is one run of pages on both
sides, `scattered` pages in random order on both. `direct` reads from pool to pool, `packed` lets
the first process pack pages into units of `--unit-mib`, and `chosen` is what servers do
(`staging.py`). Bytes are compared afterwards. The time is from the first question about
pages until all have arrived; `prompt` includes the other questions. `copies` are copies of one unit
between a pool and its buffer. Target: 0.80 of the peer copy in the same run.

`--device cpu --layers 2 --tokens 512` tries it without GPUs, over TCP.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch

from benchmark.command import Command
from benchmark.report import Report
from rigs.disaggregation.desk_rig import PrefillRooms
from rigs.disaggregation.prompt_scene import Context, Prompt
from rigs.schedulers.rank_processes import run_ranks
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.constants import MIB
from sglang.srt.disaggregation.base.bootstrap_route import Route
from sglang.srt.disaggregation.base.timeouts import Timeouts
from sglang.srt.disaggregation.common.geometry import PoolGeometry, RankPlace
from sglang.srt.disaggregation.common.metadata_reader import MetadataReader
from sglang.srt.disaggregation.common.packing import Packer
from sglang.srt.disaggregation.common.room_checksums import RoomChecksums
from sglang.srt.disaggregation.common.sessions import Sessions
from sglang.srt.disaggregation.common.staging import LINKS, LinkCosts, Staging, rounds
from sglang.srt.disaggregation.control.protocol import KVLayout
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.distributed.torch_rank_group import TorchRankGroup
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.messages.first_token import FirstToken

PAGE: Final = 64
REPEATS: Final = 7
KV_HEADS, HEAD_DIM = 8, 128
TARGET: Final = 0.8
TOKEN: Final = FirstToken(token_id=1, prompt_len=1, prompt_digest="")
ALWAYS: Final = LinkCosts(block_s=1.0, bytes_per_s=1e12, packing_s=0.0, unit_s=0.0)
"""Costs with which packing always pays."""
CHOSEN: Final = LINKS["nvlink_intra"]
TIMEOUTS: Final = Timeouts(unknown_room=60, waiting=60, silence=60)


class Case(NamedTuple):
    """Prompts of one kind; each has a room of its own."""

    tokens: int
    pages: str
    way: str
    unit_mib: int
    first_room: int

    @property
    def link(self) -> LinkCosts | None:
        return {"direct": None, "packed": ALWAYS, "chosen": CHOSEN}[self.way]

    def places(self, pool_pages: int) -> tuple[list[int], list[int]]:
        """Pages in the first process, and in the second."""
        count = self.tokens // PAGE
        if self.pages == "run":
            return list(range(1, count + 1)), list(range(1, count + 1))
        rng = np.random.default_rng(self.tokens)
        there, here = ((rng.permutation(pool_pages)[:count] + 1).tolist() for _ in range(2))
        return there, here


def cases(sizes: Sequence[int], units: Sequence[int]) -> Iterator[Case]:
    """The measured cases, in an order that both processes know."""
    room = 1
    for unit in units:
        for size in sizes:
            for pages in ("run", "scattered"):
                for way in ("direct", "packed", "chosen"):
                    if way == "packed" or unit == units[-1]:
                        yield Case(size, pages, way, unit, room)
                        room += REPEATS


def peer_copy_gb_s(num_bytes: int) -> float:
    """One large copy from the other GPU, by this process."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:1")
    seconds = []
    for _ in range(REPEATS):
        torch.cuda.synchronize("cuda:1")
        begun = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize("cuda:1")
        seconds.append(time.perf_counter() - begun)
    return num_bytes / statistics.median(seconds) / 1e9


def pattern(pages: torch.Tensor, number: int) -> torch.Tensor:
    """Values of buffer `number` in each page; exact in bfloat16."""
    return ((pages * 7 + number * 13) % 251).to(torch.bfloat16)


def fill(pool: MHATokenToKVPool) -> None:
    """Fill pages with distinct values."""
    for number, buffer in enumerate(buffer for part in pool.parts for buffer in part):
        rows = buffer.view(-1, PAGE * KV_HEADS * HEAD_DIM)
        pages = torch.arange(len(rows), device=rows.device)
        rows.copy_(pattern(pages, number)[:, None].expand_as(rows))


def check(pool: MHATokenToKVPool, there: list[int], here: list[int]) -> None:
    """Assert that every byte of the pages has arrived."""
    for number, buffer in enumerate(buffer for part in pool.parts for buffer in part):
        rows = buffer.view(-1, PAGE * KV_HEADS * HEAD_DIM)
        theirs, own = (torch.tensor(pages, device=rows.device) for pages in (there, here))
        assert (rows[own] == pattern(theirs, number)[:, None]).all(), f"buffer {number}"
        rows[own] = -1.0


class Side:
    """One process's pool, engine, and buffers for each size of units."""

    def __init__(
        self, ranks: RankGroup, device: str, layers: int, args: argparse.Namespace
    ) -> None:
        pool_tokens = 2 * max(args.tokens)
        self.pool = MHATokenToKVPool(
            pool_tokens, PAGE, torch.bfloat16, KV_HEADS, HEAD_DIM, layers, device
        )
        self.pool_pages = pool_tokens // PAGE
        tensors = [buffer for part in self.pool.parts for buffer in part]
        self.engine = MooncakeTransferEngine(LOOPBACK, ranks.rank)
        found = device_runtime(device).allocations_of(tensors)
        self.engine.batch_register(list(found), list(found.values()))
        self.geometry = PoolGeometry.of([self.pool], "dummy", torch.float32)
        self.staging: dict[int, Staging] = {}
        for unit in args.unit_mib:
            staging = Staging(self.engine, torch.device(device), unit * MIB)
            staging.prepare()
            self.staging[unit] = staging

    def copies_gb_s(self, unit: int, page_bytes: int) -> dict[str, float]:
        """GB/s of copies of one unit between pool and buffer, in random order."""
        rows = list(self.geometry.page_rows().values())
        buffer = self.staging[unit].take(0)
        assert buffer is not None
        count = min(128, self.pool_pages)
        pages = np.random.default_rng(1).permutation(self.pool_pages)[:count] + 1
        index = self.staging[unit].index(pages.tolist())
        pieces = next(rounds([page_bytes] * len(rows), count, unit * MIB))
        num_bytes = sum(piece.num_bytes for piece in pieces)
        (shard_slice,) = self.geometry.slices([self.geometry.layout("i", "s")], 0)
        found = {}
        for name, work in (
            ("pack", partial(buffer.pack, rows, pieces, index)),
            ("unpack", partial(buffer.unpack, shard_slice.wholes, pieces, index)),
        ):
            seconds = []
            for _ in range(REPEATS):
                begun = time.perf_counter()
                work()
                seconds.append(time.perf_counter() - begun)
            found[name] = num_bytes / statistics.median(seconds) / 1e9
        buffer.give_back()
        return found


def serve(side: Side, all_cases: list[Case], units: Sequence[int]) -> dict[int, tuple[str, bytes]]:
    """The prefill server's part, all prompts computed. Returns each endpoint and layout."""
    found = {}
    for unit in units:
        packer = Packer(side.geometry.page_rows(), side.staging[unit])
        layout = side.geometry.layout(
            f"prefill {unit}", side.engine.get_session_id(), unit_bytes=packer.unit_bytes
        )
        prefill = PrefillRooms(layout, LOOPBACK, unwanted_s=300, silent_s=300, packer=packer)
        for case in all_cases:
            if case.unit_mib == unit:
                there, _ = case.places(side.pool_pages)
                for room in range(case.first_room, case.first_room + REPEATS):
                    prefill.open(room)
                    prefill.add_pages(room, there)
                    prefill.complete(room, TOKEN)
        found[unit] = f"tcp://{LOOPBACK}:{prefill.port}", msgspec.msgpack.encode(layout)
    return found


def read(side: Side, case: Case, endpoint: str, layout: KVLayout, limit: float) -> dict[str, Any]:
    """The decode server's part."""
    route = Route(
        rank=0, endpoint=endpoint, instance_id=layout.instance_id, num_ranks=1, attn_tp_size=1
    )
    context = Context(
        place=RankPlace(),
        geometry=side.geometry,
        engine=side.engine,
        staging=side.staging[case.unit_mib],
        checksums=RoomChecksums([side.pool]),
        metadata=MetadataReader(),
        sessions=Sessions(side.engine),
        find_rank=lambda *_: route,
        timeouts=TIMEOUTS,
        link=case.link,
    )
    there, here = case.places(side.pool_pages)
    reads, prompts = [], []
    for repeat in range(REPEATS):
        reader = f"reader {repeat}"
        prompt = Prompt(context, [route], case.first_room + repeat, reader)
        begun = time.perf_counter()
        prompt.send_metadata(here)
        prompt.has_returned.wait()
        prompts.append(time.perf_counter() - begun)
        assert not isinstance(prompt.outcome, str), prompt.outcome
        reads.append(prompt.get_transfer_metric().transfer_latency_s)
        if repeat in (0, REPEATS - 1):
            check(side.pool, there, here)
    (shard_slice,) = side.geometry.slices([layout], 0)
    num_bytes = shard_slice.page_bytes * len(here)
    speed = num_bytes / statistics.median(reads) / 1e9
    return {
        "case": {
            "tokens": case.tokens,
            "pages": case.pages,
            "way": case.way,
            "unit_mib": case.unit_mib if case.way != "direct" else None,
        },
        "blocks": shard_slice.num_blocks(there, here),
        "gb_s": speed,
        "best_gb_s": num_bytes / min(reads) / 1e9,
        "first_s": reads[0],
        "prompt_s": statistics.median(prompts),
        "peer_copy_gb_s": limit,
    }


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One rank's part: the first has the pages, the second reads them."""
    default = "nvlink_intra" if args.device == "cuda" else "tcp"
    os.environ["MOONCAKE_PROTOCOL"] = args.protocol or default
    ranks = TorchRankGroup.of_world()
    device = f"cuda:{ranks.rank}" if args.device == "cuda" else args.device
    mark_device_set(device)
    side = Side(ranks, device, args.layers, args)
    all_cases = list(cases(args.tokens, args.unit_mib))
    told = None
    if ranks.rank == 0:
        fill(side.pool)
        device_runtime(device).synchronize()
        told = msgspec.msgpack.encode(serve(side, all_cases, args.unit_mib))
    prefills = msgspec.msgpack.decode(
        ranks.broadcast(told), type=dict[int, tuple[str, bytes]], strict=False
    )
    rows: list[dict[str, Any]] = []
    if ranks.rank == 1:
        page_bytes = PAGE * KV_HEADS * HEAD_DIM * 2
        for unit in args.unit_mib:
            copies = side.copies_gb_s(unit, page_bytes)
            rows.append({"case": {"copies": "one unit", "unit_mib": unit}, "copies": copies})
        limits = {
            size: peer_copy_gb_s(size * 2 * args.layers * KV_HEADS * HEAD_DIM * 2)
            if args.device == "cuda"
            else 0.0
            for size in args.tokens
        }
        for case in all_cases:
            endpoint, layout = prefills[case.unit_mib]
            told_layout = msgspec.msgpack.decode(layout, type=KVLayout)
            rows.append(read(side, case, endpoint, told_layout, limits[case.tokens]))
    ranks.reduce_min(torch.zeros(1, dtype=torch.int64))  # Until both have come here.
    return rows


def add_read(report: Report, row: dict[str, Any]) -> None:
    case, limit = row["case"], row["peer_copy_gb_s"]
    report.add("blocks", row["blocks"], "count", case)
    report.add("rate", row["gb_s"], "GB/s", case, limit=limit or None)
    report.add("best_rate", row["best_gb_s"], "GB/s", case)
    report.add_all("s", {"first": row["first_s"], "prompt": row["prompt_s"]}, case)
    if limit:
        target = f"at least {TARGET:g}" if case["way"] == "chosen" else None
        report.add("of_limit", row["gb_s"] / limit, "ratio", case, target=target)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--unit-mib", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--protocol", help="[nvlink_intra, on a CPU tcp]")


def run(args: argparse.Namespace, report: Report) -> None:
    for row in run_ranks(2, measure, args, device=args.device, timeout_s=400)[1]:
        if "copies" in row:
            report.add_all("GB/s", row["copies"], row["case"])
        else:
            add_read(report, row)


_QUICK: Final = {"device": "cpu", "layers": 2, "tokens": [512], "unit_mib": [128]}
COMMAND: Final = Command(
    run=run, add_options=add_options, devices=("cuda", "cpu"), gpus=2, quick=_QUICK
)
