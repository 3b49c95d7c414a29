"""L1 to L2 and back: GB/s by layout, I/O backend and page size, and share of the limit.

`copy_rig.py` has the pools and the timing. The limit is one large copy between the same kinds
of memory, measured in the same run. The limit of both directions at once is the sum of the speeds
of two such copies while both are under way. Further sections: the slowdown of a matrix product
beside a copy, the speed of allocating page-locked memory, and the choice between kernels and copy
engines (`--tune`). Each figure stands beside the expected one.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from benchmark.command import Command
from benchmark.gpu_hicache.copy_rig import KINDS, KV, Pools, PoolsTogether, Timeline, Work
from benchmark.report import Report
from benchmark.timing import seconds_of
from sglang.srt.hardware_backend.device_runtime import CopyStream, device_runtime
from sglang.srt.mem_cache.host.host_copy_cuda import CudaPageCopier, EngineUse
from sglang.srt.mem_cache.host.host_memory import allocate_pinned
from sglang.srt.mem_cache.host.staged_copy import LoadTuning

PAIRS: Final = (
    ("layer_first", "kernel"),
    ("page_first", "kernel"),
    ("layer_first", "direct"),
    ("page_first_direct", "direct"),
)

# Written before the run, from earlier ones. Copy engines load runs of 128 KB at 0.97. A kernel
# reads host memory in requests of 128 bytes, whose headers take 7% more of the link, and writes at
# 0.94.
EXPECTED: Final[dict[tuple[str, str], dict[str, dict[int, float]]]] = {
    ("layer_first", "kernel"): {
        "load": {64: 0.97, 16: 0.91, 1: 0.91},
        "backup": {64: 0.94, 16: 0.94, 1: 0.93},
        "both": {64: 0.85, 16: 0.77, 1: 0.77},
    },
    ("page_first", "kernel"): {
        "load": {64: 0.91, 16: 0.91, 1: 0.91},
        "backup": {64: 0.97, 16: 0.95, 1: 0.93},
        "both": {64: 0.78, 16: 0.76, 1: 0.76},
    },
    # Same as with the kernel on this layout.
    ("layer_first", "direct"): {
        "load": {64: 0.95, 16: 0.91, 1: 0.91},
        "backup": {64: 0.94, 16: 0.94, 1: 0.93},
        "both": {64: 0.85, 16: 0.77, 1: 0.77},
    },
    ("page_first_direct", "direct"): {
        "load": {64: 0.97, 16: 0.97, 4: 0.96, 1: 0.91},
        "backup": {64: 0.97, 16: 0.95, 4: 0.92, 1: 0.79},
        "both": {64: 0.97, 16: 0.97, 4: 0.90, 1: 0.59},
    },
}
# Runs of latent rows have 74 KB, of indexer keys 16 KB, of states 2 MB and 48 KB.
OTHERS_EXPECTED: Final[dict[str, dict[str, dict[int, float]]]] = {
    "latent": {"load": {64: 0.93}, "backup": {64: 0.94}, "both": {64: 0.82}},
    "indexer": {"load": {64: 0.91}, "backup": {64: 0.93}, "both": {64: 0.78}},
    "states": {"load": {1: 0.95}, "backup": {1: 0.95}, "both": {1: 0.85}},
    # 8,192 tokens take 12.7 ms; the CPU's start takes one of them.
    "latent+indexer": {"load": {64: 0.92}, "backup": {64: 0.93}, "both": {64: 0.95}},
}


def limits(timeline: Timeline, repeat: int) -> dict[str, float]:
    """GB/s of one large copy in each direction, and the sum of two at once."""
    size = 1 << 30
    host = [allocate_pinned(size, device_runtime("cuda")) for _ in range(2)]
    device = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    for one in host:
        one.copy_(device[0].view(torch.int64).random_().view(torch.uint8))

    def up() -> None:
        device[0].copy_(host[0], non_blocking=True)

    def down() -> None:
        host[1].copy_(device[1], non_blocking=True)

    device[1].copy_(device[0])
    return {
        "load": size / timeline.seconds(up, None, repeat)[0] / 1e9,
        "backup": size / timeline.seconds(None, down, repeat)[0] / 1e9,
        "both": size * timeline.copies_per_second(up, down, repeat) / 1e9,
    }


def transfers(
    timeline: Timeline,
    limit: dict[str, float],
    kinds: Sequence[str],
    page_sizes: Sequence[int],
    tokens: int,
    repeat: int,
    report: Report,
) -> None:
    """Measure each pair of layout and I/O backend, for each page size and direction."""
    for kind, (layout, io_backend) in itertools.product(kinds, PAIRS):
        for page_size in page_sizes if kind != "states" else [1]:
            pools = make_rig(timeline, kind, layout, io_backend, page_size, tokens)
            expected = EXPECTED[layout, io_backend] if kind == "kv" else OTHERS_EXPECTED[kind]
            timeline.load.submit(pools.load)
            torch.accelerator.synchronize()
            pools.check()
            for name, speed, issue in speeds(timeline, pools, repeat):
                case = {
                    "pool": kind,
                    "layout": layout,
                    "io_backend": io_backend,
                    "page_size": page_size,
                    "direction": name,
                }
                report.add("copy", speed, "GB/s", case, limit=limit[name])
                report.add("of_limit", speed / limit[name], "ratio", case,
                           expected=expected[name].get(page_size))  # fmt: skip
                if issue is not None:
                    report.add("issue", issue * 1e3, "ms", case)
            pools.check()


def make_rig(
    timeline: Timeline, kind: str, layout: str, io_backend: str, page_size: int, tokens: int
) -> Pools | PoolsTogether:
    """The pools of one kind, or of the kinds that are joined by `+`."""
    made = [
        Pools(timeline, KINDS[one], layout, io_backend, page_size, tokens)
        for one in kind.split("+")
    ]
    return PoolsTogether(made) if len(made) > 1 else made[0]


def speeds(
    timeline: Timeline, pools: Pools | PoolsTogether, repeat: int
) -> Iterator[tuple[str, float, float | None]]:
    """For each direction its name, GB/s, and the CPU's seconds to issue a copy."""
    seconds, issue = timeline.seconds(pools.load, None, repeat)
    yield "load", pools.bytes / seconds / 1e9, issue
    seconds, issue = timeline.seconds(None, pools.backup, repeat)
    yield "backup", pools.bytes / seconds / 1e9, issue
    rate = timeline.copies_per_second(pools.load, pools.backup_elsewhere, repeat)
    yield "both", pools.bytes * rate / 1e9, None


