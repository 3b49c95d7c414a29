"""Triton kernel that moves tokens between a device pool and page-locked host memory.

A *row* is one token of one layer of one part of a page (K, V), or an item of several tokens. The
host side may have any of the layouts whose rows are whole: a row's address is linear in (host page,
token in page, layer). The kernel reads and writes host memory itself, so a token is as good as a
page: nothing depends on runs.

Importing this module needs triton.
"""

# ruff: noqa: ANN202  (the language below the decorator is not Python)
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl

from sglang.srt.hardware_backend.cuda.bound_kernel import BoundKernel, unspecialized
from sglang.srt.mem_cache.host.copy_runs import HostRows, TokenCopyTuning

_ELEMENT_TYPES: Final = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


# One binary for each pair of pools and direction: made at start, never while a request waits.
@unspecialized
def _copy_tokens(
    host_first: tl.int64,
    host_second: tl.int64,
    device_table: tl.int64,
    host_pages: tl.int64,
    device_slots: tl.int64,
    num_tokens: tl.int32,
    first_layer: tl.int32,
    num_layers: tl.int32,
    TO_HOST: tl.constexpr,
    PARTS: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    DEVICE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    ROW: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ELEMENT: tl.constexpr,
    TOKENS: tl.constexpr,
    COLS: tl.constexpr,
):
    table = device_table.to(tl.int64).to(tl.pointer_type(tl.int64))
    pages = host_pages.to(tl.int64).to(tl.pointer_type(tl.int64))
    slots = device_slots.to(tl.int64).to(tl.pointer_type(tl.int64))
    token_tiles = tl.cdiv(num_tokens, TOKENS)
    col_tiles: tl.constexpr = (ROW + COLS - 1) // COLS
    per_token_tile = num_layers * PARTS * col_tiles
    for tile in range(tl.program_id(0), token_tiles * per_token_tile, tl.num_programs(0)):
        # Neighbouring blocks work on neighbouring memory of whichever side is written.
        if LAYER_STRIDE > PAGE_STRIDE:
            token_tile = tile % token_tiles
            rest = tile // token_tiles
        else:
            token_tile = tile // per_token_tile
            rest = tile % per_token_tile
        cols = (rest % col_tiles) * COLS + tl.arange(0, COLS)
        rest = rest // col_tiles
        layer = first_layer + rest % num_layers
        part = rest // num_layers
        host_base = host_first
        if PARTS == 2 and part == 1:
            host_base = host_second
        device_base = tl.load(table + part * TABLE_STRIDE + layer)

        tokens = token_tile * TOKENS + tl.arange(0, TOKENS)
        there = tokens < num_tokens
        host_page = tl.load(pages + tokens // PAGE_SIZE, mask=there, other=0)
        host_slot = host_page * PAGE_SIZE + tokens % PAGE_SIZE
        device_slot = tl.load(slots + tokens, mask=there, other=0)
        host_row = (
            (host_slot // PAGE_TOKENS) * PAGE_STRIDE
            + (host_slot % PAGE_TOKENS) * TOKEN_STRIDE
            + layer.to(tl.int64) * LAYER_STRIDE
        )
        device_row = device_slot * DEVICE_STRIDE
        mask = there[:, None] & (cols < ROW)[None, :]
        host = host_base.to(tl.int64).to(tl.pointer_type(ELEMENT))
        host = tl.multiple_of(host, ALIGNMENT)
        device = tl.multiple_of(device_base.to(tl.pointer_type(ELEMENT)), ALIGNMENT)
        host_at = host + (host_row[:, None] + cols[None, :])
        device_at = device + (device_row[:, None] + cols[None, :])
        if TO_HOST:
            tl.store(host_at, tl.load(device_at, mask=mask), mask=mask)
        else:
            tl.store(device_at, tl.load(host_at, mask=mask), mask=mask)


class TokenCopy:
    """Copies the rows of parts of a page that are alike, in one direction. Holds what stays the
    same from copy to copy.

    Args:
        rows: Strides between the rows of each part, in memory that the device can reach.
        device_table: int64 `[parts, layers of the pool]` on the device: addresses of rows. One part
            or two.
        device_stride: Bytes between rows there.
        page_size: Tokens of a page.
        to_host: Away from the device's pool.
        tuning: How much of the device to take.
    """

    def __init__(
        self,
        rows: HostRows,
        device_table: torch.Tensor,
        device_stride: int,
        page_size: int,
        *,
        to_host: bool,
        tuning: TokenCopyTuning,
    ) -> None:
        element = _element_bytes(rows, device_stride)
        row = rows.row_bytes // element
        cols = min(triton.next_power_of_2(row), tuning.tile_bytes // element)
        self._tokens = max(1, tuning.tile_bytes // element // cols)
        parts, layers = device_table.shape
        self._tiles = -(-row // cols) * parts
        self._programs = tuning.programs
        self._table = device_table
        self._kernel = BoundKernel(
            _copy_tokens,
            TO_HOST=to_host,
            PARTS=parts,
            TABLE_STRIDE=layers,
            DEVICE_STRIDE=device_stride // element,
            PAGE_SIZE=page_size,
            PAGE_TOKENS=rows.page_tokens,
            PAGE_STRIDE=rows.page_stride // element,
            TOKEN_STRIDE=rows.token_stride // element,
            LAYER_STRIDE=rows.layer_stride // element,
            ROW=row,
            ALIGNMENT=rows.alignment,
            ELEMENT=_ELEMENT_TYPES[element],
            TOKENS=self._tokens,
            COLS=cols,
            num_warps=tuning.num_warps,
        )

    def compile(self) -> None:
        """Make the kernel's binary, by a launch that copies nothing."""
        self._launch(1, (0,), 0, 0, 0, range(0))

    def copy(
        self,
        host_addresses: Sequence[int],
        host_pages: torch.Tensor,
        device_slots: torch.Tensor,
        layers: range,
    ) -> None:
        """Copy tokens of consecutive `layers`; asynchronous, on the current stream.

        Args:
            host_addresses: Address of each part.
            host_pages: int64 `[pages]` on the device, or more.
            device_slots: int64 `[pages * page_size]` on the device: page after page, token after
                token. Contiguous, like `host_pages`.
        """
        count = device_slots.shape[0]
        tiles = -(-count // self._tokens) * self._tiles * len(layers)
        if tiles:
            pages, slots = host_pages.data_ptr(), device_slots.data_ptr()
            self._launch(min(tiles, self._programs), host_addresses, pages, slots, count, layers)

    def _launch(
        self,
        programs: int,
        host_addresses: Sequence[int],
        pages: int,
        slots: int,
        count: int,
        layers: range,
    ) -> None:
        self._kernel(
            (programs, 1, 1),
            host_addresses[0],
            host_addresses[-1],
            self._table.data_ptr(),
            pages,
            slots,
            count,
            layers.start,
            len(layers),
        )


def _element_bytes(rows: HostRows, device_stride: int) -> int:
    """The widest element that every row consists of and starts at a multiple of."""
    strides = (rows.row_bytes, rows.page_stride, rows.token_stride, rows.layer_stride)
    return math.gcd(8, rows.alignment, device_stride, *strides)
