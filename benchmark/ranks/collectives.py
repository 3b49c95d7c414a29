"""Costs of a tick and a tick sync for the ranks of one machine, over gloo on loopback.

The ranks are processes. In each tick rank 0 broadcasts a `Tick`, as `Scheduler.run` does; in some
cases all ranks then sync, `TickSync`, as the prefix cache does while anything is under way.
A case has the times of rank 0 and of the slowest other rank, and the collectives and bytes of a
tick. Bytes are those passed to a collective, not those on the wire. Further cases compare ways to
reduce the tick sync's vector.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import psutil
import torch
import torch.distributed as dist

from benchmark.command import Command
from benchmark.report import Report
from benchmark.timing import percentile
from rigs.schedulers.rank_processes import run_ranks
from sglang.srt.distributed.parallel_state import (
    GroupCoordinator,
    get_attention_cp_group,
    get_world_group,
)
from sglang.srt.distributed.torch_rank_group import TorchRankGroup
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.tree.replicated_state import CacheState
from sglang.srt.mem_cache.tree.tick_sync import PrefetchProgress, Progress, TickSync, to_vector
from sglang.srt.mem_cache.tree.tree_node import ROOT_ID, TreeNode
from sglang.srt.messages.io_struct import (
    Tick,
    TokenizedGenerateReqInput,
    decode_tick,
    encode,
)
from sglang.srt.sampling.sampling_params import SamplingParams

WARM_UP: Final = 50
PROMPTS: Final = {"an empty tick": 0, "a prompt of 1,024": 1024, "a prompt of 32,768": 32768}
PRELOAD: Final = ("sglang.srt.mem_cache.tree.tick_sync", "sglang.srt.messages.io_struct")
_TURN: Final = 25
"""Rounds of one way in a row, before the next way."""


class CountedGroup(GroupCoordinator):
    """The ranks of another group, whose collectives on the CPU, and their bytes, are counted."""

    def __init__(self, group: GroupCoordinator) -> None:
        super().__init__(group.ranks, group.ranks[group.rank], group.device_group, group.cpu_group)
        self.clear()

    def clear(self) -> None:
        self.num_collectives = self.num_bytes = 0

    def broadcast_on_cpu(self, values: torch.Tensor) -> None:
        self._count(values)
        super().broadcast_on_cpu(values)

    def min_on_cpu(self, values: torch.Tensor) -> None:
        self._count(values)
        super().min_on_cpu(values)

    def _count(self, values: torch.Tensor) -> None:
        self.num_collectives += 1
        self.num_bytes += values.nbytes


def make_tick(prompt_tokens: int) -> Tick:
    """A tick with one request, or none."""
    if not prompt_tokens:
        return Tick(1000.0)
    ids = np.arange(prompt_tokens, dtype=np.uint32)
    params = SamplingParams(max_new_tokens=64)
    request = TokenizedGenerateReqInput(rid="r" * 32, input_ids=ids, sampling_params=params, seed=1)
    return Tick(1000.0, [request])


def make_state() -> CacheState:
    """State of a cache with a few nodes; their number does not change the digest's cost."""
    root = TreeNode(ROOT_ID, RadixKey([]))
    for number in range(1, 9):
        TreeNode(number, RadixKey(range(64 * number, 64 * number + 64))).attach(root, 64)
    counts: dict[str, Callable[[], int]] = {name: lambda: 4096 for name in ("L1", "L2", "epoch")}
    return CacheState(lambda: root, counts)