def slowdown(timeline: Timeline, work: Work, stream: CopyStream, repeat: int) -> float:
    """The relative slowdown of a chain of matrix products with copies beside all of it."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)

    def products() -> tuple[torch.Event, torch.Event]:
        start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(30):
            torch.mm(left, right, out=out)
        end.record()
        return start, end

    ratios = []
    for turn in range(repeat + 1):
        # Alone before and after, because the clock changes with the temperature.
        times = []
        for copies in (0, 6, 0):
            for _ in range(copies):
                stream.submit(work)
            products()  # A chip that was idle is faster for a while.
            start, end = products()
            torch.accelerator.synchronize()
            times.append(start.elapsed_time(end))
        if turn:
            ratios.append(2 * times[1] / (times[0] + times[2]) - 1)
    return statistics.median(ratios)


def beside_compute(timeline: Timeline, tokens: int, repeat: int, report: Report) -> None:
    """The slowdown of a matrix product of 8192 cubed in bf16 beside copies."""
    for layout, io_backend in PAIRS:
        pools = Pools(timeline, KV, layout, io_backend, 64, tokens)
        for name, work, stream in (
            ("load", pools.load, timeline.load),
            ("backup", pools.backup, timeline.write),
        ):
            case = {"layout": layout, "io_backend": io_backend, "direction": name}
            found = slowdown(timeline, work, stream, repeat)
            report.add("slowdown_of_product", found, "share", case, expected=0.01)


def pinning(report: Report) -> None:
    """The speed of allocating page-locked memory, by this engine and by torch."""
    size = 8 << 30
    ways: dict[str, tuple[Callable[[], torch.Tensor], float]] = {
        "threads touch, then one registration": (
            lambda: allocate_pinned(size, device_runtime("cuda")),
            10.0,
        ),
        "torch.empty(pin_memory=True)": (
            lambda: torch.empty(size, dtype=torch.uint8, pin_memory=True),
            2.0,
        ),
    }
    for name, (make, expected) in ways.items():
        rate = size / seconds_of(make) / 1e9
        report.add("page_locked_memory", rate, "GB/s", {"how": name}, expected=expected)


def tuning(
    timeline: Timeline, limit: dict[str, float], tokens: int, repeat: int, report: Report
) -> None:
    """Measure kernels and copy engines, with several run lengths, alone and in both directions."""
    for layout, page_size, load_by_engine, backup_by_engine, run_kib in (
        ("layer_first", 64, False, False, 512),
        ("layer_first", 64, True, False, 512),
        ("layer_first", 64, True, True, 512),
        ("layer_first", 16, True, False, 512),
        ("page_first", 64, True, True, 512),
        ("page_first", 64, False, False, 512),
        ("page_first_direct", 64, True, True, 1024),
    ):
        pools = Pools(timeline, KV, layout, "kernel", page_size, tokens)
        copier = pools.host._copier_of(pools.device)
        assert isinstance(copier, CudaPageCopier)
        copier.engine_use["kernel"] = EngineUse(load=load_by_engine, backup=backup_by_engine)
        copier.tuning_of_loads = LoadTuning(run_bytes=run_kib << 10)
        timeline.load.submit(pools.load)
        torch.accelerator.synchronize()
        pools.check()
        first = first_layer_seconds(timeline, pools, repeat)
        measured = list(speeds(timeline, pools, repeat))
        case = {
            "layout": layout,
            "page_size": page_size,
            "load_by": "engine" if load_by_engine else "kernel",
            "backup_by": "engine" if backup_by_engine else "kernel",
            "run_kib": run_kib,
        }
        for name, speed, issue in measured:
            report.add(f"{name}_of_limit", speed / limit[name], "ratio", case)
            if issue is not None:
                report.add(f"{name}_issue", issue * 1e3, "ms", case)
        report.add("first_layer", first * 1e3, "ms", case)


def first_layer_seconds(timeline: Timeline, pools: Pools, repeat: int) -> float:
    """Median seconds until the first layer of a load has landed."""
    times = []
    for _ in range(repeat):
        torch.accelerator.synchronize()
        start, first = (torch.Event("cuda", enable_timing=True) for _ in range(2))

        def timed(start: torch.Event = start, first: torch.Event = first) -> None:
            start.record()
            pools.load(first)

        timeline.load.submit(timed)
        torch.accelerator.synchronize()
        times.append(start.elapsed_time(first) / 1e3)
    return statistics.median(times)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of each copy")
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[64, 16, 1])
    parser.add_argument("--pools", choices=[*KINDS, "latent+indexer"], nargs="+", default=["kv"])
    parser.add_argument("--no-transfers", action="store_true")
    parser.add_argument("--no-compute", action="store_true")
    parser.add_argument("--no-pinning", action="store_true")
    parser.add_argument("--tune", action="store_true")


def run(args: argparse.Namespace, report: Report) -> None:
    timeline, repeat = Timeline(), args.repeats
    limit = limits(timeline, repeat)
    report.add_all("GB/s", limit, {"large_copy": "at the begin"})
    if args.tune:
        tuning(timeline, limit, args.tokens, 3, report)
    if not args.no_transfers:
        transfers(timeline, limit, args.pools, args.page_sizes, args.tokens, repeat, report)
    if not args.no_compute:
        beside_compute(timeline, args.tokens, repeat, report)
    if not args.no_pinning:
        pinning(report)
    report.add_all("GB/s", limits(timeline, repeat), {"large_copy": "at the end"})


_QUICK: Final = {"page_sizes": [64], "repeats": 2, "no_compute": True, "no_pinning": True}
COMMAND: Final = Command(
    run=run, add_options=add_options, repeats=5, devices=("cuda",), quick=_QUICK
)
