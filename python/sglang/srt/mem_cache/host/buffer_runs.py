"""Copies between whole pages in host memory and a buffer that has the same order of bytes, made
without a Python loop over pages. Pure data.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Final

import numpy as np
import numpy.typing as npt

from sglang.srt.mem_cache.host.copy_runs import (
    MAX_STRIDE,
    CopyGrids,
    CopyRuns,
    HostRows,
    PartRows,
    is_token_major,
    pages_are_runs,
    span_bounds,
    stride_of_page,
)

_ALIGNMENT: Final = 512
_GRID_PAGES: Final = 32
"""Neighbouring pages that load faster as one grid. A grid of 128 takes the CPU 12 us and 128 runs
75 us; from 32 runs on a grid is as fast on the link, and one of 8 is slower."""


@dataclass(frozen=True, slots=True)
class BufferRuns:
    """Runs of host memory that a buffer holds: int64 arrays `[parts, n]`.

    Made once for some pages and good for any of their layers, so that issuing them costs little.
    """

    host: npt.NDArray[np.int64]
    """Addresses of the runs if the first layer is the pool's first one."""
    places: npt.NDArray[np.int64]
    """Bytes from the buffer's start."""
    sizes: npt.NDArray[np.int64]
    layer_strides: npt.NDArray[np.int64]
    """`[parts, 1]`."""

    def to_buffer(self, buffer: int, first_layer: int) -> CopyRuns:
        """Copies into the buffer at this address, of layers from `first_layer` on."""
        there = self.host + self.layer_strides * first_layer if first_layer else self.host
        return CopyRuns(_flat(self.places + buffer), _flat(there), _flat(self.sizes))

    def to_host(self, buffer: int) -> CopyRuns:
        """Copies out of the buffer at this address, of layers from the pool's first one on."""
        return CopyRuns(_flat(self.host), _flat(self.places + buffer), _flat(self.sizes))


