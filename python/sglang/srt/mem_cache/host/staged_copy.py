"""Copies pages through a device buffer.

The copy engine moves runs of host memory (`PageRuns`) to or from the buffer, in the order of host
memory. A kernel moves them between the buffer and the layers. The CPU need not know device slots,
and runs are as long as host memory allows. No kernel touches host memory. A kernel that writes it
fills queues that all multiprocessors share, and slowed down a matrix product at the same time by
half. A kernel that reads it gets 0.91 of the link's speed. See benchmark/results.

Everything here is called inside a copy stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.constants import KIB, MIB
from sglang.srt.hardware_backend.device_runtime import (
    DeviceRuntime,
    Event,
    SideStream,
    device_runtime,
)
from sglang.srt.mem_cache.host.buffer_runs import BufferGrid, BufferRuns, PageRuns
from sglang.srt.mem_cache.host.copy_engine import CopyEngine
from sglang.srt.mem_cache.host.copy_runs import PartRows, TokenCopyTuning, is_token_major
from sglang.srt.mem_cache.host.load_steps import equal_steps, layer_steps

_BUFFER_SHARE: Final = 1 / 1024
"""Share of the device's memory that one of four buffers takes. Pieces are long, since each costs
the CPU 0.1 ms and the kernels beside it a pause."""
_MIN_BUFFER_BYTES: Final = 32 * MIB
_MAX_BUFFER_BYTES: Final = 128 * MIB
_BUFFERS: Final = 2
_TUNING: Final = TokenCopyTuning(programs=264, tile_bytes=16384, num_warps=8)
"""The kernel takes the whole device for a short time. A kernel that held some multiprocessors for
longer would delay a matrix product all that time, since each of its blocks needs a whole one."""

PartGroups = Sequence[tuple[Sequence[PartRows], torch.Tensor]]
"""Parts with equal rows, and their table of device addresses."""


@dataclass(frozen=True, slots=True)
class LoadTuning:
    """The layers of a load that come together. Fewer steps take the thread that issues them less
    time; the first layer comes later."""

    step_bytes: int = 80 * 10**6
    """Bytes of a step of a short load, over all pools: 1.6 ms on a link of 50 GB/s. Launching the
    forward takes the CPU longer than that."""
    short_steps: int = 2
    """A load of more such steps is long. Its steps have as few layers as make long runs, because a
    forward waits for the first one."""
    run_bytes: int = 512 * KIB
    """For pages of tokens: shortest run of a long load."""
    state_bytes: int = 16 * MIB
    """For pages of one slot, as recurrent states are: shortest run of a long load. A layer of one
    is on the link for 0.04 ms, less than a piece takes the CPU."""

    def steps_of_short(self, load_bytes: int) -> int | None:
        """In how many steps each pool of a load comes; None: the load is long."""
        steps = max(1, -(-load_bytes // self.step_bytes))
        return steps if steps <= self.short_steps else None

    def layers_at_once(self, part: PartRows, page_size: int) -> int:
        """For a long load: the fewest layers that make runs long enough, in equal steps. Only the
        first layer comes alone, because a forward waits for it."""
        num_layers = len(part.device_addresses)
        if is_token_major(part, page_size):
            return num_layers
        least = self.state_bytes if page_size == 1 else self.run_bytes
        wanted = -(-least // (part.rows.row_bytes * page_size))
        steps = -(-num_layers // min(wanted, num_layers))
        return -(-num_layers // steps)


@dataclass(slots=True)
class Chunk:
    """Pages that fit a buffer."""

    pages: npt.NDArray[np.int64]
    """int64 `[n]`: pages on the host."""
    slots: torch.Tensor
    """int64 `[n * page_size]` on the device."""
    runs: BufferRuns | None = None
    """None: all pages are in grids."""
    grids: list[BufferGrid] = field(default_factory=list)
    """Grids of a load; `runs` has the other pages."""
    num_layers: int = 0
    """Layers that `runs` and `grids` are made for."""


class _Plan:
    """How a buffer is divided, for at most `layers` layers at once, and the copies that it takes.

    Args:
        groups: The parts of a page, in one group or several.
        page_size: Rows of a page in one layer.
        buffer_bytes: Bytes of the buffer, unless one page is longer.
        to_buffer: True for the kernel's direction of a backup.
    """

    def __init__(
        self,
        groups: PartGroups,
        page_size: int,
        layers: int,
        buffer_bytes: int,
        engine: CopyEngine,
        *,
        to_buffer: bool,
    ) -> None:
        from sglang.srt.mem_cache.host.token_copy import TokenCopy

        parts = [part for group, _ in groups for part in group]
        self.chunk_pages = max(1, buffer_bytes // _page_bytes(groups, page_size, layers))
        self._runs = PageRuns(parts, page_size, layers, self.chunk_pages)
        self.num_bytes = self._runs.num_bytes
        self._page_size = page_size
        self._engine = engine
        self._pages_in_buffer = torch.arange(self.chunk_pages, device=groups[0][1].device)
        self._kernels: list[tuple[TokenCopy, list[int], int]] = []
        """For each group its kernel, the places of its parts, and bytes from layer to layer."""
        done = 0
        for group, table in groups:
            rows = self._runs.buffer_rows[done]
            kernel = TokenCopy(
                rows, table, group[0].device_stride, page_size, to_host=to_buffer, tuning=_TUNING
            )
            kernel.compile()
            places = self._runs.offsets[done : done + len(group)]
            self._kernels.append((kernel, places, rows.layer_stride))
            done += len(group)

    def chunks(self, host_pages: npt.NDArray[np.int64], device_slots: torch.Tensor) -> list[Chunk]:
        """The pages in pieces that fit a buffer."""
        step = self.chunk_pages
        if len(host_pages) <= step:
            return [Chunk(host_pages, device_slots)] if len(host_pages) else []
        return [
            Chunk(
                host_pages[start : start + step],
                device_slots[start * self._page_size : (start + step) * self._page_size],
            )
            for start in range(0, len(host_pages), step)
        ]

    def fill(self, buffer: int, chunk: Chunk, layers: range, stream: int) -> None:
        """Move `layers` of host pages to the buffer by copy engines, in a stream (a handle)."""
        if chunk.num_layers != len(layers):
            chunk.grids, is_left = self._runs.grids(chunk.pages, len(layers))
            chunk.runs = self._runs.runs(chunk.pages, len(layers), is_left)
            chunk.num_layers = len(layers)
        for grid in chunk.grids:
            self._engine.copy_grids(grid.to_buffer(buffer, layers.start), stream)
        if chunk.runs is not None:
            self._engine.copy(chunk.runs.to_buffer(buffer, layers.start), stream)

    def empty_to_host(self, buffer: int, chunk: Chunk, layers: range, stream: int) -> None:
        """Move `layers`, from the pool's first one on, from the buffer to host pages by copy
        engines, in a stream (a handle)."""
        runs = self._runs.runs(chunk.pages, len(layers))
        assert runs is not None, "a chunk has pages"
        self._engine.copy(runs.to_host(buffer), stream)

    def run_kernels(self, buffer: int, chunk: Chunk, layers: range) -> None:
        """Move `layers` between the buffer and the device pool, in the current stream."""
        for kernel, places, layer_stride in self._kernels:
            # The kernel counts layers from the pool's first one.
            base = buffer - layers.start * layer_stride
            kernel.copy(
                [base + place for place in places], self._pages_in_buffer, chunk.slots, layers
            )


class _Buffers:
    """Two buffers that are filled and emptied in turn."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        runtime = device_runtime(device)
        self._buffers = [
            torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(_BUFFERS)
        ]
        self._emptied = [runtime.make_event() for _ in range(_BUFFERS)]
        self._turn = 0

    def next(self, filler: SideStream) -> tuple[int, Event]:
        """Address of the next buffer, and the event to record when it is empty again. `filler`
        waits until it is."""
        self._turn = (self._turn + 1) % _BUFFERS
        emptied = self._emptied[self._turn]
        filler.wait(emptied)
        return self._buffers[self._turn].data_ptr(), emptied


