"""Addresses and strides of the rows of a host pool and of its device pool.

A *row* is one token of one layer of one part of a page (K, V, a latent vector). Pure data: what the
CUDA copies and their tests work from.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class TokenCopyTuning:
    """How much of the device a copying kernel takes."""

    programs: int
    """Thread blocks, each on a multiprocessor of its own while those are idle."""
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
