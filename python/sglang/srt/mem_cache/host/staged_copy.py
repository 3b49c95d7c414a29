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
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.constants import KIB, MIB
from sglang.srt.hardware_backend.device_runtime import DeviceRuntime, Event, device_runtime
from sglang.srt.mem_cache.host.copy_engine import CopyEngine
from sglang.srt.mem_cache.host.copy_runs import (
    BufferGrid,
    BufferRuns,
    PageRuns,
    PartRows,
    TokenCopyTuning,
    is_token_major,
    join_runs,
)
from sglang.srt.mem_cache.host.load_steps import layer_steps

_BUFFER_SHARE: Final = 1 / 1024
"""Share of the device's memory that one of four buffers takes. Pieces are long, since each costs
the CPU 0.1 ms and the kernels beside it a pause."""
_MIN_BUFFER_BYTES: Final = 32 * MIB
_MAX_BUFFER_BYTES: Final = 128 * MIB
_BUFFERS: Final = 2
_ALIGNMENT: Final = 512
_TUNING: Final = TokenCopyTuning(programs=264, tile_bytes=16384, num_warps=8)
"""The kernel takes the whole device for a short time. A kernel that held some multiprocessors for
longer would delay a matrix product all that time, since each of its blocks needs a whole one."""

PartGroups = Sequence[tuple[Sequence[PartRows], torch.Tensor]]
"""Parts with equal rows, and their table of device addresses."""


@dataclass(frozen=True, slots=True)
class StagedLoadTuning:
    """Lengths of the runs of a load. Longer runs hold more layers; the first layer comes later."""

    run_bytes: int = 512 * KIB
    state_bytes: int = 16 * MIB
    """For pages of one slot, as recurrent states are. A layer of one is on the link for 0.04 ms,
    and a piece takes the CPU 0.6 ms, for which the forward waits."""
    whole_bytes: int = 64 * MIB
    """Longest page of one slot whose layers come at once, if a load fits a buffer. Meanwhile the
    CPU prepares the forward, which takes it longer."""

    def layers_at_once(self, part: PartRows, page_size: int, *, fits: bool) -> int:
        """The fewest layers that make runs long enough, in equal steps. Only the first layer comes
        alone, because a forward waits for it.

        Args:
            fits: True if the load fits a buffer.
        """
        num_layers = len(part.device_addresses)
        is_short = page_size == 1 and part.rows.row_bytes * num_layers <= self.whole_bytes
        if is_token_major(part, page_size) or (fits and is_short):
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
    grids: list[BufferGrid] = field(default_factory=list)
    """Grids of a load; `runs` has the other pages."""
    num_layers: int = 0
    """Layers that `runs` and `grids` are made for."""


