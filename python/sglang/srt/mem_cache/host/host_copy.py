"""Copies of whole pages where the device pool is in CPU memory too, and of pages laid out flat.

A *page view* is an array of bytes `[pages, ...]` whose first dimension is the page; it may be
strided. Views are numpy's: a copy of 16 short pages is mostly calls, and torch's indexing takes
three to four times as long for them. numpy releases the GIL inside a copy, so that a copy thread
runs beside the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.mem_cache.host.host_copy_cuda import check_equally_many
from sglang.srt.mem_cache.host.host_layout import IoBackend
from sglang.srt.mem_cache.host.host_page_list import whole_pages

PageView: TypeAlias = npt.NDArray[np.uint8]
PagePair: TypeAlias = tuple[PageView, PageView]
"""The same pages' bytes on the host and on the device; the rest of the shape is equal."""
PageIndex: TypeAlias = slice | npt.NDArray[np.int64]


def page_view(pages: torch.Tensor) -> PageView:
    """The memory of a CPU tensor `[pages, ..., elements]` as bytes; its rows are contiguous."""
    view: PageView = pages.view(torch.uint8).numpy()
    return view


class CpuPageCopier:
    """Copies between a host pool and a device pool on the CPU, in the caller's thread.

    Args:
        layers: For each layer its parts (K and V).
        page_size: Tokens.
        host_pages: In the host pool.
        device_pages: In the device pool, the padding page included.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[PagePair]],
        page_size: int,
        host_pages: int,
        device_pages: int,
    ) -> None:
        self._layers = layers
        self._page_size = page_size
        self._host_pages = host_pages
        self._device_pages = device_pages

    def backup(
        self, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        """Copy all layers of whole pages to the host."""
        to, source = self._indices(host_indices, device_indices, io_backend)
        for layer in self._layers:
            for host, device in layer:
                host[to] = device[source]

    def load_layer(
        self, host_indices: torch.Tensor, device_indices: torch.Tensor, layer: int, io_backend: str
    ) -> None:
        """Copy one layer of whole pages to the device."""
        source, to = self._indices(host_indices, device_indices, io_backend)
        for host, device in self._layers[layer]:
            device[to] = host[source]

    def _indices(
        self, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> tuple[PageIndex, PageIndex]:
        if io_backend != IoBackend.DIRECT:
            raise ValueError(f"io_backend {io_backend}: this host pool copies with direct only")
        check_equally_many(host_indices, device_indices)
        return (
            page_index(whole_pages(host_indices, self._page_size, self._host_pages)),
            page_index(whole_pages(device_indices, self._page_size, self._device_pages)),
        )


def page_index(pages: npt.NDArray[np.int64]) -> PageIndex:
    """What selects `pages` of a page view; a slice where they are consecutive, which copies once
    instead of twice."""
    if len(pages) and (np.diff(pages) == 1).all():
        return slice(int(pages[0]), int(pages[0]) + len(pages))
    return pages
