"""Kernels that store and gather rows in fp8; `fp8_rows.py` has their form and calls them.

Importing this module needs triton.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from sglang.srt.mem_cache.device.fp8_rows import FP8, FP8_MAX, GROUP, LEAST_SCALE, num_groups

_WARPS: Final = 1
"""A row is a few hundred elements."""


@triton.jit
def _row_of_program(
    slots_ptr: tl.tensor,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Token and slot of this program, and for each group its elements and which of them exist."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    group, place = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S)
    at = group[:, None] * SIZE + place[None, :]
    inside = (group < GROUPS)[:, None] & (place < SIZE)[None, :]
    return token, slot, at, inside


@triton.jit
def _store_kernel(
    values_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    values_stride: tl.tensor,
    ELEMENTS: tl.constexpr,
    REST: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
) -> None:
    """One program rounds and stores one row, of GROUPS groups of SIZE elements."""
    token, slot, at, inside = _row_of_program(slots_ptr, GROUPS, SIZE, BLOCK_G, BLOCK_S)
    width = ELEMENTS + 4 * GROUPS + 2 * REST
    group = tl.arange(0, BLOCK_G)
    values = values_ptr + token * values_stride
    x = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    # Divisions as in torch, rounded to nearest; Triton's own is less exact.
    scale = tl.div_rn(tl.max(tl.abs(x), axis=1), tl.full([BLOCK_G], LARGEST, tl.float32))
    scale = tl.where(scale < LEAST, 1.0, scale)
    code = tl.div_rn(x, tl.broadcast_to(scale[:, None], [BLOCK_G, BLOCK_S]))
    tl.store(codes_ptr + slot * width + at, code.to(tl.float8e4nv), mask=inside)
    scales = scales_ptr + slot * (width // 4) + ELEMENTS // 4
    tl.store(scales + group, scale, mask=group < GROUPS)
    if REST > 0:
        own = tl.arange(0, BLOCK_R)
        kept = tl.load(values + ELEMENTS + own, mask=own < REST, other=0.0)
        rest = rest_ptr + slot * (width // 2) + (ELEMENTS + 4 * GROUPS) // 2
        tl.store(rest + own, kept.to(tl.bfloat16), mask=own < REST)


@triton.jit
def _gather_kernel(
    slots_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    out_ptr: tl.tensor,
    ELEMENTS: tl.constexpr,
    REST: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """One program reads one row."""
    token, slot, at, inside = _row_of_program(slots_ptr, GROUPS, SIZE, BLOCK_G, BLOCK_S)
    width = ELEMENTS + 4 * GROUPS + 2 * REST
    group = tl.arange(0, BLOCK_G)
    code = tl.load(codes_ptr + slot * width + at, mask=inside, other=0.0)
    scales = scales_ptr + slot * (width // 4) + ELEMENTS // 4
    scale = tl.load(scales + group, mask=group < GROUPS, other=0.0)
    out = out_ptr + token * (ELEMENTS + REST)
    x = code.to(tl.float32) * scale[:, None]
    tl.store(out + at, x.to(out_ptr.dtype.element_ty), mask=inside)
    if REST > 0:
        own = tl.arange(0, BLOCK_R)
        rest = rest_ptr + slot * (width // 2) + (ELEMENTS + 4 * GROUPS) // 2
        kept = tl.load(rest + own, mask=own < REST, other=0.0).to(tl.float32)
        tl.store(out + ELEMENTS + own, kept.to(out_ptr.dtype.element_ty), mask=own < REST)


def store_rows(
    buffer: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, elements: int
) -> None:
    """Round and store rows.

    Args:
        buffer: Contiguous uint8 `[slots of the pool, ..., bytes of a row]` on a GPU.
        slots: int64 `[n]`.
        values: `[n, ..., elements + rest]`, any float dtype; the middle dimensions are 1.
    """
    rows = values.reshape(len(values), values.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    if len(rows):
        _store_kernel[(len(rows),)](
            rows,
            slots,
            *typed_views(buffer),
            rows.stride(0),
            **_sizes(elements, rows.shape[1] - elements),
            LARGEST=FP8_MAX,
            LEAST=LEAST_SCALE,
            num_warps=_WARPS,
        )


def gather_rows(
    buffer: torch.Tensor, slots: torch.Tensor, elements: int, dtype: torch.dtype
) -> torch.Tensor:
    """Values at slots, `[n, ..., elements + rest]` of `dtype`; arguments as in `store_rows`."""
    rest = (buffer.shape[-1] - elements - 4 * num_groups(elements)) // 2
    shape = (len(slots), *buffer.shape[1:-1], elements + rest)
    out = torch.empty(shape, dtype=dtype, device=buffer.device)
    if len(slots):
        _gather_kernel[(len(slots),)](
            slots, *typed_views(buffer), out, **_sizes(elements, rest), num_warps=_WARPS
        )
    return out


def typed_views(buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A contiguous uint8 buffer of rows as fp8, as fp32 for the scales, and as bf16 for the
    rest."""
    assert buffer.is_contiguous()
    flat = buffer.view(-1)
    return flat.view(FP8), flat.view(torch.float32), flat.view(torch.bfloat16)


def _sizes(elements: int, rest: int) -> dict[str, int]:
    groups = num_groups(elements)
    size = min(elements, GROUP)
    return {
        "ELEMENTS": elements,
        "REST": rest,
        "GROUPS": groups,
        "SIZE": size,
        "BLOCK_G": triton.next_power_of_2(groups),
        "BLOCK_S": triton.next_power_of_2(size),
        "BLOCK_R": triton.next_power_of_2(max(1, rest)),
    }
