"""L1 to L2 and back on CUDA: GB/s of each layout, I/O backend and page size, and the limit's part.

    python benchmark/hicache/bench_transfer.py [--tokens 8192] [--repeat 5] [--output FILE]
        [--no-compute] [--no-pinning] [--tune]

Pools have the shape of Qwen3-8B's KV: 36 layers, 8 heads of 128, bf16. Pages are scattered at
random over both pools, their bytes are random, and the bytes that arrive are compared. A load is
issued as the engine issues it: layer by layer with an event each. The limit is one large copy
between the same kinds of memory, measured in the same run; for both directions at once it is two
such copies. Further sections: how much a matrix product beside a copy slows down, how fast
page-locked memory comes up, and (`--tune`) how the kernel depends on its tuning. Prints one JSON
line per result, each with what was expected.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import torch

from sglang.srt.mem_cache.host_rows import TokenCopyTuning
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pinned_memory import allocate_pinned
from sglang.srt.utils.device import CopyStream

LAYERS, HEADS, HEAD_DIM = 36, 8, 128
PAIRS: Final = (
    ("layer_first", "kernel"),
    ("page_first", "kernel"),
    ("layer_first", "direct"),
    ("page_first_direct", "direct"),
)
PAGE_SIZES: Final = (64, 16, 1)
DIRECTIONS: Final = ("load", "backup", "both")

# Written before the first run. A kernel reads host memory in requests of 128 bytes, a copy engine
# in longer ones: some 7% more of the link are headers. Copy engines pay for each run.
EXPECTED: Final = {
    ("kernel", "load"): {64: 0.92, 16: 0.92, 1: 0.90},
    ("kernel", "backup"): {64: 0.95, 16: 0.95, 1: 0.93},
    ("kernel", "both"): {64: 0.88, 16: 0.88, 1: 0.86},
    ("direct", "load"): {64: 0.95, 16: 0.85, 1: 0.10},
    ("direct", "backup"): {64: 0.95, 16: 0.85, 1: 0.10},
    ("direct", "both"): {64: 0.92, 16: 0.80, 1: 0.10},
}

Work: TypeAlias = Callable[[], None]


class Timeline:
    """Runs work on a load and a write stream and times it with events."""

    def __init__(self) -> None:
        self.load = CopyStream("cuda", "bench-load")
        self.write = CopyStream("cuda", "bench-write")

    def seconds(self, load: Work | None, write: Work | None, repeat: int) -> tuple[float, float]:
        """Medians: from the first start to the last end on the device; of issuing on the CPU."""
        device, issue = [], []
        for turn in range(repeat + 1):
            torch.accelerator.synchronize()
            started = time.perf_counter()
            marks = [
                self._submit(stream, work)
                for stream, work in ((self.load, load), (self.write, write))
                if work is not None
            ]
            issued = time.perf_counter() - started
            torch.accelerator.synchronize()
            if turn:  # the first compiles and warms up
                first = marks[0][0]
                device.append(max(first.elapsed_time(end) for _, end in marks) / 1e3)
                issue.append(issued)
        return statistics.median(device), statistics.median(issue)

    def _submit(self, stream: CopyStream, work: Work) -> tuple[torch.Event, torch.Event]:
        start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))

        def timed() -> None:
            start.record()
            work()
            end.record()

        stream.submit(timed)
        return start, end


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

    def load(self) -> None:
        for layer in range(LAYERS):
            self.host.load_to_device_per_layer(
                self.device, self.host_slots, self.target, layer, self.io_backend
            )
            torch.Event("cuda").record()

    def check(self) -> None:
        """What was backed up and loaded is what was there."""
        for buffer in (*self.device.k_buffer, *self.device.v_buffer):
            raw = buffer.view(torch.int16)
            assert torch.equal(raw[self.target], raw[self.source]), "the bytes differ"

    def tune(self, tuning: TokenCopyTuning) -> None:
        copier = self.host._cuda_copier(self.device)
        copier.load_tuning = copier.backup_tuning = tuning


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
    works: dict[str, tuple[Work | None, Work | None]] = {
        "load": (up, None),
        "backup": (None, down),
        "both": (up, down),
    }
    return {
        name: size * (2 if name == "both" else 1) / timeline.seconds(*pair, repeat)[0] / 1e9
        for name, pair in works.items()
    }


def transfers(
    timeline: Timeline, limit: dict[str, float], tokens: int, repeat: int
) -> Iterator[dict[str, Any]]:
    """Every pair of layout and I/O backend, page size and direction."""
    for layout, io_backend in PAIRS:
        for page_size in PAGE_SIZES:
            pools = Pools(timeline, layout, io_backend, page_size, tokens)
            timeline.load.submit(pools.load)
            torch.accelerator.synchronize()
            pools.check()
            works: dict[str, tuple[Work | None, Work | None]] = {
                "load": (pools.load, None),
                "backup": (None, pools.backup),
                "both": (pools.load, pools.backup_elsewhere),
            }
            for name in DIRECTIONS:
                seconds, issue = timeline.seconds(*works[name], repeat)
                speed = pools.bytes * (2 if name == "both" else 1) / seconds / 1e9
                yield {
                    "section": "transfer",
                    "layout": layout,
                    "io_backend": io_backend,
                    "page_size": page_size,
                    "direction": name,
                    "gb_per_second": round(speed, 2),
                    "limit": round(limit[name], 2),
                    "expected_ratio": EXPECTED[io_backend, name][page_size],
                    "ratio": round(speed / limit[name], 3),
                    "issue_ms": round(issue * 1e3, 2),
                }
            pools.check()


def beside_compute(timeline: Timeline, tokens: int, repeat: int) -> Iterator[dict[str, Any]]:
    """A chain of matrix products alone, and with copies beside it all the while."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)

    def products() -> tuple[torch.Event, torch.Event]:
        start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(60):
            torch.mm(left, right, out=out)
        end.record()
        return start, end

    for layout, io_backend in PAIRS:
        pools = Pools(timeline, layout, io_backend, 64, tokens)
        for name, work, stream in (
            ("load", pools.load, timeline.load),
            ("backup", pools.backup, timeline.write),
        ):
            alone, together, speed = [], [], []
            for turn in range(repeat + 1):
                torch.accelerator.synchronize()
                marks = products()
                torch.accelerator.synchronize()
                copies = [timeline._submit(stream, work) for _ in range(5)]
                beside = products()
                torch.accelerator.synchronize()
                if turn:
                    alone.append(marks[0].elapsed_time(marks[1]))
                    together.append(beside[0].elapsed_time(beside[1]))
                    took = copies[0][0].elapsed_time(copies[-1][1]) / 1e3
                    speed.append(5 * pools.bytes / took / 1e9)
            slower = statistics.median(together) / statistics.median(alone) - 1
            yield {
                "section": "beside a matrix product",
                "layout": layout,
                "io_backend": io_backend,
                "direction": name,
                "expected_slowdown": 0.12 if io_backend == "kernel" else 0.03,
                "slowdown": round(slower, 3),
                "product_ms": round(statistics.median(alone) / 60, 3),
                "gb_per_second_of_the_copy": round(statistics.median(speed), 2),
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
    """The kernel's speed by thread blocks, bytes in flight and warps."""
    for layout in ("layer_first", "page_first"):
        pools = Pools(timeline, layout, "kernel", 64, tokens)
        for programs in (4, 8, 16, 32):
            for tile, warps in ((16384, 8), (32768, 8), (32768, 16), (65536, 16)):
                pools.tune(TokenCopyTuning(programs, tile, warps))
                row: dict[str, Any] = {"section": "tuning", "layout": layout}
                row |= {"programs": programs, "tile_bytes": tile, "num_warps": warps}
                up, _ = timeline.seconds(pools.load, None, repeat)
                down, _ = timeline.seconds(None, pools.backup, repeat)
                row["load"] = round(pools.bytes / up / 1e9 / limit["load"], 3)
                row["backup"] = round(pools.bytes / down / 1e9 / limit["backup"], 3)
                yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="moved by each copy")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output", help="also append the lines to this file")
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
    for row in transfers(timeline, limit, args.tokens, args.repeat):
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
