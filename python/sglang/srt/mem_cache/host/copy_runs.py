"""Rows of a host pool and of its device pool, and lists of plain copies (address, address, bytes)
of them, made without a Python loop over pages.

A *row* is one token of one layer of one part of a page (K, V, a latent vector), or an item that
stands for several tokens; `page_size` counts them. Pure data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

MAX_STRIDE: Final = 2**31 - 1
"""Bytes between the runs of a grid: `CU_DEVICE_ATTRIBUTE_MAX_PITCH` of every device so far."""
_ALIGNMENT = 16
_GRID_PAGES: Final = 32
"""Neighbouring pages that load faster as one grid. A grid of 128 takes the CPU 12 us and 128 runs
75 us; from 32 runs on a grid is as fast on the link, and one of 8 is slower."""


@dataclass(frozen=True, slots=True)
class TokenCopyTuning:
    """How much of the device a copying kernel takes."""

    programs: int
    """Thread blocks; each has a multiprocessor of its own while the device is idle."""
    tile_bytes: int
    """Bytes that a block has in flight."""
    num_warps: int


@dataclass(frozen=True, slots=True)
class HostRows:
    """Strides in bytes between rows in host memory, known when a pool is made."""

    row_bytes: int
    page_tokens: int
    page_stride: int
    token_stride: int
    layer_stride: int
    alignment: int
    """Bytes, at most 16, that divide the address of every buffer on both sides."""

    def has_page_runs(self, page_size: int) -> bool:
        """True if the tokens of a page lie one after the other in each layer."""
        return page_size == 1 or self.token_stride == self.row_bytes


@dataclass(frozen=True, slots=True)
class PartRows:
    """One part of a page on both sides."""

    rows: HostRows
    host_address: int
    device_addresses: tuple[int, ...]
    """Address of each layer's first row."""
    device_stride: int
    """Bytes between rows on the device; more than a row if the part is some columns."""

    @property
    def has_device_runs(self) -> bool:
        """True if rows of neighbouring slots adjoin on the device."""
        return self.device_stride == self.rows.row_bytes

    @property
    def device_layer_stride(self) -> int | None:
        """Bytes from a layer to the next on the device, 0 where there is one layer; None: they are
        not equally far apart."""
        strides = {b - a for a, b in itertools.pairwise(self.device_addresses)}
        return strides.pop() if len(strides) == 1 else None if strides else 0


def part_rows(host_layers: Sequence[torch.Tensor], device: Sequence[torch.Tensor]) -> PartRows:
    """Describe one part.

    Args:
        host_layers: Views `[pages, page_tokens, elements]` of the part's layers, equally far apart.
        device: The part's layers `[slots, ...]`: contiguous rows, equally far apart in all.
    """
    first = host_layers[0]
    page_tokens, elements = first.shape[1:]
    size = first.element_size()
    addresses = [view.data_ptr() for view in host_layers]
    device_addresses = tuple(buffer.data_ptr() for buffer in device)
    layer_stride = addresses[1] - addresses[0] if len(addresses) > 1 else 0
    page_stride, token_stride = (first.stride(dim) * size for dim in (0, 1))
    if page_tokens == 1:
        token_stride = page_stride  # torch leaves the stride of a dimension of 1 open
    elif token_stride * page_tokens == page_stride:
        # Pages adjoin: a token's place does not depend on its page.
        page_tokens, page_stride = 1, token_stride
    rows = HostRows(
        row_bytes=elements * size,
        page_tokens=page_tokens,
        page_stride=page_stride,
        token_stride=token_stride,
        layer_stride=layer_stride,
        alignment=math.gcd(_ALIGNMENT, addresses[0], *device_addresses),
    )
    return PartRows(rows, addresses[0], device_addresses, device[0].stride(0) * size)


@dataclass(frozen=True, slots=True)
class CopyRuns:
    """Copies of one direction: uint64 arrays of equal length, C-contiguous."""

    destinations: npt.NDArray[np.uint64]
    sources: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True, slots=True)
