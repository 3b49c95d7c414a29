"""The rig of `bench_transfer.py`: two streams timed by events, and a pair of pools.

Pools have the shape of Qwen3-8B's KV: 36 layers, 8 heads of 128, bf16. Pages are at random places
of both pools, their bytes are random, and copied bytes are compared. Loads are issued as by the
engine: layer by layer, with an event each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import torch

from sglang.srt.hardware_backend.device_runtime import CopyStream, device_runtime
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost

LAYERS, HEADS, HEAD_DIM = 36, 8, 128

Work: TypeAlias = Callable[[], None]


class Timeline:
    """Runs work on a load and a write stream and times it with events."""

    def __init__(self) -> None:
        runtime = device_runtime("cuda")
        self.load = runtime.make_copy_stream("bench-load")
        self.write = runtime.make_copy_stream("bench-write")

    def seconds(self, load: Work | None, write: Work | None, repeat: int) -> tuple[float, float]:
        """Median seconds of one direction: of the device, and of the CPU to issue it."""
        stream, work = (self.load, load) if load is not None else (self.write, write)
        assert work is not None
        device, issue = [], []
        for turn in range(repeat + 1):
            torch.accelerator.synchronize()
            started = time.perf_counter()
            start, end = self._submit(stream, work)
            issued = time.perf_counter() - started
            torch.accelerator.synchronize()
            if turn:  # The first turn compiles and warms up.
                device.append(start.elapsed_time(end) / 1e3)
                issue.append(issued)
        return statistics.median(device), statistics.median(issue)

    def copies_per_second(self, load: Work, write: Work, repeat: int) -> float:
        """Median of the copies per second of both directions together, while both are under way.

        Each direction has a thread that issues four copies. The measurement ends when the first
        direction ends; the unfinished copy of the other direction counts in part.
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
        # Fills the page-locked memory, which would be zeros otherwise.
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
        """Load with an event for each layer, as the engine does; `first` is the first event."""
        load = self.host.begin_load(self.device, self.host_slots, self.target, self.io_backend)
        for layer in range(LAYERS):
            load.issue(layer)
            event = torch.Event("cuda") if layer or first is None else first
            event.record()

    def check(self) -> None:
        """Assert that the loaded bytes equal the original ones."""
        for buffer in (*self.device.k_buffer, *self.device.v_buffer):
            raw = buffer.view(torch.int16)
            assert torch.equal(raw[self.target], raw[self.source]), "the bytes differ"
