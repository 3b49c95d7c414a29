"""L1 to L2 and back on CUDA: GB/s of each layout, I/O backend and page size, and the limit's part.

    python benchmark/hicache/bench_transfer.py [--tokens 8192] [--repeat 5] [--output FILE]
        [--page-sizes 64 16 1] [--no-transfers] [--no-compute] [--no-pinning] [--tune]

Pools have the shape of Qwen3-8B's KV: 36 layers, 8 heads of 128, bf16. Pages are scattered at
random over both pools, their bytes are random, and the bytes that arrive are compared. A load is
issued as the engine issues it: layer by layer with an event each. The limit is one large copy
between the same kinds of memory, measured in the same run; for both directions at once it is two
such copies, and what counts is the sum of both speeds while both are under way. Further sections:
how much a matrix product beside a copy slows down, how fast page-locked memory comes up,
and who moves the bytes best (`--tune`). Prints one JSON line per result, each with what was
expected.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeAlias

import torch

from sglang.srt.mem_cache.host_copy_cuda import EngineUse
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pinned_memory import allocate_pinned
from sglang.srt.mem_cache.staged_copy import StagedLoadTuning
from sglang.srt.utils.device import CopyStream

LAYERS, HEADS, HEAD_DIM = 36, 8, 128
PAIRS: Final = (
    ("layer_first", "kernel"),
    ("page_first", "kernel"),
    ("layer_first", "direct"),
    ("page_first_direct", "direct"),
)

# Written before the run, from those before it. Copy engines take runs of 128 KB at 0.97 when
# loading; a kernel reads host memory in requests of 128 bytes, so some 7% more of the link are
# headers, and writes it at 0.94.
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
    # On this layout the same as with kernel.
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

Work: TypeAlias = Callable[[], None]


class Timeline:
    """Runs work on a load and a write stream and times it with events."""

    def __init__(self) -> None:
        self.load = CopyStream("cuda", "bench-load")
        self.write = CopyStream("cuda", "bench-write")

    def seconds(self, load: Work | None, write: Work | None, repeat: int) -> tuple[float, float]:
        """Median seconds of one direction: on the device, and to issue it on the CPU."""
        stream, work = (self.load, load) if load is not None else (self.write, write)
        assert work is not None
        device, issue = [], []
        for turn in range(repeat + 1):
            torch.accelerator.synchronize()
            started = time.perf_counter()
            start, end = self._submit(stream, work)
            issued = time.perf_counter() - started
            torch.accelerator.synchronize()
            if turn:  # the first compiles and warms up
                device.append(start.elapsed_time(end) / 1e3)
                issue.append(issued)
        return statistics.median(device), statistics.median(issue)

    def copies_per_second(self, load: Work, write: Work, repeat: int) -> float:
        """Copies of either direction per second while both are under way, median.

        Each direction is issued by a thread of its own, four times over. What is counted ends
        where the first direction ends; of the copy that is then under way in the other one, the
        part that fits.
        """
        rates = []
        with ThreadPoolExecutor(2) as threads:
            for turn in range(repeat + 1):
                torch.accelerator.synchronize()
                rounds = [
                    threads.submit(self._submit_four, self.load, load),
                    threads.submit(self._submit_four, self.write, write),
                ]
                marks = [round.result() for round in rounds]
                torch.accelerator.synchronize()
                if turn:
                    rates.append(_rate_of_both(marks))
        return statistics.median(rates)

    def _submit_four(self, stream: CopyStream, work: Work) -> list[tuple[torch.Event, torch.Event]]:
        return [self._submit(stream, work) for _ in range(4)]

    def _submit(self, stream: CopyStream, work: Work) -> tuple[torch.Event, torch.Event]:
        start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))

        def timed() -> None:
            start.record()
            work()
            end.record()

        stream.submit(timed)
        return start, end


def _rate_of_both(marks: list[list[tuple[torch.Event, torch.Event]]]) -> float:
    zero = marks[0][0][0]
    spans = [
        [(zero.elapsed_time(start), zero.elapsed_time(end)) for start, end in one] for one in marks
    ]
    first = max(one[0][0] for one in spans)
    last = min(one[-1][1] for one in spans)
    done = sum(
        max(0.0, min(end, last) - max(start, first)) / (end - start)
        for one in spans
        for start, end in one
    )
    return done / (last - first) * 1e3


class Pools:
    """A device pool and a host pool, and two disjoint scattered sets of pages in each."""

    def __init__(
        self, timeline: Timeline, layout: str, io_backend: str, page_size: int, tokens: int
    ) -> None:
        self.io_backend = io_backend
        self.page_size = page_size
        self.tokens = tokens
        self.device = MHATokenToKVPool(
            2 * tokens, page_size, torch.bfloat16, HEADS, HEAD_DIM, LAYERS, "cuda"
        )
        for buffer in (*self.device.k_buffer, *self.device.v_buffer):
            buffer.normal_()
        self.host = MHATokenToKVPoolHost(self.device, 1.0, 0, page_size, layout)
        self.bytes = tokens * self.host.size_per_token
        torch.manual_seed(0)
        device_pages = torch.randperm(2 * tokens // page_size) + 1
        host_pages = torch.randperm(2 * tokens // page_size)
        count = tokens // page_size
        self.source, self.target = (
            self._slots(pages).to("cuda") for pages in (device_pages[:count], device_pages[count:])
        )
        self.host_slots, self.other_host_slots = (
            self._slots(pages) for pages in (host_pages[:count], host_pages[count:])
        )
        # Page-locked memory that no copy has filled would be zeros.
        timeline.write.submit(self.backup)
        torch.accelerator.synchronize()

    def _slots(self, pages: torch.Tensor) -> torch.Tensor:
        return (pages[:, None] * self.page_size + torch.arange(self.page_size)).reshape(-1)

    def backup(self) -> None:
        self.host.backup_from_device_all_layer(
            self.device, self.host_slots, self.source, self.io_backend
        )

    def backup_elsewhere(self) -> None:
        self.host.backup_from_device_all_layer(
            self.device, self.other_host_slots, self.source, self.io_backend
        )

    def load(self, first: torch.Event | None = None) -> None:
        """An event a layer, as the engine has; `first` is the first layer's."""
        for layer in range(LAYERS):
            self.host.load_to_device_per_layer(
                self.device, self.host_slots, self.target, layer, self.io_backend
            )
            event = torch.Event("cuda") if layer or first is None else first
            event.record()

    def check(self) -> None:
        """What was backed up and loaded is what was there."""
        for buffer in (*self.device.k_buffer, *self.device.v_buffer):
            raw = buffer.view(torch.int16)
            assert torch.equal(raw[self.target], raw[self.source]), "the bytes differ"


