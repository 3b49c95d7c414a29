"""Activations rounded to fp8, with a scale for each group of a token's features.

All kernels that multiply fp8 weights round with `round_groups`, so the rounded activations of a
token are the same bits in all of them.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.early_start import (
    SEVERAL_ROWS,
    await_kernels_before,
    early_start,
)
from sglang.srt.layers.triton_ops.gating import silu_and_mul

_GROUPS: Final = 16
"""Groups of 128 that a program rounds."""


@triton.jit
def scale_of(most: tl.tensor) -> tl.tensor:
    """The scale of groups whose greatest magnitude is `most`, fp32: `most` becomes 448, the
    greatest number of e4m3. Groups of zeros, or of less than 1e-30, have scale 1."""
    return tl.where(most > 1e-30, most * (1.0 / 448.0), 1.0)


@triton.jit
def round_with(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """`x / scale` in fp8, both fp32 of shapes that broadcast. NaN stays NaN, infinity becomes NaN
    (its scale is infinite)."""
    return (x * tl.div_rn(1.0, scale)).to(tl.float8e4nv)


@triton.jit
def round_groups(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Round fp32 groups `[groups, size]`: fp8 of the same shape, and fp32 scales `[groups]`."""
    scales = scale_of(tl.max(tl.abs(x), axis=1))
    return round_with(x, scales[:, None]), scales


@triton.jit
def gate(gates: tl.tensor, ups: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """`silu(gates) * ups`, fp32 rounded to DTYPE at the same points as in `silu_and_mul`."""
    activated = (gates / (1.0 + tl.exp(-gates))).to(DTYPE).to(tl.float32)
    return (activated * ups).to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "given"])
def _round_groups_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    rows: tl.tensor,
    given: tl.tensor,
    stride: tl.tensor,
    PER_ROW: tl.constexpr,
    SIZE: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Round BLOCK groups of SIZE features, of rows of PER_ROW groups; rows that are not given are
    zeros.

    GATED: `silu(gate) * up` of rows of gate and up.
    """
    await_kernels_before(EARLY)
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = group < rows * PER_ROW
    cols = tl.arange(0, SIZE)
    row = (group // PER_ROW).to(tl.int64)
    at = x_ptr + (row * stride + group % PER_ROW * SIZE)[:, None] + cols[None, :]
    is_given = (row < given)[:, None]
    x = tl.load(at, mask=is_given, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(at + PER_ROW * SIZE, mask=is_given, other=0.0)
        x = gate(x, up.to(tl.float32), x_ptr.dtype.element_ty)
    rounded, scales = round_groups(x)
    to = out_ptr + group.to(tl.int64)[:, None] * SIZE + cols[None, :]
    tl.store(to, rounded, mask=inside[:, None])
    tl.store(scales_ptr + group % PER_ROW * rows + row, scales, mask=inside)


@triton.jit
def most_of_rows(
    rows: tl.tensor, used: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The greatest magnitude of each row of SIZE, fp32, for pointers `rows` `[n]`; 0 for rows that
    are not used."""
    cols = tl.arange(0, BLOCK)[None, :]
    most = tl.zeros([rows.shape[0], BLOCK], tl.float32)
    for begin in range(0, SIZE, BLOCK):
        inside = used[:, None] & (cols < SIZE - begin)
        x = tl.load(rows[:, None] + begin + cols, mask=inside, other=0.0)
        most = tl.maximum(most, tl.abs(x.to(tl.float32)))
    return tl.max(most, axis=1)


@triton.jit
def _round_rows_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    stride: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Round a row of SIZE features, which is one group."""
    await_kernels_before(EARLY)
    row = tl.program_id(0).to(tl.int64)
    one = tl.arange(0, 1)
    scale = scale_of(most_of_rows(x_ptr + row * stride + one, one == 0, SIZE, BLOCK))
    cols = tl.arange(0, BLOCK)
    for begin in range(0, SIZE, BLOCK):
        inside = cols < SIZE - begin
        x = tl.load(x_ptr + row * stride + begin + cols, mask=inside, other=0.0)
        rounded = round_with(x.to(tl.float32), scale)
        tl.store(out_ptr + row * SIZE + begin + cols, rounded, mask=inside)
    tl.store(scales_ptr + row + one, scale)


def quantize_activations(
    x: torch.Tensor, group: int, *, more_rows: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each group of a row's features to fp8 e4m3, with one scale: its greatest magnitude
    times 1/448.

    Args:
        x: `[num_rows, features]`, dense rows of any stride.
        group: Features of a group: a power of two that divides `features`, or all features.
        more_rows: Rows of zeros after those of `x`; 0 if a group is a whole row.

    Returns:
        fp8 elements, contiguous `[num_rows + more_rows, features]`, and fp32 scales, `[num_rows +
        more_rows, features / group]`. Columns of scales are contiguous.
    """
    rows, features = x.shape
    assert x.stride(1) == 1 and features % group == 0
    if group != features:
        return _round_groups(x, features, group, more_rows)
    assert not more_rows
    out, scales = empty_rounded(rows, features, group, x.device)
    block = min(4096, triton.next_power_of_2(features))
    _round_rows_kernel[(rows,)](
        x,
        out,
        scales,
        x.stride(0),
        SIZE=features,
        BLOCK=block,
        num_warps=4,
        **early_start(x, most_rows=SEVERAL_ROWS, is_short=True),
    )
    return out, scales


def quantize_gated(
    gate_up: torch.Tensor, group: int, *, more_rows: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_activations` of `silu_and_mul(gate_up)`, in one launch for groups of 128.

    Args:
        gate_up: Contiguous `[num_rows, 2 * features]`: gate, then up.
    """
    features = gate_up.shape[1] // 2
    if group == features:
        return quantize_activations(silu_and_mul(gate_up), group, more_rows=more_rows)
    return _round_groups(gate_up, features, group, more_rows)


def _round_groups(
    x: torch.Tensor, features: int, group: int, more_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_activations` of groups that are parts of rows; `quantize_gated` if `x` has twice
    as many features as the result."""
    rows = len(x) + more_rows
    out, scales = empty_rounded(rows, features, group, x.device)
    _round_groups_kernel[(triton.cdiv(scales.numel(), _GROUPS),)](
        x, out, scales, rows, len(x), x.stride(0), PER_ROW=features // group, SIZE=group,
        GATED=x.shape[1] != features, BLOCK=_GROUPS, num_warps=4,
        **early_start(x, most_rows=SEVERAL_ROWS, is_short=True),
    )  # fmt: skip
    return out, scales


def empty_rounded(
    rows: int, features: int, group: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for what `quantize_activations` returns."""
    out = torch.empty((rows, features), dtype=torch.float8_e4m3fn, device=device)
    return out, torch.empty((features // group, rows), dtype=torch.float32, device=device).t()