class BufferRuns:
    """Runs of host memory that a buffer holds; uint64 arrays of equal length.

    Made once for some pages and good for any of their layers, so that issuing them costs little.
    """

    host: npt.NDArray[np.uint64]
    """Addresses of the runs if the first layer is the pool's first one."""
    places: npt.NDArray[np.uint64]
    """Bytes from the buffer's start."""
    sizes: npt.NDArray[np.uint64]
    layer_strides: npt.NDArray[np.uint64]

    def to_buffer(self, buffer: int, first_layer: int) -> CopyRuns:
        """Copies into the buffer at this address, of layers from `first_layer` on."""
        there = self.host + self.layer_strides * np.uint64(first_layer)
        return CopyRuns(self.places + np.uint64(buffer), there, self.sizes)

    def to_host(self, buffer: int) -> CopyRuns:
        """Copies out of the buffer at this address, of layers from the pool's first one on."""
        return CopyRuns(self.host, self.places + np.uint64(buffer), self.sizes)


_NO_RUNS: Final = BufferRuns(*[np.empty(0, dtype=np.uint64)] * 4)


@dataclass(frozen=True, slots=True)
class BufferGrid:
    """Neighbouring pages of host memory that a buffer holds: a run of each, equally far apart.

    Made once for some pages and good for any of their layers, like `BufferRuns`.
    """

    host: int
    """Address of the first run if its first layer is the pool's first one."""
    place: int
    """Bytes from the buffer's start."""
    run_bytes: int
    runs: int
    host_stride: int
    place_stride: int
    layer_stride: int

    def to_buffer(self, buffer: int, first_layer: int) -> CopyGrids:
        """The copy into the buffer at this address, of layers from `first_layer` on."""
        there = self.host + self.layer_stride * first_layer
        return CopyGrids(
            np.array([self.place + buffer], dtype=np.uint64),
            np.array([there], dtype=np.uint64),
            self.run_bytes,
            self.runs,
            self.place_stride,
            self.host_stride,
        )


class PageRuns:
    """Whole pages of one part in host memory, and in a buffer that has the same order of bytes.

    The buffer holds at most `max_layers` layers of at most `max_pages` pages. Three orders are
    known: layer-major pages (`page_first_direct`), layers that are not parts of a page
    (`layer_first`), and token-major pages (`page_first`), which come with all of their layers.

    Args:
        part: The part on both sides.
        page_size: Rows of a page in one layer.
        max_layers: Consecutive layers that a buffer holds.
        max_pages: Pages that a buffer holds.

    Raises:
        ValueError: Host memory has another order, or token-major pages are to be divided.
    """

    def __init__(self, part: PartRows, page_size: int, max_layers: int, max_pages: int) -> None:
        rows = part.rows
        self._part = part
        self._layer_bytes = page_size * rows.row_bytes
        self._page_stride = _page_stride(rows, page_size)
        self.page_bytes = self._layer_bytes * max_layers
        """Bytes of a page in the buffer."""
        self._is_whole = pages_are_runs(part, page_size)
        if self._is_whole and not is_token_major(part, page_size):
            token, layer = rows.row_bytes, self._layer_bytes
            page_tokens, page = page_size, self.page_bytes
        elif self._is_whole and max_layers == len(part.device_addresses):
            token, layer = rows.row_bytes * max_layers, rows.row_bytes
            page_tokens, page = 1, token
        elif not self._is_whole and rows.has_page_runs(page_size):
            token, layer = rows.row_bytes, max_pages * self._layer_bytes
            page_tokens, page = 1, token
        else:
            raise ValueError("host memory has an order of rows that copy engines do not move")
        self.buffer_rows: HostRows = replace(
            rows,
            page_tokens=page_tokens,
            page_stride=page,
            token_stride=token,
            layer_stride=layer,
            alignment=math.gcd(rows.alignment, rows.row_bytes),
        )
        """Strides of the rows in the buffer; pages have the order of the list."""

    def grids(
        self, pages: npt.NDArray[np.int64], layers: int, buffer_offset: int
    ) -> tuple[list[BufferGrid], npt.NDArray[np.bool_] | None]:
        """The grids of some layers of `pages`, and True for each page that is in none; None: all
        are in none.

        Args:
            pages: int64 `[n]`, n at most `max_pages`.
            layers: At most `max_layers`.
            buffer_offset: Bytes from the buffer's start to this part.
        """
        grids: list[BufferGrid] = []
        rows, run_bytes = self._part.rows, layers * self._layer_bytes
        is_one_run = run_bytes == self._page_stride
        is_grid = self._is_whole and not is_one_run and self._page_stride <= MAX_STRIDE
        if not is_grid or len(pages) < _GRID_PAGES:
            return grids, None
        is_left = np.ones(len(pages), dtype=np.bool_)
        for start, stop in itertools.pairwise(_bounds(pages[1:] - pages[:-1] == 1).tolist()):
            if stop - start >= _GRID_PAGES:
                is_left[start:stop] = False
                grids.append(
                    BufferGrid(
                        self._part.host_address + int(pages[start]) * self._page_stride,
                        buffer_offset + start * self.page_bytes,
                        run_bytes,
                        stop - start,
                        self._page_stride,
                        self.page_bytes,
                        rows.layer_stride,
                    )
                )
        return grids, is_left

    def runs(
        self,
        pages: npt.NDArray[np.int64],
        layers: int,
        buffer_offset: int,
        is_wanted: npt.NDArray[np.bool_] | None = None,
    ) -> BufferRuns:
        """The runs of some layers of `pages`; what adjoins on both sides is one.

        Args:
            pages: int64 `[n]`, n at most `max_pages`.
            layers: At most `max_layers`.
            buffer_offset: Bytes from the buffer's start to this part.
            is_wanted: True for each page whose runs are wanted; None: all.
        """
        if is_wanted is not None and not is_wanted.any():
            return _NO_RUNS
        pages_before = np.arange(len(pages), dtype=np.int64)
        if is_wanted is not None:
            pages, pages_before = pages[is_wanted], pages_before[is_wanted]
        host = self._part.host_address + pages * self._page_stride
        layer_stride = self._part.rows.layer_stride
        if self._is_whole:
            piece = layers * self._layer_bytes
            places = pages_before * self.page_bytes
        else:
            piece = self._layer_bytes
            layer = np.arange(layers, dtype=np.int64)[:, None]
            host = (host + layer * layer_stride).reshape(-1)
            in_layer = layer * self.buffer_rows.layer_stride
            places = (pages_before * piece + in_layer).reshape(-1)
        if not len(host):
            return _NO_RUNS
        bounds = _bounds((host[1:] - host[:-1] == piece) & (places[1:] - places[:-1] == piece))
        starts, counts = bounds[:-1], bounds[1:] - bounds[:-1]
        return BufferRuns(
            host[starts].astype(np.uint64),
            (places[starts] + buffer_offset).astype(np.uint64),
            (counts * piece).astype(np.uint64),
            np.full(len(starts), layer_stride, dtype=np.uint64),
        )


