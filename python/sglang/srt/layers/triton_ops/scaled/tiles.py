"""Rows of weights with scales, and their products with vectors, as parts of kernels.

The rows are read in tiles: some columns of the same rows of several matrices, one matrix for each
vector. Reading the weights is the bound, so no tensor cores are used.
"""

from __future__ import annotations

from typing import Final, TypedDict

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import ScaledWeight
from sglang.srt.layers.triton_ops.early_start import await_kernels_before
from sglang.srt.layers.triton_ops.rounding import most_of_rows, round_with, scale_of
from sglang.srt.layers.triton_ops.scaled.fp4 import (
    floats_of_pair,
    lifted,
    lifted_scale,
    numbers_of_pair,
    pairs_of_word,
)

_PIECE: Final = tl.constexpr(8)
"""Inputs of fp8 weights that a thread reads at once: 16 bytes of `x`. Weights are read alike,
though in 8 bytes, so that no numbers move between threads."""
_BYTES: Final = tl.constexpr(16)
"""Bytes of 4-bit elements that a thread reads at once."""
_TO_FLOATS: Final = tl.constexpr("""
{
.reg .b32 a, b;
and.b32 a, $8, 0x0F0F0F0F;
shr.u32 b, $8, 4;
and.b32 b, b, 0x0F0F0F0F;
prmt.b32 $0, a, 0x43000000, 0x7044;
prmt.b32 $1, a, 0x43000000, 0x7144;
prmt.b32 $2, a, 0x43000000, 0x7244;
prmt.b32 $3, a, 0x43000000, 0x7344;
prmt.b32 $4, b, 0x43000000, 0x7044;
prmt.b32 $5, b, 0x43000000, 0x7144;
prmt.b32 $6, b, 0x43000000, 0x7244;
prmt.b32 $7, b, 0x43000000, 0x7344;
}
""")
"""Four bytes to four low and four high integers, each plus 128. An integer in these bits of a
float's mantissa makes this sum, without a conversion."""
_FLOATS: Final = tl.constexpr("=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r")
_WORDS: Final = tl.constexpr(4)
"""Words of 4-bit floats that a thread reads at once, those of a span."""
_WORDS_OF_WARP: Final = tl.constexpr(32 * 4)
_SPAN: Final = 128
"""Most inputs of a span: neighbours with the same scales."""
MULTIPROCESSORS: Final = 132
"""Multiprocessors of an H100 and an H200, where sizes of programs were measured."""


class WeightKind(TypedDict):
    """Sizes of a weight with scales, as kernels take them."""

    FP8: bool
    ZEROS: bool
    HEIGHT: int
    GROUP: int
    SPAN: int
    PACKED: bool
    """True if 4-bit elements are unpacked by packed instructions of a GPU."""


def kind_of(weight: ScaledWeight) -> WeightKind:
    """The constant arguments of a kernel that reads `weight`."""
    return {
        "FP8": weight.is_fp8,
        "ZEROS": weight.zeros is not None,
        "HEIGHT": weight.height,
        "GROUP": weight.group,
        "SPAN": _SPAN if weight.is_fp8 else weight.block,
        "PACKED": not weight.is_fp8 and weight.elements.is_cuda,
    }


@triton.jit
def _add_fp8_(
    acc: tl.tensor,
    elements: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    x_scales: tl.tensor,
    WHOLE: tl.constexpr,
) -> tl.tensor:
    """Add the products of some columns to `acc` `[rows, vectors, spans, pieces]`.

    `x_scales` `[vectors]` are the scales of `x` if a vector is one group (WHOLE).
    """
    x = tl.reshape(x, [acc.shape[1], acc.shape[2], acc.shape[3], _PIECE])
    if WHOLE:
        rounded = round_with(x, x_scales[:, None, None, None])
        scales *= x_scales[None, :, None]
    else:
        of_spans = scale_of(tl.max(tl.max(tl.abs(x), axis=3), axis=2))
        rounded = round_with(x, of_spans[:, :, None, None])
        scales *= of_spans[None, :, :]
    products = elements.to(tl.float32) * rounded.to(tl.float32)[None, :, :, :, :]
    return acc + tl.sum(products, axis=4) * scales[:, :, :, None]


