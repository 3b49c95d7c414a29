"""Copies of whole pages where the device pool is in CPU memory too, and of pages laid out flat.

A *page view* is an array of bytes `[pages, ...]` whose first dimension is the page; it may be
strided. Views are numpy's: a copy of 16 short pages is mostly calls, and torch's indexing takes
three to four times as long for them. numpy releases the GIL inside a copy, so that a copy thread
runs beside the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.mem_cache.host.host_layout import IoBackend
from sglang.srt.mem_cache.host.page_copier import PageCopier, PageLoad, PoolPair

PageView: TypeAlias = npt.NDArray[np.uint8]
PagePair: TypeAlias = tuple[PageView, PageView]
"""The same pages' bytes in two places, as on the host and on the device; the rest of the shape is
equal."""
PageIndex: TypeAlias = slice | npt.NDArray[np.int64]


def page_view(pages: torch.Tensor) -> PageView:
    """The memory of a CPU tensor `[pages, ..., elements]` as bytes; its rows are contiguous."""
    view: PageView = pages.view(torch.uint8).numpy()
    return view


def gather_views(pairs: Iterable[PagePair], pages: npt.NDArray[np.int64]) -> None:
    """Copy `pages` of the first view of each pair to the rows of the second, in order.

    Page by page: an index would copy them all twice.
    """
    numbers = pages.tolist()
    for pool, rows in pairs:
        for row, page in zip(rows, numbers, strict=True):
            row[...] = pool[page]


def scatter_views(pairs: Iterable[PagePair], pages: npt.NDArray[np.int64]) -> None:
    """The inverse of `gather_views`."""
    numbers = pages.tolist()
    for pool, rows in pairs:
        for row, page in zip(rows, numbers, strict=True):
            pool[page] = row


class CpuPageCopier(PageCopier):
    """Copies between a host pool and a device pool on the CPU, in the caller's thread."""

    def __init__(self, pools: PoolPair) -> None:
        self._pools = pools
        self._layers = _layer_pairs(pools)

    def backup(
        self, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        to, source = self._indices(host_indices, device_indices, io_backend)
        for layer in self._layers:
            for host, device in layer:
                copy_pages(device, source, host, to)

    def begin_load(
        self, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> PageLoad:
        return _CpuLoad(self._layers, *self._indices(host_indices, device_indices, io_backend))

    def _indices(
        self, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> tuple[PageIndex, PageIndex]:
        if io_backend != IoBackend.DIRECT:
            raise ValueError(f"io_backend {io_backend}: this host pool copies with direct only")
        host, device = self._pools.pages(host_indices, device_indices)
        assert device is not None, "the device is the CPU"
        return page_index(host), page_index(device)


@dataclass(frozen=True, slots=True)
class _CpuLoad(PageLoad):
    layers: list[list[PagePair]]
    host_pages: PageIndex
    device_pages: PageIndex

    def issue(self, layer: int) -> None:
        for host, device in self.layers[layer]:
            copy_pages(host, self.host_pages, device, self.device_pages)


def copy_pages(source: PageView, pages: PageIndex, target: PageView, to: PageIndex) -> None:
    """Copy `pages` of `source` to the pages `to` of `target`, equally many.

    Pages in any order go through a buffer as large as all of them. If there is no memory for it,
    they are copied one by one: the copy must not fail, because a forward waits for it or other
    ranks have made it.
    """
    try:
        target[to] = _gathered(source, pages)
    except MemoryError:
        for one, other in zip(_each(pages), _each(to), strict=True):
            target[other] = source[one]


def _gathered(source: PageView, pages: PageIndex) -> PageView:
    gathered: PageView = source[pages]
    return gathered


def _each(pages: PageIndex) -> Sequence[int]:
    listed: Sequence[int] = (
        range(pages.start, pages.stop) if isinstance(pages, slice) else pages.tolist()
    )
    return listed


def _layer_pairs(pools: PoolPair) -> list[list[PagePair]]:
    """Per layer its parts, `[pages, page_size, bytes of a token]` each."""
    return [
        [
            (page_view(host), page_view(pages_of(device, pools.page_size)))
            for host, device in zip(host_parts, device_parts, strict=True)
        ]
        for host_parts, device_parts in zip(
            zip(*pools.host, strict=True), zip(*pools.device, strict=True), strict=True
        )
    ]


def pages_of(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """A layer of a device pool by whole pages, the padding page included."""
    whole = len(buffer) // page_size
    return buffer[: whole * page_size].view(whole, page_size, -1)


def page_index(pages: npt.NDArray[np.int64]) -> PageIndex:
    """Index of `pages` in a page view: a slice if they are consecutive, which saves a copy."""
    if len(pages) and (np.diff(pages) == 1).all():
        return slice(int(pages[0]), int(pages[0]) + len(pages))
    return pages