def _bounds(adjoins: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """The first places of the spans of n things, then n. `adjoins` `[n - 1]` is True for each thing
    that belongs to the span of the one before."""
    is_bound = np.ones(len(adjoins) + 2, dtype=np.bool_)
    np.logical_not(adjoins, out=is_bound[1:-1])
    return is_bound.nonzero()[0]


def runs_from_pool(
    parts: Sequence[PartRows],
    page_size: int,
    host_pages: npt.NDArray[np.int64],
    device_pages: npt.NDArray[np.int64],
) -> CopyRuns:
    """Copies of whole pages from the device pool to the host: one for each part, layer and page.

    Args:
        parts: Parts with a page of a layer in one run on both sides.
        page_size: Rows of a page in one layer.
        host_pages: int64 `[n]`; `device_pages` likewise.
    """
    sources, destinations, sizes = [], [], []
    for part in parts:
        rows = part.rows
        assert rows.has_page_runs(page_size), "a page of a layer is one run"
        assert part.has_device_runs, "a page of a layer is one run on the device"
        piece = page_size * rows.row_bytes
        layers = np.array(part.device_addresses, dtype=np.int64)[:, None]
        sources.append((layers + device_pages * piece).reshape(-1))
        layer = np.arange(len(layers), dtype=np.int64)[:, None] * rows.layer_stride
        page = part.host_address + host_pages * _page_stride(rows, page_size)
        destinations.append((layer + page).reshape(-1))
        sizes.append(np.full(len(sources[-1]), piece, dtype=np.uint64))
    return CopyRuns(
        np.concatenate(destinations).astype(np.uint64),
        np.concatenate(sources).astype(np.uint64),
        np.concatenate(sizes),
    )


@dataclass(frozen=True, slots=True)
class CopyGrids:
    """Copies of one direction, each of equally many runs that are equally far apart.

    `destinations` and `sources` are uint64 `[n]`: where the first runs are.
    """

    destinations: npt.NDArray[np.uint64]
    sources: npt.NDArray[np.uint64]
    run_bytes: int
    runs: int
    destination_stride: int
    """Bytes from one run to the next."""
    source_stride: int


def have_grids(part: PartRows) -> bool:
    """True if a page of all layers is a grid that copy engines move, on both sides."""
    stride = part.device_layer_stride
    return stride is not None and max(stride, part.rows.layer_stride) <= MAX_STRIDE


def grids_from_pool(
    parts: Sequence[PartRows],
    page_size: int,
    host_pages: npt.NDArray[np.int64],
    device_pages: npt.NDArray[np.int64],
) -> list[CopyGrids]:
    """Like `runs_from_pool`, with one copy for all layers of a page, or for a layer of neighbouring
    pages that are more than the layers.

    Args:
        parts: Parts with grids (`have_grids`).
    """
    grids = []
    num_layers = len(parts[0].device_addresses)
    alone, long = _long_spans(host_pages, device_pages, num_layers)
    for part in parts:
        rows, stride = part.rows, part.device_layer_stride
        assert rows.has_page_runs(page_size), "a page of a layer is one run"
        assert part.has_device_runs, "a page of a layer is one run on the device"
        assert stride is not None, "layers are equally far apart on the device"
        piece = page_size * rows.row_bytes
        page_stride = _page_stride(rows, page_size)
        sources = part.device_addresses[0] + device_pages * piece
        destinations = part.host_address + host_pages * page_stride
        if len(alone):
            grids.append(
                CopyGrids(
                    destinations[alone].astype(np.uint64),
                    sources[alone].astype(np.uint64),
                    piece,
                    num_layers,
                    rows.layer_stride or piece,
                    stride or piece,
                )
            )
        layers = np.arange(num_layers)
        for first, count in long:
            grids.append(
                CopyGrids(
                    (destinations[first] + layers * rows.layer_stride).astype(np.uint64),
                    (sources[first] + layers * stride).astype(np.uint64),
                    piece,
                    count,
                    page_stride,
                    piece,
                )
            )
    return grids


def _long_spans(
    host_pages: npt.NDArray[np.int64], device_pages: npt.NDArray[np.int64], num_layers: int
) -> tuple[npt.NDArray[np.int64], list[tuple[int, int]]]:
    """Divide pages by the direction of their grids.

    A span is long if its pages are neighbours on both sides, and are more than `num_layers`.
    Returns the places of pages in no long span; then the first place and the length of each long
    span.
    """
    count = len(host_pages)
    if count <= num_layers:
        return np.arange(count), []
    steps = (host_pages[1:] - host_pages[:-1], device_pages[1:] - device_pages[:-1])
    bounds = itertools.pairwise(_bounds((steps[0] == 1) & (steps[1] == 1)).tolist())
    long = [(begin, end - begin) for begin, end in bounds if end - begin > num_layers]
    is_alone = np.ones(count, dtype=np.bool_)
    for begin, length in long:
        is_alone[begin : begin + length] = False
    return is_alone.nonzero()[0], long


def join_runs(several: Sequence[BufferRuns]) -> BufferRuns:
    """Join several lists of runs."""
    return BufferRuns(
        np.concatenate([one.host for one in several]),
        np.concatenate([one.places for one in several]),
        np.concatenate([one.sizes for one in several]),
        np.concatenate([one.layer_strides for one in several]),
    )


def pages_are_runs(part: PartRows, page_size: int) -> bool:
    """True if a page of all layers is one run of host memory."""
    page_bytes = len(part.device_addresses) * page_size * part.rows.row_bytes
    return _page_stride(part.rows, page_size) == page_bytes


def is_token_major(part: PartRows, page_size: int) -> bool:
    """True if a page is one run in which a token's layers stand together."""
    return (
        page_size > 1
        and len(part.device_addresses) > 1
        and pages_are_runs(part, page_size)
        and part.rows.layer_stride == part.rows.row_bytes
    )


def _page_stride(rows: HostRows, page_size: int) -> int:
    return rows.page_stride if rows.page_tokens > 1 else rows.token_stride * page_size