@triton.jit
def _add_int4_(
    acc: tl.tensor,
    elements: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    x: tl.tensor,
    PACKED: tl.constexpr,
) -> tl.tensor:
    """Add the products of some columns to `acc` `[rows, vectors, spans, pieces]`."""
    COUNT: tl.constexpr = acc.shape[1]
    SPANS: tl.constexpr = acc.shape[2]
    PARTS: tl.constexpr = x.shape[1] // SPANS // 32
    # In the order of bytes; see `inputs_of_bytes`.
    x = tl.reshape(x, [COUNT, SPANS, 2, PARTS, 2, 4, 2])
    x = tl.permute(x, [0, 1, 5, 3, 4, 6, 2])
    x0, x1 = tl.split(tl.reshape(x, [COUNT, SPANS, acc.shape[3], 16 * PARTS // acc.shape[3], 2]))
    totals = tl.sum(x0 + x1, axis=3)
    if PACKED:
        low, high = tl.inline_asm_elementwise(
            _TO_FLOATS,
            _FLOATS,
            [elements],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
        zeros += 128.0
    else:
        low, high = (elements & 0xF).to(tl.float32), (elements >> 4).to(tl.float32)
    # Separate sums, which are chains of multiply-adds.
    part = tl.sum(low * x0[None, :, :, :, :], axis=4)
    part += tl.sum(high * x1[None, :, :, :, :], axis=4)
    part -= zeros[:, :, :, None] * totals[None, :, :, :]
    return acc + part * scales[:, :, :, None]


@triton.jit
def _add_fp4_(
    acc: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    factors: tl.tensor,
    used: tl.tensor,
    step: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """`add_tile_` for 4-bit floats. In a program of one warp, a thread reads those numbers of `x`
    that its words belong to: where a row has fewer words than a warp, several threads read the
    same numbers."""
    ROWS: tl.constexpr = acc.shape[0]
    COUNT: tl.constexpr = acc.shape[1]
    SPANS: tl.constexpr = acc.shape[2]
    WIDTH: tl.constexpr = BLOCK_K // 8
    COPIES: tl.constexpr = max(1, min(ROWS, _WORDS_OF_WARP // (COUNT * WIDTH)))
    numbers = tl.arange(0, WIDTH)[None, :]
    at = tl.broadcast_to(x.to(tl.pointer_type(tl.int32))[None, :], [COPIES, COUNT])
    at = tl.reshape(at, [COPIES * COUNT, 1])
    is_used = tl.reshape(tl.broadcast_to(used[None, :], [COPIES, COUNT]), [COPIES * COUNT, 1])
    inside = is_used & (numbers // _WORDS < K // 32 - step * SPANS)
    # The first two inputs of each word; see `fp4_words`.
    at = at + step * (BLOCK_K // 2) + (numbers // _WORDS * 16 + numbers % _WORDS)
    parts = tl.reshape(words, [ROWS // COPIES, COPIES, COUNT, WIDTH])
    pairs = pairs_of_word(parts)
    sums = tl.zeros([ROWS // COPIES, COPIES, COUNT, WIDTH], tl.float32)
    for n in tl.static_range(4):
        two_at = tl.max_contiguous(tl.multiple_of(at + 4 * n, [1, 16]), [1, 4])
        two = tl.reshape(tl.load(two_at, mask=inside, other=0), [1, COPIES, COUNT, WIDTH])
        x_low, x_high = numbers_of_pair(two, x.dtype.element_ty)
        low, high = floats_of_pair(pairs[n])
        sums += low * lifted(x_low)
        sums += high * lifted(x_high)
    sums = tl.sum(tl.reshape(sums, [ROWS, COUNT, SPANS, 4]), axis=3)
    own = tl.reshape(lifted_scale(scales), [ROWS, COUNT, SPANS]) * factors[None, :, None]
    return acc + (sums * own)[:, :, :, None]


@triton.jit
def rows_at(
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    first: tl.tensor,
    left: tl.tensor,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    K: tl.constexpr,
    FP8: tl.constexpr,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Pointers to some rows of several matrices, to their scales and to their zero points, each
    `[rows, matrices]`; to one scale for rows that share it.

    Args:
        first: int64 `[matrices]`: a matrix's first row, a multiple of ROWS, in the whole weight.
        left: Rows from there on that exist; the last one stands for others.
        ROWS: Neighbours, all in one block of outputs.
        HALF: If not 0, each row is followed by the one so many rows below it.
    """
    BYTES: tl.constexpr = K if FP8 else K // 2
    GROUPS: tl.constexpr = K // GROUP
    HALVES: tl.constexpr = 2 if HALF else 1
    nth = tl.arange(0, ROWS * HALVES).to(tl.int64)
    rows = (tl.minimum(nth // HALVES, left - 1) + nth % HALVES * HALF)[:, None]
    scaled = rows
    if HEIGHT > 1:
        scaled = (tl.arange(0, HALVES) * (HALF // HEIGHT))[:, None]
    return (
        (weight_ptr + first * BYTES)[None, :] + rows * BYTES,
        (scales_ptr + first // HEIGHT * GROUPS)[None, :] + scaled * GROUPS,
        (zeros_ptr + first * GROUPS)[None, :] + rows * GROUPS,
    )


@triton.jit
def _flat(values: tl.tensor) -> tl.tensor:
    """`[rows, matrices]` to `[rows * matrices, 1]`."""
    return tl.reshape(values, [values.shape[0] * values.shape[1], 1])


@triton.jit
def load_tile(
    at: tl.tuple,
    own: tl.tensor,
    step: tl.tensor,
    K: tl.constexpr,
    FP8: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """BLOCK_K columns of some rows as they are stored: elements `[rows * matrices, bytes]`, or
    int32 words of 4-bit floats, scales and zero points `[rows * matrices, spans]`. Scales are
    converted later, because a conversion waits for its load.

    Args:
        at: From `rows_at`. Several matrices begin at multiples of 16 bytes.
        own: `[matrices]`: whether a matrix is read; the others' elements are zeros.
    """
    weights, scale_rows, zero_rows = at
    FP4: tl.constexpr = scale_rows.dtype.element_ty == tl.uint8
    SHARE: tl.constexpr = 1 if FP8 else 8 if FP4 else 2
    AT_ONCE: tl.constexpr = _PIECE if FP8 else _WORDS if FP4 else min(_BYTES, SPAN // 2)
    if FP4:
        weights = weights.to(tl.pointer_type(tl.int32))
    STEP: tl.constexpr = BLOCK_K // SHARE
    SPANS: tl.constexpr = BLOCK_K // SPAN
    # Loads have two dimensions, so that neighbours in a row belong to neighbouring threads.
    cols = tl.max_contiguous(tl.arange(0, STEP), AT_ONCE)[None, :]
    is_own = _flat(tl.broadcast_to(own[None, :], weights.shape))
    is_read = is_own & (cols < K // SHARE - step * STEP)
    elements_at = _flat(weights) + step * STEP + cols
    if FP4:
        elements_at = tl.max_contiguous(tl.multiple_of(elements_at, [1, 16]), [1, AT_ONCE])
    elif own.shape[0] > 1 and K // SHARE // AT_ONCE * AT_ONCE == K // SHARE:
        # The compiler does not see it behind the change of shape.
        elements_at = tl.max_contiguous(tl.multiple_of(elements_at, [1, AT_ONCE]), [1, AT_ONCE])
    # The compiler does not convert integers to fp8.
    elements = tl.load(elements_at, mask=is_read, other=0.0 if FP8 else 0)
    group = step * SPANS + tl.arange(0, SPANS)[None, :]
    is_inside = group < (K + SPAN - 1) // SPAN
    if GROUP != SPAN:
        group = group * SPAN // GROUP
    has_scale = _flat(tl.broadcast_to(own[None, :], scale_rows.shape)) & is_inside
    scales_at = _flat(scale_rows) + group
    if FP4:
        # A thread reads the scales of its own words, one at a time: those beside them are others'.
        scales_at = tl.multiple_of(scales_at, [1, 1])
    scales = tl.load(scales_at, mask=has_scale, other=0)
    zeros = scales
    if ZEROS:
        zeros = tl.load(_flat(zero_rows) + group, mask=is_own & is_inside, other=0)
    return elements, scales, zeros


@triton.jit
def no_sums(
    VECTORS: tl.constexpr, ROWS: tl.constexpr, FP8: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Zeros for `add_tile_` to add to."""
    PIECES: tl.constexpr = SPAN // _PIECE if FP8 else SPAN // 2 // min(_BYTES, SPAN // 2)
    return tl.zeros([ROWS, VECTORS, BLOCK_K // SPAN, PIECES], tl.float32)


@triton.jit
def add_tile_(
    acc: tl.tensor,
    tile: tl.tuple,
    x: tl.tensor,
    x_scales: tl.tensor,
    factors: tl.tensor,
    used: tl.tensor,
    step: tl.tensor,
    K: tl.constexpr,
    FP8: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Add the products of BLOCK_K columns to `acc` `[rows, vectors, spans, pieces]`.

    Args:
        tile: From `load_tile`: rows of one matrix for each vector.
        x: `[vectors]`, pointers to vectors of K.
        x_scales: `[vectors]`, from `whole_scales`.
        factors: fp32 `[vectors]`, of the products.
        used: `[vectors]`; the others' sums are 0.
    """
    elements, scales, zeros = tile
    ROWS: tl.constexpr = acc.shape[0]
    COUNT: tl.constexpr = acc.shape[1]
    SPANS: tl.constexpr = acc.shape[2]
    if scales.dtype == tl.uint8:
        acc = _add_fp4_(acc, elements, scales, x, factors, used, step, K, BLOCK_K)
    else:
        cols = step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        inside = used[:, None] & (cols < K)
        part = tl.load(x[:, None] + cols, mask=inside, other=0.0).to(tl.float32)
        SCALED: tl.constexpr = scales.shape[0] // COUNT
        scales = tl.reshape(scales.to(tl.float32), [1, SCALED, COUNT, SPANS])
        scales = tl.broadcast_to(scales, [ROWS // SCALED, SCALED, COUNT, SPANS])
        scales = tl.reshape(scales, [ROWS, COUNT, SPANS]) * factors[None, :, None]
        PIECE: tl.constexpr = elements.shape[1] // SPANS // acc.shape[3]
        bytes_ = tl.reshape(elements, [ROWS, COUNT, SPANS, acc.shape[3], PIECE])
        if FP8:
            acc = _add_fp8_(acc, bytes_, scales, part, x_scales, GROUP == K)
        else:
            points = tl.full([1, 1, 1], 8.0, tl.float32)
            if ZEROS:
                points = tl.reshape(zeros.to(tl.float32), [ROWS, COUNT, SPANS])
            acc = _add_int4_(acc, bytes_, scales, points, part, PACKED)
    return acc


@triton.jit
def whole_scales(
    x: tl.tensor,
    used: tl.tensor,
    K: tl.constexpr,
    FP8: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """The scales `[vectors]` of fp8 vectors that are one group; ones for others."""
    if FP8 and GROUP == K:
        scales = scale_of(most_of_rows(x, used, K, BLOCK_K))
    else:
        scales = tl.full([x.shape[0]], 1.0, tl.float32)
    return scales


@triton.jit
def multiply_row(
    x: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    first: tl.tensor,
    left: tl.tensor,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    K: tl.constexpr,
    FP8: tl.constexpr,
    ZEROS: tl.constexpr,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
) -> tl.tensor:
    """Sums of the products of the vector `x` and some rows of a weight, fp32 `[rows]`.

    Reads BLOCK_K inputs of the weight and their scales before it waits for earlier kernels; see
    `early_start`.

    Args:
        x: Pointer to a vector of K.
        first: int64, see `rows_at`; `left`, ROWS and HALF likewise.
    """
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    one = tl.arange(0, 1)
    own = tl.full([1], True, tl.int1)
    at = rows_at(
        weight_ptr, scales_ptr, zeros_ptr, first + one, left, ROWS, HALF, K, FP8, HEIGHT, GROUP
    )
    tile = load_tile(at, own, 0, K, FP8, ZEROS, GROUP, SPAN, BLOCK_K)
    await_kernels_before(EARLY)
    factors = tl.full([1], 1.0, tl.float32)
    x_scales = whole_scales(x + one, own, K, FP8, GROUP, BLOCK_K)
    acc = no_sums(1, at[0].shape[0], FP8, SPAN, BLOCK_K)
    acc = add_tile_(
        acc, tile, x + one, x_scales, factors, own, 0, K, FP8, ZEROS, GROUP, PACKED, BLOCK_K
    )
    for step in range(1, STEPS):
        tile = load_tile(at, own, step, K, FP8, ZEROS, GROUP, SPAN, BLOCK_K)
        acc = add_tile_(
            acc, tile, x + one, x_scales, factors, own, step, K, FP8, ZEROS, GROUP, PACKED, BLOCK_K
        )
    return tl.reshape(tl.sum(tl.sum(acc, axis=3), axis=2), [acc.shape[0]])


@triton.jit
def rows_left(size: tl.constexpr, begin: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """At least ROWS if so many of `size` rows follow `begin`, a multiple of ROWS; known when a
    kernel is compiled if that is always so."""
    if size % ROWS:
        left = size - begin
    else:
        left = ROWS
    return left


def inputs_at_once(inputs: int, kind: WeightKind, most: int) -> int:
    """BLOCK_K of `load_tile`: up to `most`, and a divisor of `inputs` if that is not small."""
    block: int = min(most, triton.next_power_of_2(inputs))
    while inputs % block and block > max(256, kind["SPAN"]):
        block //= 2
    return max(kind["SPAN"], block)


def fewest_steps(inputs: int, most: int) -> int:
    """BLOCK_K of `load_tile` for 4-bit floats: the largest block, from 256 to `most`, of those with
    the fewest columns beyond `inputs`."""
    blocks: list[int] = [min(most, triton.next_power_of_2(inputs))]
    while blocks[-1] > 256:
        blocks.append(blocks[-1] // 2)
    return min(blocks, key=lambda block: (triton.cdiv(inputs, block) * block, -block))


def is_aligned(*tensors: torch.Tensor) -> bool:
    """True if the tensors begin at multiples of 16 bytes. Kernels of 4-bit floats read so many at a
    time, of their inputs too, whatever the compiler sees."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def zeros_of(weight: ScaledWeight) -> torch.Tensor:
    """The zero points, or a tensor in their place that no kernel reads."""
    return weight.elements if weight.zeros is None else weight.zeros
