"""4-bit weights, dequantized."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import ScaledWeight

_ROWS: Final = 8
_COLS: Final = 1024
"""Elements that a program dequantizes."""


@triton.jit
def load_int4(
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    rows: tl.tensor,
    begin: tl.tensor,
    K: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    COLS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Load COLS inputs from `begin` on, a multiple of COLS, of some rows of K: `[rows, COLS]` of
    DTYPE. Inputs beyond K are zeros.

    Args:
        rows: int64; indices into the weight, all experts' rows in one.
    """
    SPAN: tl.constexpr = GROUP if GROUP < COLS and GROUP < K else COLS
    SPANS: tl.constexpr = COLS // SPAN
    GROUPS: tl.constexpr = K // GROUP
    bytes = begin // 2 + tl.arange(0, COLS // 2)[None, :]
    packed = tl.load(weight_ptr + (rows * (K // 2))[:, None] + bytes, mask=bytes < K // 2, other=0)
    spans = begin // SPAN + tl.arange(0, SPANS)[None, :]
    groups = spans
    if GROUP != SPAN:
        groups = spans * SPAN // GROUP
    inside = spans < (K + SPAN - 1) // SPAN
    at = (rows * GROUPS)[:, None] + groups
    scales = tl.load(scales_ptr + at, mask=inside, other=0.0).to(tl.float32)
    both = tl.join(packed & 0xF, packed >> 4)
    elements = tl.reshape(both, [rows.shape[0], SPANS, SPAN]).to(tl.float32)
    if ZEROS:
        zeros = tl.load(zeros_ptr + at, mask=inside, other=0).to(tl.float32)
        elements -= zeros[:, :, None]
    else:
        elements -= 8.0
    return tl.reshape(elements * scales[:, :, None], [rows.shape[0], COLS]).to(DTYPE)


@triton.jit
def _dequantize_kernel(
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
) -> None:
    """Grid `(n / ROWS, k / COLS)`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    read = tl.minimum(rows, N - 1).to(tl.int64)
    begin = tl.program_id(1) * COLS
    dtype = out_ptr.dtype.element_ty
    elements = load_int4(
        weight_ptr, scales_ptr, zeros_ptr, read, begin, K, ZEROS, GROUP, COLS, dtype
    )
    cols = begin + tl.arange(0, COLS)
    to = out_ptr + (read * K)[:, None] + cols[None, :]
    tl.store(to, elements, mask=(rows < N)[:, None] & (cols < K)[None, :])


def dequantize_int4(weight: ScaledWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight `[outputs, inputs]` in `dtype`: computed in fp32, rounded once."""
    outputs, inputs = weight.shape
    out = torch.empty((outputs, inputs), dtype=dtype, device=weight.elements.device)
    zeros = weight.elements if weight.zeros is None else weight.zeros
    _dequantize_kernel[(triton.cdiv(outputs, _ROWS), triton.cdiv(inputs, _COLS))](
        weight.elements, weight.scales, zeros, out, N=outputs, K=inputs,
        ZEROS=weight.zeros is not None, GROUP=weight.group, ROWS=_ROWS, COLS=_COLS, num_warps=4,
    )  # fmt: skip
    return out
