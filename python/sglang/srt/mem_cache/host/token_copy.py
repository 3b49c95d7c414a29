"""Triton kernel that moves tokens between a device pool and page-locked host memory.

A *row* is one token of one layer of one part of a page (K, V), or an item of several tokens. The
host side may have any of the layouts whose rows are whole: a row's address is linear in (host page,
token in page, layer). The kernel reads and writes host memory itself, so a token is as good as a
page: nothing depends on runs.

Importing this module needs triton.
"""

# ruff: noqa: ANN001, ANN202  (the language below the decorator is not Python)
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl

from sglang.srt.mem_cache.host.copy_runs import HostRows, TokenCopyTuning

_ELEMENT_TYPES: Final = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


# One binary for each pair of pools and direction: made at start, never while a request waits.
@triton.jit(
    do_not_specialize=["host_first", "host_second", "num_tokens", "first_layer", "num_layers"],
    do_not_specialize_on_alignment=["device_table", "host_pages", "device_slots"],
)
def _copy_tokens(
    host_first,
    host_second,
    device_table,
    host_pages,
    device_slots,
    num_tokens,
    first_layer,
    num_layers,
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
        device_base = tl.load(device_table + part * TABLE_STRIDE + layer)

        tokens = token_tile * TOKENS + tl.arange(0, TOKENS)
        there = tokens < num_tokens
        host_page = tl.load(host_pages + tokens // PAGE_SIZE, mask=there, other=0)
        host_slot = host_page * PAGE_SIZE + tokens % PAGE_SIZE
        device_slot = tl.load(device_slots + tokens, mask=there, other=0)
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


def copy_tokens(
    host_addresses: tuple[int, ...],
    rows: HostRows,
    device_table: torch.Tensor,
    device_stride: int,
    host_pages: torch.Tensor,
    page_size: int,
    device_slots: torch.Tensor,
    layers: range,
    *,
    to_host: bool,
    tuning: TokenCopyTuning,
) -> None:
    """Copy tokens of `layers`; asynchronous, on the current stream.

    Args:
        host_addresses: Address of each part (one or two) in memory that the device can reach.
        rows: Strides between the rows of each part.
        device_table: int64 `[parts, layers of the pool]` on the device: addresses of rows.
        device_stride: Bytes between rows there.
        host_pages: int64 `[pages]` on the device.
        page_size: Tokens of a page.
        device_slots: int64 `[pages * page_size]` on the device: page after page, token after token.
        layers: Consecutive layers.
        tuning: How much of the device to take.
    """
    count = len(device_slots)
    element = _element_bytes(rows, device_stride)
    row = rows.row_bytes // element
    cols = min(triton.next_power_of_2(row), tuning.tile_bytes // element)
    tokens = max(1, tuning.tile_bytes // element // cols)
    tiles = -(-count // tokens) * -(-row // cols) * len(layers) * len(host_addresses)
    if not tiles:
        return
    _copy_tokens[(min(tiles, tuning.programs),)](
        host_addresses[0],
        host_addresses[-1],
        device_table,
        host_pages,
        device_slots,
        count,
        layers.start,
        len(layers),
        TO_HOST=to_host,
        PARTS=len(host_addresses),
        TABLE_STRIDE=device_table.shape[1],
        DEVICE_STRIDE=device_stride // element,
        PAGE_SIZE=page_size,
        PAGE_TOKENS=rows.page_tokens,
        PAGE_STRIDE=rows.page_stride // element,
        TOKEN_STRIDE=rows.token_stride // element,
        LAYER_STRIDE=rows.layer_stride // element,
        ROW=row,
        ALIGNMENT=rows.alignment,
        ELEMENT=_ELEMENT_TYPES[element],
        TOKENS=tokens,
        COLS=cols,
        num_warps=tuning.num_warps,
    )


def _element_bytes(rows: HostRows, device_stride: int) -> int:
    """The widest element that every row consists of and starts at a multiple of."""
    strides = (rows.row_bytes, rows.page_stride, rows.token_stride, rows.layer_stride)
    return math.gcd(8, rows.alignment, device_stride, *strides)
