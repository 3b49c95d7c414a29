"""4-bit floats (e2m1) with exponents (e8m0) as scales, as parts of kernels.

A word has eight floats, in the order of bits that `fp4_words` makes: an integer's operation on the
word moves the sign and the magnitude of two floats to their places in two bf16 numbers, the floats
times 2^-126. A float of 0.5 is a subnormal number there, so no case is apart. Products with powers
of two are exact, and GPUs multiply subnormal numbers as they do others.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4.1.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import FP4_BIAS

_HALVES: Final = tl.constexpr(-0x7E3F7E40)
"""Sign and magnitude of both halves of a word: 0x81C081C0 as an int32."""
_MAGNITUDES: Final = tl.constexpr(0x01C001C0)
_SIGNS: Final = tl.constexpr(-0x7FFF8000)
_THIRD: Final = tl.constexpr(0x40074007)
_BIAS: Final = tl.constexpr(FP4_BIAS)
_UNBIAS: Final = tl.constexpr(2.0**FP4_BIAS)
_LIFT: Final = tl.constexpr(2.0**64)
_LIFT_OF_SCALES: Final = tl.constexpr((126 - 64) << 23)
_MULTIPLY: Final = tl.constexpr("mul.rn.bf16x2 $0, $1, $2;")


@triton.jit
def pairs_of_word(words: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The floats of int32 words, times 2^-126: four words of two bf16 numbers each."""
    third = (words & _THIRD) * 66
    fourth = ((words >> 3) & _MAGNITUDES) | ((words << 2) & _SIGNS)
    return words & _HALVES, (words << 3) & _HALVES, third & _HALVES, fourth


@triton.jit
def floats_of_pair(pair: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The bf16 numbers in the low and high halves of int32 words, in fp32."""
    low = (pair << 16).to(tl.float32, bitcast=True)
    return low, (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def numbers_of_pair(pair: tl.tensor, DTYPE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The numbers of DTYPE, of 16 bits, in the low and high halves of int32 words, in fp32."""
    if DTYPE is tl.bfloat16:
        low, high = floats_of_pair(pair)
    else:
        low = pair.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def lifted(x: tl.tensor) -> tl.tensor:
    """Numbers, of less than 2^64, whose products with 4-bit floats times 2^-126 have all bits."""
    return x * _LIFT


@triton.jit
def lifted_scale(bits: tl.tensor) -> tl.tensor:
    """e8m0 scales, fp32, times the factor that sums of such products lack."""
    return ((bits.to(tl.int32) << 23) + _LIFT_OF_SCALES).to(tl.float32, bitcast=True)


@triton.jit
def bf16_of_pair(pair: tl.tensor) -> tl.tensor:
    """The bf16 numbers in int32 words, with a last dimension of 2."""
    low = pair.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True))


@triton.jit
def pairs_of_scale(bits: tl.tensor) -> tl.tensor:
    """e8m0 scales times 2^(126 - FP4_BIAS), as two bf16 numbers in an int32."""
    return bits.to(tl.int32) * 0x00800080 + (126 - _BIAS) * 0x00800080


@triton.jit
def multiply_pairs(pairs: tl.tensor, scales: tl.tensor, CUDA: tl.constexpr) -> tl.tensor:
    """Products of words of two bf16 numbers, each rounded."""
    if CUDA:
        product = tl.inline_asm_elementwise(
            _MULTIPLY, "=r,r,r", [pairs, scales], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low, high = floats_of_pair(pairs)
        low_scale, high_scale = floats_of_pair(scales)
        low = (low * low_scale).to(tl.bfloat16).to(tl.int16, bitcast=True)
        high = (high * high_scale).to(tl.bfloat16).to(tl.int16, bitcast=True)
        product = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    return product


@triton.jit
def load_fp4_scales(
    scales_ptr: tl.tensor,
    rows: tl.tensor,
    begin: tl.tensor,
    K: tl.constexpr,
    COLS: tl.constexpr,
) -> tl.tensor:
    """The scales of COLS inputs from `begin` on, a multiple of COLS: uint8 `[rows, COLS / 32]`.

    Asynchronous copies have more bytes, so a loop loads the scales of its next step. Triton 3.6
    pipelines no loop that carries values over two steps.
    """
    blocks = tl.arange(0, COLS // 32)[None, :]
    at = scales_ptr + (rows * (K // 32))[:, None] + begin // 32 + blocks
    return tl.load(at, mask=blocks * 32 < K - begin, other=0)


@triton.jit
def load_fp4(
    weight_ptr: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    begin: tl.tensor,
    K: tl.constexpr,
    COLS: tl.constexpr,
    DTYPE: tl.constexpr,
    CUDA: tl.constexpr,
) -> tl.tensor:
    """Load COLS inputs from `begin` on, a multiple of COLS, of some rows of K: `[rows, COLS]` of
    DTYPE, in bf16 times 2^-FP4_BIAS; see `unbiased`. Inputs beyond K are zeros.

    Args:
        scales: From `load_fp4_scales`.
        rows: int64; indices into the weight, all experts' rows in one.
    """
    ROWS: tl.constexpr = rows.shape[0]
    BLOCKS: tl.constexpr = COLS // 32
    words = tl.arange(0, COLS // 8)[None, :]
    at = weight_ptr.to(tl.pointer_type(tl.int32)) + (rows * (K // 8))[:, None] + words
    if K % COLS == 0:
        packed = tl.load(at + begin // 8)
    else:
        packed = tl.load(at + begin // 8, mask=words < (K - begin) // 8, other=0)
    factors = tl.broadcast_to(pairs_of_scale(scales)[:, :, None], [ROWS, BLOCKS, 4])
    factors = tl.reshape(factors, [ROWS, COLS // 8])
    a, b, c, d = pairs_of_word(packed)
    a = bf16_of_pair(multiply_pairs(a, factors, CUDA))
    b = bf16_of_pair(multiply_pairs(b, factors, CUDA))
    c = bf16_of_pair(multiply_pairs(c, factors, CUDA))
    d = bf16_of_pair(multiply_pairs(d, factors, CUDA))
    # Dimensions: row, block, word, half of the word, and the two bits of the place in the half.
    both = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), [ROWS, BLOCKS, 4, 2, 2, 2])
    ordered = tl.reshape(tl.permute(both, [0, 1, 5, 4, 2, 3]), [ROWS, COLS])
    if DTYPE is not tl.bfloat16:
        # fp16 has fewer exponents than the scales.
        ordered = (ordered.to(tl.float32) * _UNBIAS).to(DTYPE)
    return ordered


@triton.jit
def unbiased(sums: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """fp32 sums of products of numbers from `load_fp4`, times the factor that these lack."""
    return sums * _UNBIAS if DTYPE is tl.bfloat16 else sums
