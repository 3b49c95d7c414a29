"""Copies of whole pages between a device pool on an NPU and host memory: `kernel_ascend`.

Layouts whose pages are one run of host memory (`page_first_kv_split`, `page_first_direct`). Pages
that are neighbours on the host cross together, with all their layers, through a buffer on the
device. Indexed copies move them between that buffer and the layers of the pool. A chunk of pages
costs an indexed copy for each layer and a transfer for each run, not one for each page and layer.

Issued in order with the current stream. Host memory is not page-locked for NPUs, so that each
transfer blocks the thread that issues it. Not run on hardware.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.constants import MIB
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.mem_cache.host.host_layout import IoBackend
from sglang.srt.mem_cache.host.page_copier import PageCopier, PageLoad, PoolPair, pages_of

BUFFER_BYTES: Final = 64 * MIB
"""Bytes of pages that are on their way at once."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Keys or values, or some columns of latent rows."""

    host: torch.Tensor
    """`[pages, layers, page_items, elements of an item]`, contiguous."""
    layers: tuple[torch.Tensor, ...]
    """Layers of the device pool, each `[pages, page_items, elements of an item]`."""

    @classmethod
    def of(
        cls, host_layers: Sequence[torch.Tensor], device: Sequence[torch.Tensor], page_items: int
    ) -> _Part:
        """Raises ValueError if a page is not one run of host memory, layer by layer."""
        first = host_layers[0]
        pages, elements, width = len(first), first[0].numel(), first.shape[-1]
        starts = [layer.data_ptr() for layer in host_layers]
        step = elements * first.element_size()
        count = len(host_layers)
        adjoin = starts == [starts[0] + step * index for index in range(count)]
        # torch leaves the stride of a dimension of 1 open.
        pages_adjoin = pages == 1 or first.stride(0) == count * elements
        if not (adjoin and pages_adjoin and first[0].is_contiguous()):
            raise ValueError(
                "kernel_ascend copies pages that are one run of host memory: use "
                "--hicache-mem-layout page_first_kv_split or page_first_direct"
            )
        return cls(
            host=first.as_strided(
                (pages, count, page_items, width), (count * elements, elements, width, 1)
            ),
            layers=tuple(pages_of(buffer, page_items) for buffer in device),
        )


class NpuPageCopier(PageCopier):
    """See the module. Runs where copies are issued, inside a `CopyStream`."""

    def __init__(self, pools: PoolPair, *, buffer_bytes: int = BUFFER_BYTES) -> None:
        """Raises ValueError if the host pool's layout is none of those that work."""
        self._parts = [
            _Part.of(host, device, pools.page_items)
            for host, device in zip(pools.host, pools.device, strict=True)
        ]
        self._pools = pools
        self._runtime = device_runtime(pools.device[0][0].device)
        page_bytes = max(part.host[0].nbytes for part in self._parts)
        self._pages_at_once = max(1, buffer_bytes // page_bytes)

    def backup(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
        staged: torch.Tensor | None = None,
    ) -> None:
        for host, device in self._chunks(host_indices, device_indices, io_backend, staged):
            for part in self._parts:
                rows = [layer.index_select(0, device) for layer in part.layers]
                buffer = torch.stack(rows, dim=1)
                for row, page, count in _runs(host):
                    self._copy(part.host[page : page + count], buffer[row : row + count])

    def load_steps(self, num_pages: int, io_backend: str, load_bytes: int) -> tuple[range, ...]:
        return (range(len(self._parts[0].layers)),)

    def begin_load(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
        staged: torch.Tensor | None = None,
        steps: Sequence[range] | None = None,
    ) -> PageLoad:
        return _NpuLoad(self, list(self._chunks(host_indices, device_indices, io_backend, staged)))

    def load(self, host: npt.NDArray[np.int64], device: torch.Tensor) -> None:
        """Copy pages, all layers of them, into the pages `device` (int64, on the device)."""
        for part in self._parts:
            first = part.layers[0]
            buffer = torch.empty(
                (len(host), *part.host.shape[1:]), dtype=first.dtype, device=first.device
            )
            for row, page, count in _runs(host):
                self._copy(buffer[row : row + count], part.host[page : page + count])
            for index, layer in enumerate(part.layers):
                layer.index_copy_(0, device, buffer[:, index])

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source, non_blocking=self._runtime.pins_memory)

    def _chunks(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
        staged: torch.Tensor | None,
    ) -> Iterator[tuple[npt.NDArray[np.int64], torch.Tensor]]:
        """Checked pages on the host and on the device, as many at once as the buffer takes."""
        if io_backend != IoBackend.KERNEL_ASCEND:
            raise ValueError(f"io_backend {io_backend}: NPU pools copy with kernel_ascend")
        host, _ = self._pools.pages(host_indices, device_indices)
        # Made on another stream and maybe freed there while this one still reads it.
        self._runtime.keep_for_current_stream(device_indices)
        slots = self._runtime.stage_to_device(device_indices) if staged is None else staged
        device = slots[:: self._pools.page_size] // self._pools.page_size
        size = self._pages_at_once
        for start in range(0, len(host), size):
            yield host[start : start + size], device[start : start + size]


class _NpuLoad(PageLoad):
    """Copies all layers when the first one is issued."""

    def __init__(
        self, copier: NpuPageCopier, chunks: list[tuple[npt.NDArray[np.int64], torch.Tensor]]
    ) -> None:
        self._copier = copier
        self._chunks = chunks

    def issue(self, layer: int) -> None:
        chunks, self._chunks = self._chunks, []
        for host, device in chunks:
            self._copier.load(host, device)


def _runs(pages: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Runs of neighbours in `pages`: the first one's index there, that page, and their number."""
    starts = np.flatnonzero(np.diff(pages, prepend=-2) != 1).tolist()
    for start, stop in itertools.pairwise([*starts, len(pages)]):
        yield start, int(pages[start]), stop - start
