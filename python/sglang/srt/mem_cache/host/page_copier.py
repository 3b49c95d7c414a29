"""Copies of pages between a host pool and its device pool, by kind of device, and of pages laid out
flat. Here is the copier of a device pool that is in CPU memory too.

A copier belongs to one pair of pools. Its methods run where copies are issued: inside a
`CopyStream`'s work.

A *page view* is an array of bytes `[pages, ...]` whose first dimension is the page; it may be
strided. Views are numpy's: a copy of 16 short pages is mostly calls, and torch's indexing takes
three to four times as long for them. numpy releases the GIL inside a copy, so that a copy thread
runs beside the scheduler.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.mem_cache.host.host_layout import IoBackend
from sglang.srt.mem_cache.host.host_page_list import whole_pages
from sglang.srt.mem_cache.host.load_steps import layer_steps

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


@dataclass(frozen=True, slots=True)
class PoolPair:
    """A host pool and a device pool, as their copier sees them: parts of a page (K and V, latent
    vectors and rotated parts), each by layers."""

    host: tuple[tuple[torch.Tensor, ...], ...]
    """Views `[host_pages, page_items, elements]` of host memory, equally far apart in each part."""
    device: tuple[tuple[torch.Tensor, ...], ...]
    """Layers on the device, `[items, ...]`: contiguous rows, equally far apart in the layers of a
    part. They adjoin, unless a part is some columns of a buffer."""
    page_size: int
    """Slots of a page."""
    host_pages: int
    device_pages: int
    """The padding page included."""
    stride: int = 1
    """Slots that share an item."""

    @property
    def page_items(self) -> int:
        """Items of a page."""
        return self.page_size // self.stride

    def pages(
        self, host_indices: torch.Tensor, device_indices: torch.Tensor
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
        """Checked page numbers on host and device. The second is None if `device_indices` is a
        device tensor.

        Raises ValueError if slots that the CPU can see are not whole pages of their pool, or if
        the two sides differ in number.
        """
        here, there = host_indices.shape[0], device_indices.shape[0]
        if here != there:
            raise ValueError(f"{here} host_indices for {there} device_indices")
        host = whole_pages(host_indices, self.page_size, self.host_pages)
        if not device_indices.is_cpu:
            return host, None
        return host, whole_pages(device_indices, self.page_size, self.device_pages)


class PageLoad(ABC):
    """One set of pages on its way to the device. Its index tensors must not change meanwhile."""

    @abstractmethod
    def issue(self, layer: int) -> None:
        """Copy one layer; those of its step (`PageCopier.load_steps`) come with it. Layers may be
        left out."""


class PageCopier(ABC):
    """Copies whole pages between two pools.

    Slots on the host are int64 `[slots]` on the CPU; those on the device, equally many, on the
    CPU or the device. `staged` are slots on the device where `device_indices` are on the CPU and
    the caller has staged them; `io_backend` is one of `IoBackend`.
    """

    @abstractmethod
    def backup(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
        staged: torch.Tensor | None = None,
    ) -> None:
        """Copy all layers of the pages of these slots to the host.

        Raises ValueError as `PoolPair.pages`, or if the device has no such `io_backend`.
        """

    @abstractmethod
    def begin_load(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
        staged: torch.Tensor | None = None,
        steps: Sequence[range] | None = None,
    ) -> PageLoad:
        """Check and stage the slots of a load once for all of its layers. Raises as `backup`.

        Args:
            steps: Their `load_steps`; None: those of a load of these pages alone.
        """

    @abstractmethod
    def load_steps(self, num_pages: int, io_backend: str, load_bytes: int) -> tuple[range, ...]:
        """The layers that a load of so many pages issues together. Any thread.

        Args:
            load_bytes: Bytes that the load brings to all pools.
        """

    def loads_straight(self, num_slots: int, io_backend: str) -> bool:
        """True if a load of so many slots needs them on the CPU alone, where they are."""
        return False

    def prefers_cpu_slots(self, io_backend: str) -> bool:
        """True if backups are faster with their `device_indices` on the CPU."""
        return False


class CpuPageCopier(PageCopier):
    """Copies between a host pool and a device pool on the CPU, in the caller's thread."""

    def __init__(self, pools: PoolPair) -> None:
        self._pools = pools
        self._layers = _layer_pairs(pools)
        self._steps = layer_steps(len(self._layers), 1)

    def backup(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
        staged: torch.Tensor | None = None,
    ) -> None:
        to, source = self._indices(host_indices, device_indices, io_backend)
        for layer in self._layers:
            for host, device in layer:
                copy_pages(device, source, host, to)

    def begin_load(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
        staged: torch.Tensor | None = None,
        steps: Sequence[range] | None = None,
    ) -> PageLoad:
        return _CpuLoad(self._layers, *self._indices(host_indices, device_indices, io_backend))

    def load_steps(self, num_pages: int, io_backend: str, load_bytes: int) -> tuple[range, ...]:
        return self._steps

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
    """Per layer its parts, `[pages, page_items, bytes of an item]` each."""
    return [
        [
            (page_view(host), page_view(pages_of(device, pools.page_items)))
            for host, device in zip(host_parts, device_parts, strict=True)
        ]
        for host_parts, device_parts in zip(
            zip(*pools.host, strict=True), zip(*pools.device, strict=True), strict=True
        )
    ]


def pages_of(buffer: torch.Tensor, page_items: int) -> torch.Tensor:
    """A layer of a device pool by whole pages, the padding page included."""
    whole = len(buffer) // page_items
    return buffer[: whole * page_items].view(whole, page_items, -1)


def page_index(pages: npt.NDArray[np.int64]) -> PageIndex:
    """Index of `pages` in a page view: a slice if they are consecutive, which saves a copy."""
    if len(pages) and (np.diff(pages) == 1).all():
        return slice(int(pages[0]), int(pages[0]) + len(pages))
    return pages


_COPIERS: Final = {
    "cpu": (__name__, "CpuPageCopier"),
    "cuda": ("sglang.srt.mem_cache.host.host_copy_cuda", "CudaPageCopier"),
    "npu": ("sglang.srt.mem_cache.host.host_copy_npu", "NpuPageCopier"),
}
"""Module and class by kind of device. A process imports one of the modules."""


def check_has_copier(device: torch.device | str) -> None:
    """Raise ValueError if pages of `device` cannot be copied; lists the devices that can."""
    kind = str(device).partition(":")[0]
    if kind not in _COPIERS:
        raise ValueError(
            f"the hierarchical cache has no copies on {kind} yet, only on "
            f"{', '.join(_COPIERS)}: start without --enable-hierarchical-cache"
        )


def make_page_copier(pools: PoolPair) -> PageCopier:
    """The copier of the device that `pools.device` is on. Raises as `check_has_copier`."""
    device = pools.device[0][0].device
    check_has_copier(device)
    module, name = _COPIERS[device.type]
    copier: PageCopier = getattr(importlib.import_module(module), name)(pools)
    return copier
