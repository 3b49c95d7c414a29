"""4-bit weights, dequantized.

An integer minus its zero point is exact. The product with the scale is rounded once, to the dtype
of activations. A tile of bytes becomes two tiles: elements in the low bits are the first half of
the inputs of each block, those in the high bits the second half. See `inputs_of_bytes`.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import ScaledWeight
from sglang.srt.layers.triton_ops.scaled.fp4 import load_fp4, load_fp4_scales, unbiased
from sglang.srt.layers.triton_ops.scaled.tiles import zeros_of

_ROWS: Final = 8
_COLS: Final = 1024
"""Elements that a program dequantizes."""
_DEQUANTIZE_BF16: Final = tl.constexpr("""
{
.reg .b32 a, b, c, d;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 d, d, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 a, a, $7;
sub.rn.bf16x2 b, b, $8;
sub.rn.bf16x2 c, c, $7;
sub.rn.bf16x2 d, d, $8;
mul.rn.bf16x2 $0, a, $5;
mul.rn.bf16x2 $1, b, $6;
mul.rn.bf16x2 $2, c, $5;
mul.rn.bf16x2 $3, d, $6;
}
""")
"""Four bytes to four low and four high numbers. An integer in the last bits of a float's mantissa
makes 128 plus the integer, without a conversion; in fp16 it makes 1,024 plus the integer."""
_DEQUANTIZE_FP16: Final = tl.constexpr(
    _DEQUANTIZE_BF16.value.replace("bf16x2", "f16x2").replace("0x43004300", "0x64006400")
)


_REGISTERS: Final = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r")


@triton.jit
def first_halves(BLOCK: tl.constexpr, COLS: tl.constexpr) -> tl.tensor:
    """Inputs that the low integers of a tile of COLS inputs stand for, `[COLS / 2]`, ascending.
    The inputs of the high integers come BLOCK / 2 later."""
    HALF: tl.constexpr = BLOCK // 2
    cols = tl.arange(0, COLS // 2)
    return cols if BLOCK == COLS else cols // HALF * BLOCK + cols % HALF


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
    BLOCK: tl.constexpr,
    COLS: tl.constexpr,
    DTYPE: tl.constexpr,
    CUDA: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load COLS inputs from `begin` on, a multiple of COLS, of some rows of K: `[rows, COLS / 2]`
    of DTYPE twice, for the inputs of `first_halves` and those after them. Inputs beyond K are
    zeros.

    Args:
        rows: int64; indices into the weight, all experts' rows in one.
        CUDA: If true, use packed instructions of a GPU, for scales of DTYPE.
    """
    ROWS: tl.constexpr = rows.shape[0]
    BLOCKS: tl.constexpr = COLS // BLOCK
    IS_BF16: tl.constexpr = DTYPE is tl.bfloat16
    PACKED: tl.constexpr = CUDA and scales_ptr.dtype.element_ty == DTYPE
    BASE: tl.constexpr = 128.0 if IS_BF16 else 1024.0
    bytes = tl.arange(0, COLS // 2)[None, :]
    at = weight_ptr + (rows * (K // 2))[:, None] + bytes
    blocks = tl.arange(0, BLOCKS)[None, :]
    # If each block has its own scale, Triton sees that they are neighbours, and loads them at once.
    group = begin // BLOCK + blocks if GROUP == BLOCK else (begin + blocks * BLOCK) // GROUP
    groups = (rows * (K // GROUP))[:, None] + group
    if K % COLS == 0:
        packed = tl.load(at + begin // 2)
        scales = tl.load(scales_ptr + groups)
    else:
        packed = tl.load(at + begin // 2, mask=bytes < (K - begin) // 2, other=0)
        inside = blocks * BLOCK < K - begin
        scales = tl.load(scales_ptr + groups, mask=inside, other=0.0)
    zeros = tl.full([ROWS, BLOCKS], 8.0 + BASE, tl.float32)
    if ZEROS:
        if K % COLS == 0:
            zeros = tl.load(zeros_ptr + groups).to(tl.float32) + BASE
        else:
            zeros = tl.load(zeros_ptr + groups, mask=inside, other=0).to(tl.float32) + BASE
    if PACKED:
        scales = _over_bytes(scales, COLS // 2)
        zeros = _over_bytes(zeros.to(DTYPE), COLS // 2)
        if IS_BF16:
            low, high = tl.inline_asm_elementwise(
                _DEQUANTIZE_BF16, _REGISTERS, [packed, scales, zeros],
                dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            low, high = tl.inline_asm_elementwise(
                _DEQUANTIZE_FP16, _REGISTERS, [packed, scales, zeros],
                dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
            )  # fmt: skip
    else:
        scales = _over_bytes(scales.to(tl.float32), COLS // 2)
        zeros = _over_bytes(zeros - BASE, COLS // 2)
        low = (((packed & 0xF).to(tl.float32) - zeros) * scales).to(DTYPE)
        high = (((packed >> 4).to(tl.float32) - zeros) * scales).to(DTYPE)
    return _in_order(low, BLOCK), _in_order(high, BLOCK)


@triton.jit
def awaited(sums: tl.tensor, CUDA: tl.constexpr) -> tl.tensor:
    """The sums of a product whose left operand is from `load_int4`, once it has ended.

    Triton lets the product of a step end in the next step unless something reads its sums.
    Assemblers before CUDA 13.3 let the next step write to registers that this product still reads
    (https://github.com/triton-lang/triton/pull/11781).
    """
    if CUDA:
        sums = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [sums], tl.float32, True, 1)
    return sums


@triton.jit
def _over_bytes(values: tl.tensor, BYTES: tl.constexpr) -> tl.tensor:
    """Values of blocks, `[rows, blocks]`, for each byte, `[rows, BYTES]`."""
    ROWS: tl.constexpr = values.shape[0]
    BLOCKS: tl.constexpr = values.shape[1]
    wide = tl.broadcast_to(values[:, :, None], [ROWS, BLOCKS, BYTES // BLOCKS])
    return tl.reshape(wide, [ROWS, BYTES])


@triton.jit
def _in_order(values: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Values of bytes, `[rows, bytes]`, by ascending input: `inputs_of_bytes` undone."""
    ROWS: tl.constexpr = values.shape[0]
    BLOCKS: tl.constexpr = values.shape[1] // (BLOCK // 2)
    parts = tl.reshape(values, [ROWS, BLOCKS, 4, BLOCK // 32, 2, 2])
    return tl.reshape(tl.permute(parts, [0, 1, 3, 4, 2, 5]), [ROWS, values.shape[1]])


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
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CUDA: tl.constexpr,
) -> None:
    """Grid `(n / ROWS, k / COLS)`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    read = tl.minimum(rows, N - 1).to(tl.int64)
    begin = tl.program_id(1) * COLS
    if scales_ptr.dtype.element_ty == tl.uint8:
        DTYPE: tl.constexpr = out_ptr.dtype.element_ty
        scales = load_fp4_scales(scales_ptr, read, begin, K, COLS)
        values = load_fp4(weight_ptr, scales, read, begin, K, COLS, DTYPE, CUDA)
        values = unbiased(values.to(tl.float32), DTYPE).to(DTYPE)
        cols = begin + tl.arange(0, COLS)
        inside = (rows < N)[:, None] & (cols < K)[None, :]
        tl.store(out_ptr + (read * K)[:, None] + cols[None, :], values, mask=inside)
    else:
        low, high = load_int4(
            weight_ptr, scales_ptr, zeros_ptr, read, begin, K, ZEROS, GROUP, BLOCK, COLS,
            out_ptr.dtype.element_ty, CUDA,
        )  # fmt: skip
        cols = begin + first_halves(BLOCK, COLS)
        to = out_ptr + (read * K)[:, None] + cols[None, :]
        inside = (rows < N)[:, None] & (cols < K)[None, :]
        tl.store(to, low, mask=inside)
        tl.store(to + BLOCK // 2, high, mask=inside)


def dequantize_int4(weight: ScaledWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight `[outputs, inputs]`, of 4-bit integers or floats, in `dtype`."""
    outputs, inputs = weight.shape
    out = torch.empty((outputs, inputs), dtype=dtype, device=weight.elements.device)
    _dequantize_kernel[(triton.cdiv(outputs, _ROWS), triton.cdiv(inputs, _COLS))](
        weight.elements, weight.scales, zeros_of(weight), out, N=outputs, K=inputs,
        ZEROS=weight.zeros is not None, GROUP=weight.group, BLOCK=weight.block, ROWS=_ROWS,
        COLS=_COLS, CUDA=out.is_cuda, num_warps=4,
    )  # fmt: skip
    return out
