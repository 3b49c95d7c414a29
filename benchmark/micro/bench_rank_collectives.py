"""What a tick and a ballot cost the ranks of one machine, over gloo on loopback.

    python benchmark/micro/bench_rank_collectives.py [--ranks 2 4 8] [--ticks 2000] [--out FILE]

The ranks are processes. In each tick rank 0 broadcasts a `Tick`, as `Scheduler.run` does, and where
the case says so all of them make the ballot, `agree`, as the prefix cache does while anything is
under way. A line says how long rank 0 and the slowest other rank took for each, and how many
collectives and bytes a tick is. Bytes are those that a collective is given, not those on the wire.
Further lines compare ways to reduce the ballot's vector.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import psutil
import torch
import torch.distributed as dist

from sglang.benchmark.report import emit, provenance, writable_file
from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.environ import envs
from sglang.srt.managers.messages.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.messages.tick import Tick, decode_tick, encode_tick
from sglang.srt.mem_cache.tree.ballot import PrefetchProgress, Progress, agree, to_vector
from sglang.srt.mem_cache.tree.digest import CacheBooks
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.tree.tree_node import ROOT_ID, TreeNode
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.network import get_free_ports

LOOPBACK: Final = "127.0.0.1"
WARM_UP: Final = 50
PROMPTS: Final = {"an empty tick": 0, "a prompt of 1,024": 1024, "a prompt of 32,768": 32768}
FRAME_BYTES: Final = 4096
LENGTH_BYTES: Final = 8


class GlooGroup(RankGroup):
    """Ranks over gloo: a message that fits a frame with its length is one collective, a longer one
    two; MIN is one. Counts what it is given.

    Args:
        rank: This one.
        size: How many ranks.
        port: Where they meet.
    """

    def __init__(self, rank: int, size: int, port: int) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{LOOPBACK}:{port}",
            rank=rank,
            world_size=size,
            timeout=timedelta(minutes=2),
        )
        self._rank, self._size = rank, size
        self.num_collectives = self.num_bytes = 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def broadcast(self, payload: bytes | None) -> bytes:
        said = payload or b""
        frame = bytearray(FRAME_BYTES)
        head = (len(said).to_bytes(LENGTH_BYTES, "little") + said)[:FRAME_BYTES]
        frame[: len(head)] = head
        raw = self._broadcast(frame)
        length = int.from_bytes(raw[:LENGTH_BYTES], "little")
        missing = length - (FRAME_BYTES - LENGTH_BYTES)
        if missing <= 0:
            return raw[LENGTH_BYTES : LENGTH_BYTES + length]
        rest = self._broadcast(bytearray(said[-missing:] if said else missing))
        return raw[LENGTH_BYTES:] + rest

    def reduce_min(self, values: torch.Tensor) -> torch.Tensor:
        least = values.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        self._count(least)
        return least

    def _broadcast(self, raw: bytearray) -> bytes:
        tensor = torch.frombuffer(raw, dtype=torch.uint8)
        dist.broadcast(tensor, 0)
        self._count(tensor)
        return bytes(raw)

    def _count(self, tensor: torch.Tensor) -> None:
        self.num_collectives += 1
        self.num_bytes += tensor.nbytes

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def join(rank: int, size: int, port: int) -> GlooGroup:
    """This rank's way to the others: the one place here that knows what they talk over."""
    return GlooGroup(rank, size, port)


def make_tick(prompt_tokens: int) -> Tick:
    """With one request, or none."""
    if not prompt_tokens:
        return Tick(1000.0)
    ids = np.arange(prompt_tokens, dtype=np.uint32)
    params = SamplingParams(max_new_tokens=64)
    request = TokenizedGenerateReqInput(rid="r" * 32, input_ids=ids, sampling_params=params, seed=1)
    return Tick(1000.0, [request])


def make_books() -> CacheBooks:
    """Of a cache with a few nodes; the digest costs the same however many there are."""
    root = TreeNode(ROOT_ID, RadixKey([]))
    for number in range(1, 9):
        TreeNode(number, RadixKey(range(64 * number, 64 * number + 64))).attach(root, 64)
    counts: dict[str, Callable[[], int]] = {name: lambda: 4096 for name in ("L1", "L2", "epoch")}
    return CacheBooks(lambda: root, counts)


def be_rank(rank: int, size: int, port: int, ticks: int, out: Connection) -> None:
    """One rank, in a process of its own: sends what it measured, case after case."""
    torch.set_num_threads(1)
    envs.GLOO_SOCKET_IFNAME.set("lo")
    books = make_books()
    with closing(join(rank, size, port)) as group:
        for prompt_tokens in PROMPTS.values():
            for has_ballot in (False, True):
                out.send(_measure(group, books, make_tick(prompt_tokens), has_ballot, ticks))
        for reduce in WAYS.values():
            out.send(_measure_way(group, reduce, ticks))