class _Stage:
    """Two buffers that are filled and emptied in turn, and the stream of the copy engine.

    Args:
        groups: The parts of a page, in one group or two.
        page_size: Rows of a page in one layer.
        layers: Layers of each page that a buffer holds.
    """

    def __init__(
        self,
        groups: PartGroups,
        page_size: int,
        layers: int,
        device: torch.device,
        engine: CopyEngine,
    ) -> None:
        self.groups = groups
        self.page_size = page_size
        self._runtime = device_runtime(device)
        self.side = self._runtime.make_side_stream()
        self._engine = engine
        parts = [part for group, _ in groups for part in group]
        token_bytes = sum(part.rows.row_bytes for part in parts) * layers
        self.chunk_pages = max(1, _buffer_bytes(self._runtime) // (token_bytes * page_size))
        self._parts = [PageRuns(part, page_size, layers, self.chunk_pages) for part in parts]
        self._offsets = [0]
        for part in self._parts:
            end = self._offsets[-1] + part.page_bytes * self.chunk_pages
            self._offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        self._pages_in_buffer = torch.arange(self.chunk_pages, device=device)
        self._buffers = [
            torch.empty(self._offsets[-1], dtype=torch.uint8, device=device)
            for _ in range(_BUFFERS)
        ]
        self._turn = 0
        self._emptied: list[Event | None] = [None] * _BUFFERS

    def next_buffer(self) -> tuple[int, Event]:
        """Address of the next buffer, and the event to record when it is empty again.

        The current stream waits until it is.
        """
        self._turn = (self._turn + 1) % _BUFFERS
        before = self._emptied[self._turn]
        if before is not None:
            before.wait()
        emptied = self._emptied[self._turn] = self._runtime.make_event()
        return self._buffers[self._turn].data_ptr(), emptied

    def chunks(self, host_pages: npt.NDArray[np.int64], device_slots: torch.Tensor) -> list[Chunk]:
        """The pages in pieces that fit a buffer."""
        step = self.chunk_pages
        return [
            Chunk(
                host_pages[start : start + step],
                device_slots[start * self.page_size : (start + step) * self.page_size],
            )
            for start in range(0, len(host_pages), step)
        ]

    def run_engine(self, buffer: int, chunk: Chunk, layers: range, *, to_host: bool) -> None:
        """Move `layers` of host pages from or to the buffer, in the current stream."""
        stream = self._runtime.current_stream_handle()
        if chunk.runs is None or chunk.num_layers != len(layers):
            chunk.runs, chunk.grids = self._runs_of(chunk.pages, len(layers), has_grids=not to_host)
            chunk.num_layers = len(layers)
        if to_host:
            self._engine.copy(chunk.runs.to_host(buffer), stream)
            return
        for grid in chunk.grids:
            self._engine.copy_grids(grid.to_buffer(buffer, layers.start), stream)
        self._engine.copy(chunk.runs.to_buffer(buffer, layers.start), stream)

    def _runs_of(
        self, pages: npt.NDArray[np.int64], num_layers: int, *, has_grids: bool
    ) -> tuple[BufferRuns, list[BufferGrid]]:
        runs, grids = [], []
        for part, offset in zip(self._parts, self._offsets, strict=False):
            is_left = None
            if has_grids:
                more, is_left = part.grids(pages, num_layers, offset)
                grids += more
            runs.append(part.runs(pages, num_layers, offset, is_left))
        return join_runs(runs), grids

    def run_kernel(self, buffer: int, chunk: Chunk, layers: range, *, to_buffer: bool) -> None:
        """Move `layers` between the buffer and the device pool."""
        from sglang.srt.mem_cache.host.token_copy import copy_tokens

        done = 0
        for group, table in self.groups:
            rows = self._parts[done].buffer_rows
            # The kernel counts layers from the pool's first one.
            base = buffer - layers.start * rows.layer_stride
            copy_tokens(
                tuple(base + offset for offset in self._offsets[done : done + len(group)]),
                rows,
                table,
                group[0].device_stride,
                self._pages_in_buffer[: len(chunk.pages)],
                self.page_size,
                chunk.slots,
                layers,
                to_host=to_buffer,
                tuning=_TUNING,
            )
            done += len(group)


class StagedBackup:
    """Backs up all layers of pages; arguments as of `CudaPageCopier`."""

    def __init__(
        self, groups: PartGroups, page_size: int, device: torch.device, engine: CopyEngine
    ) -> None:
        self._layers = range(len(groups[0][0][0].device_addresses))
        self._stage = _Stage(groups, page_size, len(self._layers), device, engine)

    def backup(self, host_pages: npt.NDArray[np.int64], device_slots: torch.Tensor) -> None:
        """Copy all layers of pages to the host.

        Args:
            host_pages: int64 `[n]`.
            device_slots: int64 `[n * page_size]` on the device.
        """
        stage = self._stage
        for chunk in stage.chunks(host_pages, device_slots):
            buffer, emptied = stage.next_buffer()
            stage.run_kernel(buffer, chunk, self._layers, to_buffer=True)
            stage.side.follow()
            with stage.side.use():
                stage.run_engine(buffer, chunk, self._layers, to_host=True)
                emptied.record()
        stage.side.join()


class StagedLoad:
    """Loads a few layers of pages at a time: enough for long runs."""

    def __init__(
        self,
        groups: PartGroups,
        page_size: int,
        device: torch.device,
        engine: CopyEngine,
        tuning: StagedLoadTuning,
    ) -> None:
        part = groups[0][0][0]
        most = min(tuning.whole_bytes, _buffer_bytes(device_runtime(device)))
        tuning = replace(tuning, whole_bytes=most)
        at_once = {
            fits: tuning.layers_at_once(part, page_size, fits=fits) for fits in (False, True)
        }
        num_layers = len(part.device_addresses)
        self._steps = {fits: layer_steps(num_layers, most) for fits, most in at_once.items()}
        self._stage = _Stage(groups, page_size, max(at_once.values()), device, engine)

    def steps(self, num_pages: int) -> tuple[range, ...]:
        """The layers that `load` should copy at once, for so many pages."""
        return self._steps[num_pages <= self._stage.chunk_pages]

    def start(self, host_pages: npt.NDArray[np.int64], device_slots: torch.Tensor) -> list[Chunk]:
        """Order a load after what the current stream has queued; returns the chunks for `load`.

        Args:
            host_pages: int64 `[n]`.
            device_slots: int64 `[n * page_size]` on the device.
        """
        self._stage.side.follow()
        return self._stage.chunks(host_pages, device_slots)

    def load(self, chunks: Sequence[Chunk], layers: range) -> None:
        """Copy a step's layers, or one layer, to the device."""
        stage = self._stage
        for chunk in chunks:
            with stage.side.use():
                buffer, emptied = stage.next_buffer()
                stage.run_engine(buffer, chunk, layers, to_host=False)
            stage.side.join()
            stage.run_kernel(buffer, chunk, layers, to_buffer=False)
            emptied.record()


def _buffer_bytes(runtime: DeviceRuntime) -> int:
    _, total = runtime.memory()
    return min(max(int(_BUFFER_SHARE * total), _MIN_BUFFER_BYTES), _MAX_BUFFER_BYTES)