def limits(timeline: Timeline, repeat: int) -> dict[str, float]:
    """GB/s of one large copy each way, and of two at once in sum."""
    size = 1 << 30
    host = [allocate_pinned(size) for _ in range(2)]
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
    page_sizes: Sequence[int],
    tokens: int,
    repeat: int,
) -> Iterator[dict[str, Any]]:
    """Every pair of layout and I/O backend, page size and direction."""
    for layout, io_backend in PAIRS:
        for page_size in page_sizes:
            pools = Pools(timeline, layout, io_backend, page_size, tokens)
            timeline.load.submit(pools.load)
            torch.accelerator.synchronize()
            pools.check()
            for name, speed, issue in speeds(timeline, pools, repeat):
                yield {
                    "section": "transfer",
                    "layout": layout,
                    "io_backend": io_backend,
                    "page_size": page_size,
                    "direction": name,
                    "gb_per_second": round(speed, 2),
                    "limit": round(limit[name], 2),
                    "expected_ratio": EXPECTED[layout, io_backend][name].get(page_size),
                    "ratio": round(speed / limit[name], 3),
                    "issue_ms": None if issue is None else round(issue * 1e3, 2),
                }
            pools.check()


def speeds(
    timeline: Timeline, pools: Pools, repeat: int
) -> Iterator[tuple[str, float, float | None]]:
    """Per direction: GB/s, and the seconds that issuing takes on the CPU."""
    seconds, issue = timeline.seconds(pools.load, None, repeat)
    yield "load", pools.bytes / seconds / 1e9, issue
    seconds, issue = timeline.seconds(None, pools.backup, repeat)
    yield "backup", pools.bytes / seconds / 1e9, issue
    rate = timeline.copies_per_second(pools.load, pools.backup_elsewhere, repeat)
    yield "both", pools.bytes * rate / 1e9, None


def slowdown(timeline: Timeline, work: Work, stream: CopyStream, repeat: int) -> float:
    """How much longer a chain of matrix products takes with copies beside it all the while."""
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
        # Alone before and after: the clock moves with the temperature.
        times = []
        for copies in (0, 6, 0):
            for _ in range(copies):
                stream.submit(work)
            products()  # a chip that was idle is faster for a while
            start, end = products()
            torch.accelerator.synchronize()
            times.append(start.elapsed_time(end))
        if turn:
            ratios.append(2 * times[1] / (times[0] + times[2]) - 1)
    return statistics.median(ratios)