def _flat(values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    # `reshape` alone may give a view of one number that stands for several.
    return np.ascontiguousarray(values).reshape(-1).view(np.uint64)


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
    """Whole pages of a pool's parts in host memory, and in a buffer that has the same order of
    bytes, part after part.

    The buffer holds at most `max_layers` layers of at most `max_pages` pages. Three orders are
    known: layer-major pages (`page_first_direct`), layers that are not parts of a page
    (`layer_first`), and token-major pages (`page_first`), which come with all of their layers.

    Args:
        parts: The parts on both sides, of one layout.
        page_size: Rows of a page in one layer.
        max_layers: Consecutive layers that a buffer holds.
        max_pages: Pages that a buffer holds.

    Attributes:
        offsets: Bytes from the buffer's start to each part.
        num_bytes: Bytes of the buffer.
        buffer_rows: Strides of each part's rows in the buffer; pages have the order of the list.

    Raises:
        ValueError: Host memory has another order, or token-major pages are to be divided.
    """

    def __init__(
        self, parts: Sequence[PartRows], page_size: int, max_layers: int, max_pages: int
    ) -> None:
        first = parts[0]
        self._parts = parts
        self._num_layers = len(first.device_addresses)
        self._is_whole = pages_are_runs(first, page_size)
        assert all(pages_are_runs(part, page_size) == self._is_whole for part in parts)
        self.buffer_rows = [
            _buffer_rows(part, page_size, max_layers, max_pages, is_whole=self._is_whole)
            for part in parts
        ]
        self.offsets: list[int] = []
        self.num_bytes = 0
        for part in parts:
            self.offsets.append(self.num_bytes)
            end = self.num_bytes + part.rows.row_bytes * page_size * max_layers * max_pages
            self.num_bytes = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._layer_bytes = _column([part.rows.row_bytes * page_size for part in parts])
        self._page_bytes = self._layer_bytes * max_layers
        """Bytes of a page in the buffer."""
        self._page_strides = _column([stride_of_page(part.rows, page_size) for part in parts])
        self._layer_strides = _column([part.rows.layer_stride for part in parts])
        self._addresses = _column([part.host_address for part in parts])
        self._places = _column(self.offsets)
        self._are_near = all(stride <= MAX_STRIDE for stride in self._page_strides[:, 0].tolist())

    def grids(
        self, pages: npt.NDArray[np.int64], layers: int
    ) -> tuple[list[BufferGrid], npt.NDArray[np.bool_] | None]:
        """The grids of some layers of `pages`, and True for each page that is in none; None: all
        are in none.

        Args:
            pages: int64 `[n]`, n at most `max_pages`.
            layers: At most `max_layers`.
        """
        is_one_run = layers == self._num_layers
        is_grid = self._is_whole and not is_one_run and self._are_near
        if not is_grid or len(pages) < _GRID_PAGES:
            return [], None
        grids: list[BufferGrid] = []
        is_left = np.ones(len(pages), dtype=np.bool_)
        for start, stop in itertools.pairwise(span_bounds(pages[1:] - pages[:-1] == 1).tolist()):
            if stop - start >= _GRID_PAGES:
                is_left[start:stop] = False
                grids += self._grids(int(pages[start]), start, stop - start, layers)
        return grids, is_left

    def _grids(self, page: int, start: int, count: int, layers: int) -> list[BufferGrid]:
        """A grid of each part: `count` pages from `page` on, `start` pages into the buffer."""
        in_buffer, strides = self._page_bytes[:, 0].tolist(), self._page_strides[:, 0].tolist()
        return [
            BufferGrid(
                part.host_address + page * stride,
                offset + start * page_bytes,
                layers * layer_bytes,
                count,
                stride,
                page_bytes,
                part.rows.layer_stride,
            )
            for part, offset, layer_bytes, page_bytes, stride in zip(
                self._parts,
                self.offsets,
                self._layer_bytes[:, 0].tolist(),
                in_buffer,
                strides,
                strict=True,
            )
        ]

    def runs(
        self,
        pages: npt.NDArray[np.int64],
        layers: int,
        is_wanted: npt.NDArray[np.bool_] | None = None,
    ) -> BufferRuns | None:
        """The runs of some layers of `pages`; neighbours that adjoin on both sides are one. None:
        there are none.

        Args:
            pages: int64 `[n]`, n at most `max_pages`.
            layers: At most `max_layers`.
            is_wanted: True for each page whose runs are wanted; None: all.
        """
        if not len(pages) or (is_wanted is not None and not is_wanted.any()):
            return None
        if self._is_whole and layers < self._num_layers:
            # A run ends before the page does.
            starts = np.arange(len(pages)) if is_wanted is None else is_wanted.nonzero()[0]
            counts = np.ones(len(starts), dtype=np.int64)
        else:
            assert is_wanted is None, "such pages form no grids"
            bounds = span_bounds(pages[1:] - pages[:-1] == 1)
            starts, counts = bounds[:-1], bounds[1:] - bounds[:-1]
        host = self._addresses + pages[starts] * self._page_strides
        if self._is_whole:
            places = self._places + starts * self._page_bytes
            return BufferRuns(
                host, places, counts * (self._layer_bytes * layers), self._layer_strides
            )
        layer, num_parts = np.arange(layers, dtype=np.int64)[:, None], len(self._parts)
        in_buffer = _column([rows.layer_stride for rows in self.buffer_rows])
        places = self._places + starts * self._layer_bytes
        sizes = np.broadcast_to(
            (counts * self._layer_bytes)[:, None], (num_parts, layers, len(starts))
        )
        return BufferRuns(
            (host[:, None] + layer * self._layer_strides[:, None]).reshape(num_parts, -1),
            (places[:, None] + layer * in_buffer[:, None]).reshape(num_parts, -1),
            sizes.reshape(num_parts, -1),
            self._layer_strides,
        )


def _buffer_rows(
    part: PartRows, page_size: int, max_layers: int, max_pages: int, *, is_whole: bool
) -> HostRows:
    rows, row = part.rows, part.rows.row_bytes
    layer_bytes = page_size * row
    if is_whole and not is_token_major(part, page_size):
        token, layer, page_tokens, page = row, layer_bytes, page_size, layer_bytes * max_layers
    elif is_whole and max_layers == len(part.device_addresses):
        token, layer, page_tokens, page = row * max_layers, row, 1, row * max_layers
    elif not is_whole and rows.has_page_runs(page_size):
        token, layer, page_tokens, page = row, max_pages * layer_bytes, 1, row
    else:
        raise ValueError("host memory has an order of rows that copy engines do not move")
    return replace(
        rows,
        page_tokens=page_tokens,
        page_stride=page,
        token_stride=token,
        layer_stride=layer,
        alignment=gcd(rows.alignment, row),
    )


def _column(values: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)[:, None]
