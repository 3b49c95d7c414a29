"""Copies pages through a device buffer, where a page is one run of host memory per part.

The copy engine moves long runs between host memory and the buffer, in the order that host memory
has; a kernel moves them between the buffer and the layers. Long runs go at the speed of the link
(a layer's part of a page, one by one, at 79% to 89% of it when backing up, and a thread is busy
for most of that time issuing them). And no kernel touches host memory: one that writes it fills
queues that all multiprocessors share, and slowed down a matrix product beside it by half, and one
that reads it gets 91% of the link. See benchmark/results.

Everything here is called inside a copy stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.constants import KIB, MIB
from sglang.srt.mem_cache.copy_engine import CopyEngine
from sglang.srt.mem_cache.copy_runs import merge_pieces
from sglang.srt.mem_cache.host_rows import PartRows, TokenCopyTuning
from sglang.srt.utils.device import Event, SideStream, current_stream_handle, make_event

_BUFFER_BYTES: Final = 32 * MIB
_BUFFERS: Final = 2
_LOAD_RUN_BYTES: Final = 512 * KIB
_TUNING: Final = TokenCopyTuning(programs=32, tile_bytes=16384, num_warps=8)

PartGroups = Sequence[tuple[Sequence[PartRows], torch.Tensor]]
"""Parts with equal rows, and their table of device addresses."""


def pages_are_runs(part: PartRows, page_size: int) -> bool:
    """Whether a page of all layers is one run of host memory."""
    rows = part.rows
    pitch = rows.page_stride if rows.page_tokens > 1 else rows.token_stride * page_size
    return pitch == len(part.device_addresses) * page_size * rows.row_bytes


def layers_are_runs(part: PartRows, page_size: int) -> bool:
    """Whether, besides, consecutive layers of a page are one run."""
    layer = page_size * part.rows.row_bytes
    return pages_are_runs(part, page_size) and (
        part.rows.layer_stride == layer or len(part.device_addresses) == 1
    )


class _Stage:
    """Two buffers that are filled and emptied in turn, and the stream of the copy engine.

    Args:
        groups: K and V, in one group or two.
        page_size: Tokens.
        layers: That a buffer holds of each page.
        device: Of the device pool.
    """

    def __init__(
        self, groups: PartGroups, page_size: int, layers: int, device: torch.device
    ) -> None:
        self.groups = groups
        self.page_size = page_size
        self.device = device
        self.parts = [part for group, _ in groups for part in group]
        self.page_bytes = [part.rows.row_bytes * page_size * layers for part in self.parts]
        self.chunk_pages = max(1, _BUFFER_BYTES // sum(self.page_bytes))
        self.side = SideStream(device)
        self._rows_in_buffer = torch.arange(self.chunk_pages * page_size, device=device)
        self._buffers = [
            [
                torch.empty(self.chunk_pages * size, dtype=torch.uint8, device=device)
                for size in sizes
            ]
            for sizes in [self.page_bytes] * _BUFFERS
        ]
        self._turn = 0
        self._emptied: list[Event | None] = [None] * _BUFFERS

    def next_buffer(self) -> tuple[list[int], Event]:
        """Addresses of the next buffer's parts, and the event to record when it is empty again.

        The current stream waits until it is.
        """
        self._turn = (self._turn + 1) % _BUFFERS
        before = self._emptied[self._turn]
        if before is not None:
            before.wait()
        emptied = self._emptied[self._turn] = make_event(self.device)
        return [buffer.data_ptr() for buffer in self._buffers[self._turn]], emptied

    def chunks(
        self, host_pages: npt.NDArray[np.int64], device_slots: torch.Tensor
    ) -> list[tuple[npt.NDArray[np.int64], torch.Tensor]]:
        """The pages in pieces that fit a buffer."""
        step = self.chunk_pages
        return [
            (
                host_pages[start : start + step],
                device_slots[start * self.page_size : (start + step) * self.page_size],
            )
            for start in range(0, len(host_pages), step)
        ]

    def run_kernel(
        self,
        buffer: Sequence[int],
        parts: Sequence[PartRows],
        slots: torch.Tensor,
        layers: range,
        *,
        to_buffer: bool,
    ) -> None:
        """Move `layers` between the buffer, whose rows `parts` describe, and the device pool."""
        from sglang.srt.mem_cache.kernels.token_copy import copy_tokens

        done = 0
        for group, table in self.groups:
            copy_tokens(
                tuple(buffer[done : done + len(group)]),
                parts[done].rows,
                table,
                self._rows_in_buffer[: len(slots)],
                slots,
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
        self._engine = engine
        self._num_layers = len(groups[0][0][0].device_addresses)
        self._stage = _Stage(groups, page_size, self._num_layers, device)

    def backup(self, host_pages: npt.NDArray[np.int64], device_slots: torch.Tensor) -> None:
        """Copy all layers of pages to the host.

        Args:
            host_pages: int64 `[n]`.
            device_slots: int64 `[n * page_size]` on the device.
        """
        stage = self._stage
        for pages, slots in stage.chunks(host_pages, device_slots):
            buffer, emptied = stage.next_buffer()
            stage.run_kernel(buffer, stage.parts, slots, range(self._num_layers), to_buffer=True)
            stage.side.follow()
            with stage.side.use():
                self._send(buffer, pages)
                emptied.record()
        stage.side.join()

    def _send(self, buffer: Sequence[int], pages: npt.NDArray[np.int64]) -> None:
        stream = current_stream_handle(self._stage.device)
        places = np.arange(len(pages), dtype=np.int64)
        for part, address, size in zip(
            self._stage.parts, buffer, self._stage.page_bytes, strict=True
        ):
            runs = merge_pieces(part.host_address + pages * size, address + places * size, size)
            self._engine.copy(runs, stream)


class StagedLoad:
    """Loads a few layers of pages at a time: as many as make a run worth its while."""

    def __init__(
        self, groups: PartGroups, page_size: int, device: torch.device, engine: CopyEngine
    ) -> None:
        self._engine = engine
        first = groups[0][0][0]
        self._num_layers = len(first.device_addresses)
        wanted = -(-_LOAD_RUN_BYTES // (first.rows.row_bytes * page_size))
        steps = -(-self._num_layers // min(wanted, self._num_layers))
        self.layers_at_once = -(-self._num_layers // steps)
        self._stage = _Stage(groups, page_size, self.layers_at_once, device)
        self._in_buffer = [self._rows_of_buffer(part) for part in self._stage.parts]

    def start(self) -> None:
        """Order a load after what the current stream has queued."""
        self._stage.side.follow()

    def load(
        self, host_pages: npt.NDArray[np.int64], device_slots: torch.Tensor, layers: range
    ) -> None:
        """Copy at most `layers_at_once` consecutive layers to the device.

        Args:
            host_pages: int64 `[n]`.
            device_slots: int64 `[n * page_size]` on the device.
            layers: Which.
        """
        stage = self._stage
        for pages, slots in stage.chunks(host_pages, device_slots):
            with stage.side.use():
                buffer, emptied = stage.next_buffer()
                self._fetch(buffer, pages, layers)
            stage.side.join()
            # The kernel counts layers from the pool's first one.
            bases = [
                address - layers.start * part.rows.layer_stride
                for address, part in zip(buffer, self._in_buffer, strict=True)
            ]
            stage.run_kernel(bases, self._in_buffer, slots, layers, to_buffer=False)
            emptied.record()

    def _fetch(self, buffer: Sequence[int], pages: npt.NDArray[np.int64], layers: range) -> None:
        stream = current_stream_handle(self._stage.device)
        places = np.arange(len(pages), dtype=np.int64)
        for part, address, pitch in zip(
            self._stage.parts, buffer, self._stage.page_bytes, strict=True
        ):
            layer = pitch // self.layers_at_once
            source = part.host_address + pages * (layer * self._num_layers) + layers.start * layer
            runs = merge_pieces(address + places * pitch, source, len(layers) * layer)
            self._engine.copy(runs, stream)

    def _rows_of_buffer(self, part: PartRows) -> PartRows:
        layer = part.rows.row_bytes * self._stage.page_size
        rows = replace(
            part.rows,
            page_tokens=self._stage.page_size,
            page_stride=layer * self.layers_at_once,
            token_stride=part.rows.row_bytes,
            layer_stride=layer,
            alignment=math.gcd(part.rows.alignment, layer),
        )
        return replace(part, rows=rows)