class StagedBackup:
    """Backs up all layers of pages; arguments as of `CudaPageCopier`."""

    def __init__(
        self, groups: PartGroups, page_size: int, device: torch.device, engine: CopyEngine
    ) -> None:
        self._runtime = device_runtime(device)
        self._layers = range(_num_layers(groups))
        self._plan = _Plan(
            groups,
            page_size,
            len(self._layers),
            _buffer_bytes(self._runtime),
            engine,
            to_buffer=True,
        )
        self._buffers = _Buffers(self._plan.num_bytes, device)
        self._side = self._runtime.make_side_stream()

    def backup(self, host_pages: npt.NDArray[np.int64], device_slots: torch.Tensor) -> None:
        """Copy all layers of pages to the host.

        Args:
            host_pages: int64 `[n]`.
            device_slots: int64 `[n * page_size]` on the device.
        """
        here = self._runtime.here()
        chunks = self._plan.chunks(host_pages, device_slots)
        # Two streams let the kernel fill a buffer while the engine empties the other one.
        side = here if len(chunks) == 1 and here.handle else self._side
        for chunk in chunks:
            buffer, emptied = self._buffers.next(here)
            self._plan.run_kernels(buffer, chunk, self._layers)
            if side is not here:
                side.follow(here)
            self._plan.empty_to_host(buffer, chunk, self._layers, side.handle)
            side.record(emptied)
        if side is not here:
            here.follow(side)