def _measure(
    group: GlooGroup, books: CacheBooks, tick: Tick, has_ballot: bool, ticks: int
) -> dict[str, Any]:
    of_ticks, of_ballots = [], []
    cpu = psutil.Process()
    begun = began_cpu = 0.0
    for number in range(WARM_UP + ticks):
        if number == WARM_UP:
            group.reduce_min(torch.zeros(1, dtype=torch.int64))  # All begin together.
            group.num_collectives = group.num_bytes = 0
            begun, began_cpu = time.perf_counter(), sum(cpu.cpu_times()[:2])
        started = time.perf_counter()
        payload = group.broadcast(encode_tick(tick) if group.rank == 0 else None)
        decode_tick(payload)
        told = time.perf_counter()
        if has_ballot:
            progress = Progress(writes=1, prefetches=[PrefetchProgress(4, 2)] * 4)
            agree(progress, group, books)
        of_ticks.append(told - started)
        of_ballots.append(time.perf_counter() - told)
    seconds = time.perf_counter() - begun
    return {
        "tick_us": _percentiles(of_ticks[WARM_UP:]),
        "ballot_us": _percentiles(of_ballots[WARM_UP:]) if has_ballot else None,
        "both_us": round(seconds / ticks * 1e6, 1),
        "cpu_us": round((sum(cpu.cpu_times()[:2]) - began_cpu) / ticks * 1e6, 1),
        "collectives": group.num_collectives / ticks,
        "bytes": group.num_bytes / ticks,
    }


def _percentiles(seconds: list[float]) -> list[float]:
    return [round(float(np.percentile(seconds, p)) * 1e6, 1) for p in (10, 50, 90, 99)]


def reduce_ring(values: torch.Tensor, group: RankGroup) -> None:
    """gloo's own MIN: each rank waits for its neighbour 2 * (size - 1) times."""
    dist.all_reduce(values, dist.ReduceOp.MIN)


def reduce_gathered(values: torch.Tensor, group: RankGroup) -> None:
    """Everybody's values on all ranks, each of which takes the least."""
    table = torch.empty(group.size * len(values), dtype=values.dtype)
    dist.all_gather_into_tensor(table, values)
    values.copy_(table.view(group.size, -1).amin(0))


def reduce_at_rank_0(values: torch.Tensor, group: RankGroup) -> None:
    """Rank 0 gets all values, and tells the least."""
    rows = [torch.empty_like(values) for _ in range(group.size)] if group.rank == 0 else None
    dist.gather(values, rows, 0)
    if rows is not None:
        values.copy_(torch.stack(rows).amin(0))
    dist.broadcast(values, 0)


WAYS: Final[dict[str, Callable[[torch.Tensor, RankGroup], None]]] = {
    "all_reduce": reduce_ring,
    "all_gather": reduce_gathered,
    "gather and broadcast": reduce_at_rank_0,
}
"""To agree on the vector of a ballot."""


def _measure_way(
    group: RankGroup, reduce: Callable[[torch.Tensor, RankGroup], None], rounds: int
) -> dict[str, Any]:
    values = to_vector(Progress())
    cpu, began_cpu = psutil.Process(), 0.0
    times = []
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            began_cpu = sum(cpu.cpu_times()[:2])
        started = time.perf_counter()
        reduce(values, group)
        times.append(time.perf_counter() - started)
    cpu_us = (sum(cpu.cpu_times()[:2]) - began_cpu) / rounds * 1e6
    return {"us": _percentiles(times[WARM_UP:]), "cpu_us": round(cpu_us, 1)}


def run_ranks(size: int, ticks: int, out: str | None) -> None:
    """Measure one number of ranks, and print a line for each case."""
    spawn = multiprocessing.get_context("spawn")
    (port,) = get_free_ports(1)
    pipes, processes = [], []
    for rank in range(size):
        here, there = spawn.Pipe(duplex=False)
        process = spawn.Process(target=be_rank, args=(rank, size, port, ticks, there))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        for name in PROMPTS:
            for has_ballot in (False, True):
                first, *others = [pipe.recv() for pipe in pipes]
                slowest = max(others, key=lambda one: one["tick_us"][1])
                record = {
                    "ranks": size,
                    "case": name,
                    "ballot": has_ballot,
                    "collectives_per_tick": first["collectives"],
                    "bytes_per_tick": first["bytes"],
                    "us_per_tick": first["both_us"],
                    "cpu_us_per_tick_of_rank_0": first["cpu_us"],
                    "rank_0_tick_us_p10_p50_p90_p99": first["tick_us"],
                    "slowest_other_tick_us_p10_p50_p90_p99": slowest["tick_us"],
                    "rank_0_ballot_us_p10_p50_p90_p99": first["ballot_us"],
                    "load": round(os.getloadavg()[0], 1),
                }
                emit(record, out)
        for name in WAYS:
            first, *_ = [pipe.recv() for pipe in pipes]
            record = {
                "ranks": size,
                "way": name,
                "us_p10_p50_p90_p99": first["us"],
                "cpu_us_of_rank_0": first["cpu_us"],
                "load": round(os.getloadavg()[0], 1),
            }
            emit(record, out)
    finally:
        for process in processes:
            process.join(30)
            process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--ticks", type=int, default=2000)
    parser.add_argument("--out", type=writable_file)
    args = parser.parse_args()
    emit(provenance(), args.out)
    for size in args.ranks:
        run_ranks(size, args.ticks, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