def beside_compute(timeline: Timeline, tokens: int, repeat: int) -> Iterator[dict[str, Any]]:
    """What copies cost a matrix product of 8192 cubed in bf16, and what it costs them."""
    for layout, io_backend in PAIRS:
        pools = Pools(timeline, layout, io_backend, 64, tokens)
        for name, work, stream in (
            ("load", pools.load, timeline.load),
            ("backup", pools.backup, timeline.write),
        ):
            yield {
                "section": "beside a matrix product",
                "layout": layout,
                "io_backend": io_backend,
                "direction": name,
                "expected_slowdown": 0.01,
                "slowdown": round(slowdown(timeline, work, stream, repeat), 3),
            }


def pinning() -> Iterator[dict[str, Any]]:
    """Bringing up page-locked memory: this project's way, and torch's."""
    size = 8 << 30
    ways: dict[str, tuple[Callable[[], torch.Tensor], float]] = {
        "threads touch, then one registration": (lambda: allocate_pinned(size), 10.0),
        "torch.empty(pin_memory=True)": (
            lambda: torch.empty(size, dtype=torch.uint8, pin_memory=True),
            2.0,
        ),
    }
    for name, (make, expected) in ways.items():
        started = time.perf_counter()
        tensor = make()
        seconds = time.perf_counter() - started
        yield {
            "section": "page-locked memory",
            "how": name,
            "gib": size >> 30,
            "expected_gb_per_second": expected,
            "gb_per_second": round(tensor.nbytes / seconds / 1e9, 2),
        }
        del tensor


def tuning(
    timeline: Timeline, limit: dict[str, float], tokens: int, repeat: int
) -> Iterator[dict[str, Any]]:
    """Who moves the bytes, and in runs of which length: alone, and in both directions."""
    for layout, page_size, load_by_engine, backup_by_engine, run_kib in (
        ("layer_first", 64, False, False, 512),
        ("layer_first", 64, True, False, 512),
        ("layer_first", 64, True, True, 512),
        ("layer_first", 16, True, False, 512),
        ("page_first", 64, True, True, 512),
        ("page_first", 64, False, False, 512),
        ("page_first_direct", 64, True, True, 1024),
    ):
        pools = Pools(timeline, layout, "kernel", page_size, tokens)
        copier = pools.host._cuda_copier(pools.device)
        copier.engine_use["kernel"] = EngineUse(load=load_by_engine, backup=backup_by_engine)
        copier.staged_load_tuning = StagedLoadTuning(run_kib << 10)
        timeline.load.submit(pools.load)
        torch.accelerator.synchronize()
        pools.check()
        first = first_layer_seconds(timeline, pools, repeat)
        measured = list(speeds(timeline, pools, repeat))
        yield {
            "section": "tuning",
            "layout": layout,
            "page_size": page_size,
            "load_by": "engine" if load_by_engine else "kernel",
            "backup_by": "engine" if backup_by_engine else "kernel",
            "run_kib": run_kib,
            **{name: round(speed / limit[name], 3) for name, speed, _ in measured},
            "issue_ms": [round(issue * 1e3, 2) for _, _, issue in measured if issue is not None],
            "first_layer_ms": round(first * 1e3, 2),
        }


def first_layer_seconds(timeline: Timeline, pools: Pools, repeat: int) -> float:
    """Median seconds until the first layer of a load has come."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="moved by each copy")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output", help="also append the lines to this file")
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[64, 16, 1])
    parser.add_argument("--no-transfers", action="store_true")
    parser.add_argument("--no-compute", action="store_true")
    parser.add_argument("--no-pinning", action="store_true")
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    if not torch.accelerator.is_available():
        parser.error("needs a CUDA device")

    def emit(row: dict[str, Any]) -> None:
        line = json.dumps(row)
        print(line, flush=True)
        if args.output:
            with open(args.output, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    timeline = Timeline()
    emit(about())
    limit = limits(timeline, args.repeat)
    emit({"section": "limit", "gb_per_second": limit})
    if args.tune:
        for row in tuning(timeline, limit, args.tokens, 3):
            emit(row)
    if not args.no_transfers:
        for row in transfers(timeline, limit, args.page_sizes, args.tokens, args.repeat):
            emit(row)
    if not args.no_compute:
        for row in beside_compute(timeline, args.tokens, args.repeat):
            emit(row)
    if not args.no_pinning:
        for row in pinning():
            emit(row)
    emit({"section": "limit at the end", "gb_per_second": limits(timeline, args.repeat)})


def about() -> dict[str, Any]:
    """Command, commit and hardware."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        commit = ""
    gpu: Any = torch.get_device_module("cuda").get_device_name()
    return {
        "benchmark": "transfer",
        "command": " ".join(["python", *sys.argv]),
        "commit": commit or None,
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"{gpu}, {platform.machine()}",
        "torch": torch.__version__,
        "shape": f"{LAYERS} layers, {HEADS} heads of {HEAD_DIM}, bf16",
    }


if __name__ == "__main__":
    main()