class StagedLoad:
    """Loads some layers of pages at a time."""

    def __init__(
        self,
        groups: PartGroups,
        page_size: int,
        device: torch.device,
        engine: CopyEngine,
        tuning: LoadTuning,
    ) -> None:
        self._runtime = device_runtime(device)
        self._tuning = tuning
        self._num_layers = _num_layers(groups)
        self._at_once = tuning.layers_at_once(groups[0][0][0], page_size)
        buffer_bytes = _buffer_bytes(self._runtime)

        def plan(layers: int) -> _Plan:
            return _Plan(groups, page_size, layers, buffer_bytes, engine, to_buffer=False)

        self._page_bytes = _page_bytes(groups, page_size, self._num_layers)
        self._is_state = page_size == 1
        has_whole = self._page_bytes <= buffer_bytes
        self._long = plan(self._at_once)
        """For pages that fit no buffer together."""
        self._whole = self._long
        """For pages of all layers that fit a buffer, if one does."""
        if has_whole and self._at_once < self._num_layers:
            self._whole = plan(self._num_layers)
        self._most_whole = self._whole.chunk_pages if has_whole else 0
        self._buffers = _Buffers(max(self._long.num_bytes, self._whole.num_bytes), device)
        self._side = self._runtime.make_side_stream()
        self._long_steps = layer_steps(self._num_layers, self._at_once)

    def steps(self, num_pages: int, load_bytes: int) -> tuple[range, ...]:
        """The layers that `start` should copy at once.

        Args:
            num_pages: Pages of this pool.
            load_bytes: Bytes that the load brings to all pools.
        """
        count = self._tuning.steps_of_short(load_bytes)
        if count is None and self._is_state:
            # A state is short beside the tokens of such a load: steps would gain little.
            own = self._tuning.steps_of_short(num_pages * self._page_bytes)
            count = own if own == 1 else None
        fits = num_pages <= self._most_whole
        if count is None or not fits or self._at_once == self._num_layers:
            return self._long_steps
        return equal_steps(self._num_layers, count)

    def start(
        self,
        host_pages: npt.NDArray[np.int64],
        device_slots: torch.Tensor,
        steps: Sequence[range],
    ) -> StagedPages:
        """Order a load after what the current stream has queued.

        Args:
            host_pages: int64 `[n]`.
            device_slots: int64 `[n * page_size]` on the device.
            steps: See `steps`.
        """
        plan = self._whole if len(host_pages) <= self._most_whole else self._long
        chunks, here = plan.chunks(host_pages, device_slots), self._runtime.here()
        # Two streams let the engine fill a buffer while the kernel empties the other one.
        is_short = len(chunks) * len(steps) <= self._tuning.short_steps
        side = here if is_short and here.handle else self._side
        if side is not here:
            side.follow(here)
        return StagedPages(plan, self._buffers, chunks, here, side)


@dataclass(frozen=True, slots=True)
class StagedPages:
    """Pages on their way to the device."""

    _plan: _Plan
    _buffers: _Buffers
    _chunks: list[Chunk]
    _here: SideStream
    """The stream that was current when the load was started, and is so again for each step."""
    _side: SideStream
    """The stream of the copy engine; the same one for a short load. Batches of copies need one
    other than the default one."""

    def load(self, layers: range) -> None:
        """Copy a step's layers, or one layer, to the device."""
        here, side = self._here, self._side
        for chunk in self._chunks:
            buffer, emptied = self._buffers.next(side)
            self._plan.fill(buffer, chunk, layers, side.handle)
            if side is not here:
                here.follow(side)
            self._plan.run_kernels(buffer, chunk, layers)
            here.record(emptied)


def _num_layers(groups: PartGroups) -> int:
    return len(groups[0][0][0].device_addresses)


def _page_bytes(groups: PartGroups, page_size: int, layers: int) -> int:
    return sum(part.rows.row_bytes for group, _ in groups for part in group) * layers * page_size


def _buffer_bytes(runtime: DeviceRuntime) -> int:
    _, total = runtime.memory()
    return min(max(int(_BUFFER_SHARE * total), _MIN_BUFFER_BYTES), _MAX_BUFFER_BYTES)