def measure_tick(prompt_tokens: int, has_tick_sync: bool, ticks: int) -> dict[str, Any]:
    """One rank's part of a case. Run by each process."""
    counted = CountedGroup(get_world_group())
    group = TorchRankGroup(counted, counted, get_attention_cp_group())
    state, tick = make_state(), make_tick(prompt_tokens)
    of_ticks, of_tick_syncs = [], []
    sync = TickSync(group, state, group.reduce_min, HiCacheMetrics(None).rank_lag)
    cpu = psutil.Process()
    begun = began_cpu = 0.0
    for number in range(WARM_UP + ticks):
        if number == WARM_UP:
            group.reduce_min(torch.zeros(1, dtype=torch.int64))  # All begin together.
            counted.clear()
            begun, began_cpu = time.perf_counter(), sum(cpu.cpu_times()[:2])
        started = time.perf_counter()
        payload = group.broadcast(encode(tick) if group.rank == 0 else None)
        decode_tick(payload)
        told = time.perf_counter()
        if has_tick_sync:
            progress = Progress(writes=1, prefetches=[PrefetchProgress(4, 2)] * 4)
            sync.agree(progress)
        of_ticks.append(told - started)
        of_tick_syncs.append(time.perf_counter() - told)
    seconds = time.perf_counter() - begun
    return {
        "tick_us": _percentiles(of_ticks[WARM_UP:]),
        "tick_sync_us": _percentiles(of_tick_syncs[WARM_UP:]) if has_tick_sync else None,
        "both_us": seconds / ticks * 1e6,
        "cpu_us": (sum(cpu.cpu_times()[:2]) - began_cpu) / ticks * 1e6,
        "collectives": counted.num_collectives / ticks,
        "bytes": counted.num_bytes / ticks,
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    """Microseconds."""
    return {f"p{percent}": percentile(seconds, percent) * 1e6 for percent in (10, 50, 90, 99)}


def reduce_ring(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """gloo's own MIN: each rank waits for its neighbour 2 * (size - 1) times."""
    dist.all_reduce(values, dist.ReduceOp.MIN, group=group)


def reduce_gathered(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather all values on all ranks; each takes the minimum."""
    rows = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(rows, values, group=group)
    values.copy_(torch.stack(rows).amin(0))


def reduce_at_rank_0(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather all values on rank 0, which broadcasts the minimum."""
    is_first = group.rank() == 0
    rows = [torch.empty_like(values) for _ in range(group.size())] if is_first else None
    dist.gather(values, rows, 0, group=group)
    if rows is not None:
        values.copy_(torch.stack(rows).amin(0))
    dist.broadcast(values, 0, group=group)


def reduce_over_star(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The same by messages: rank 0 sends the minimum to each rank itself, without a tree."""
    others = range(1, group.size())
    if group.rank():
        group.send([values], 0, 0).wait()
        group.recv([values], 0, 0).wait()
        return
    rows = [torch.empty_like(values) for _ in others]
    for work in [group.recv([row], rank, 0) for rank, row in zip(others, rows, strict=True)]:
        work.wait()
    values.copy_(torch.stack([values, *rows]).amin(0))
    for work in [group.send([values], rank, 0) for rank in others]:
        work.wait()


def reduce_as_the_engine(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Reduce as `TorchRankGroup` does."""
    get_world_group().min_on_cpu(values)


WAYS: Final[dict[str, Callable[[torch.Tensor, dist.ProcessGroup], None]]] = {
    "all_reduce": reduce_ring,
    "all_gather": reduce_gathered,
    "gather and broadcast": reduce_at_rank_0,
    "star of messages": reduce_over_star,
    "the engine's": reduce_as_the_engine,
}
"""Ways to agree on the vector of a tick sync."""


def measure_ways(rounds: int) -> dict[str, dict[str, Any]]:
    """One rank's part of all ways, which take turns. Run by each process."""
    group = get_world_group().cpu_group
    assert group is not None, "a single rank has no other to agree with"
    cpu = psutil.Process()
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    used = dict.fromkeys(WAYS, 0.0)
    for _ in range(WARM_UP // _TURN + rounds // _TURN):
        for name, reduce in WAYS.items():
            values = to_vector(Progress())
            began_cpu = sum(cpu.cpu_times()[:2])
            for _ in range(_TURN):
                started = time.perf_counter()
                reduce(values, group)
                times[name].append(time.perf_counter() - started)
            used[name] += sum(cpu.cpu_times()[:2]) - began_cpu
    return {
        name: {
            "us": _percentiles(taken[WARM_UP:]),
            "cpu_us": used[name] / len(taken) * 1e6,
        }
        for name, taken in times.items()
    }


def measure_size(size: int, ticks: int, report: Report) -> None:
    """Measure one number of ranks."""
    for name, prompt_tokens in PROMPTS.items():
        for has_tick_sync in (False, True):
            first, *others = run_ranks(
                size, measure_tick, prompt_tokens, has_tick_sync, ticks, preload=PRELOAD
            )
            slowest = max(others, key=lambda one: float(one["tick_us"]["p50"]))
            case = {"ranks": size, "tick": name, "tick_sync": has_tick_sync}
            report.add("collectives", first["collectives"], "1/tick", case)
            report.add("bytes", first["bytes"], "bytes/tick", case)
            load = round(os.getloadavg()[0], 1)
            report.add("duration", first["both_us"], "us/tick", case, load=load)
            report.add("cpu_of_rank_0", first["cpu_us"], "us/tick", case)
            for what, times in {
                "tick_of_rank_0": first["tick_us"],
                "tick_of_slowest_other": slowest["tick_us"],
                "tick_sync_of_rank_0": first["tick_sync_us"] or {},
            }.items():
                report.add_all("us", {f"{what}_{p}": us for p, us in times.items()}, case)
    for way, first in run_ranks(size, measure_ways, ticks, preload=PRELOAD)[0].items():
        case = {"ranks": size, "way": way}
        report.add_all("us", first["us"], case)
        report.add("cpu_of_rank_0", first["cpu_us"], "us", case)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--ticks", type=int, default=2000)


def run(args: argparse.Namespace, report: Report) -> None:
    for size in args.ranks:
        measure_size(size, args.ticks, report)


COMMAND: Final = Command(run=run, add_options=add_options, quick={"ranks": [2], "ticks": 25})
