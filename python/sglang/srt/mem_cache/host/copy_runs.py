"""Rows of a host pool and of its device pool, and lists of plain copies (address, address, bytes)
of them, made without a Python loop over pages.

A *row* is one token of one layer of one part of a page (K, V, a latent vector), or an item that
stands for several tokens; `page_size` counts them. Pure data.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

MAX_STRIDE: Final = 2**31 - 1
"""Bytes between the runs of a grid: `CU_DEVICE_ATTRIBUTE_MAX_PITCH` of every device so far."""
_ALIGNMENT = 16


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
        return _equal_stride(self.device_addresses)


@functools.cache
def _equal_stride(addresses: tuple[int, ...]) -> int | None:
    strides = {b - a for a, b in itertools.pairwise(addresses)}
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

    def back(self) -> CopyRuns:
        """The same runs in the other direction."""
        return CopyRuns(self.sources, self.destinations, self.sizes)


def span_bounds(adjoins: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
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
    layers: range,
) -> CopyRuns:
    """Copies of whole pages from the device pool to the host: one for each part, layer and page.

    Args:
        parts: Parts with a page of a layer in one run on both sides.
        page_size: Rows of a page in one layer.
        host_pages: int64 `[n]`; `device_pages` likewise.
        layers: Consecutive layers.
    """
    sources, destinations, sizes = [], [], []
    for part in parts:
        rows = part.rows
        assert rows.has_page_runs(page_size), "a page of a layer is one run"
        assert part.has_device_runs, "a page of a layer is one run on the device"
        piece = page_size * rows.row_bytes
        first, stop = layers.start, layers.stop
        there = np.array(part.device_addresses[first:stop], dtype=np.int64)[:, None]
        sources.append((there + device_pages * piece).reshape(-1))
        layer = np.arange(first, stop, dtype=np.int64)[:, None] * rows.layer_stride
        page = part.host_address + host_pages * stride_of_page(rows, page_size)
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

    def back(self) -> CopyGrids:
        """The same runs in the other direction."""
        return CopyGrids(
            self.sources,
            self.destinations,
            self.run_bytes,
            self.runs,
            self.source_stride,
            self.destination_stride,
        )


def have_grids(part: PartRows) -> bool:
    """True if a page of all layers is a grid that copy engines move, on both sides."""
    stride = part.device_layer_stride
    return stride is not None and max(stride, part.rows.layer_stride) <= MAX_STRIDE


def grids_from_pool(
    parts: Sequence[PartRows],
    page_size: int,
    host_pages: npt.NDArray[np.int64],
    device_pages: npt.NDArray[np.int64],
    layers: range,
) -> list[CopyGrids]:
    """Like `runs_from_pool`, with one copy for all `layers` of a page, or for a layer of
    neighbouring pages that are more than the layers.

    Args:
        parts: Parts with grids (`have_grids`).
    """
    grids = []
    num_layers = len(layers)
    alone, long = _long_spans(host_pages, device_pages, num_layers)
    for part in parts:
        rows, stride = part.rows, part.device_layer_stride
        assert rows.has_page_runs(page_size), "a page of a layer is one run"
        assert part.has_device_runs, "a page of a layer is one run on the device"
        assert stride is not None, "layers are equally far apart on the device"
        piece = page_size * rows.row_bytes
        page_stride = stride_of_page(rows, page_size)
        sources = part.device_addresses[layers.start] + device_pages * piece
        host = part.host_address + layers.start * rows.layer_stride
        destinations = host + host_pages * page_stride
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
        numbers = np.arange(num_layers)
        for first, count in long:
            grids.append(
                CopyGrids(
                    (destinations[first] + numbers * rows.layer_stride).astype(np.uint64),
                    (sources[first] + numbers * stride).astype(np.uint64),
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
    bounds = itertools.pairwise(span_bounds((steps[0] == 1) & (steps[1] == 1)).tolist())
    long = [(begin, end - begin) for begin, end in bounds if end - begin > num_layers]
    is_alone = np.ones(count, dtype=np.bool_)
    for begin, length in long:
        is_alone[begin : begin + length] = False
    return is_alone.nonzero()[0], long


def pages_are_runs(part: PartRows, page_size: int) -> bool:
    """True if a page of all layers is one run of host memory."""
    page_bytes = len(part.device_addresses) * page_size * part.rows.row_bytes
    return stride_of_page(part.rows, page_size) == page_bytes


def is_token_major(part: PartRows, page_size: int) -> bool:
    """True if a page is one run in which a token's layers stand together."""
    return (
        page_size > 1
        and len(part.device_addresses) > 1
        and pages_are_runs(part, page_size)
        and part.rows.layer_stride == part.rows.row_bytes
    )


def stride_of_page(rows: HostRows, page_size: int) -> int:
    """Bytes from a page to the next in host memory."""
    return rows.page_stride if rows.page_tokens > 1 else rows.token_stride * page_size
