"""One row times a weight with scales. Reading the weights is the bound, so no tensor cores are
used."""

from __future__ import annotations

from typing import Final, TypedDict

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import ScaledWeight
from sglang.srt.layers.triton_ops.early_start import await_kernels_before, early_start
from sglang.srt.layers.triton_ops.rounding import gate, most_of_rows, round_with, scale_of

_PIECE: Final = tl.constexpr(8)
"""Inputs of fp8 weights that a thread reads at once: 16 bytes of `x`. Weights are read alike,
though in 8 bytes, so that no numbers move between threads."""
_BYTES: Final = tl.constexpr(16)
"""Bytes of 4-bit integers that a thread reads at once."""
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
_SPAN: Final = 128
"""Most inputs of a span: neighbours with the same scales."""


class WeightKind(TypedDict):
    """Sizes of a weight with scales, as kernels take them."""

    FP8: bool
    ZEROS: bool
    HEIGHT: int
    GROUP: int
    SPAN: int
    PACKED: bool
    """True if 4-bit integers are unpacked by packed instructions of a GPU."""


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
    """Add the products of some columns to `acc` `[vectors, rows, spans, pieces]`.

    `x_scales` `[vectors]` are the scales of `x` if a vector is one group (WHOLE); the caller then
    multiplies by them.
    """
    x = tl.reshape(x, [acc.shape[0], acc.shape[2], acc.shape[3], _PIECE])
    if WHOLE:
        rounded = round_with(x, x_scales[:, None, None, None])
    else:
        of_spans = scale_of(tl.max(tl.max(tl.abs(x), axis=3), axis=2))
        rounded = round_with(x, of_spans[:, :, None, None])
        scales *= of_spans[:, None, :]
    products = elements.to(tl.float32) * rounded.to(tl.float32)[:, None, :, :, :]
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
    """Add the products of some columns to `acc` `[vectors, rows, spans, pieces]`."""
    COUNT: tl.constexpr = acc.shape[0]
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
            "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r",
            [elements],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
        zeros += 128.0
    else:
        low, high = (elements & 0xF).to(tl.float32), (elements >> 4).to(tl.float32)
    # Separate sums, which are chains of multiply-adds.
    part = tl.sum(low * x0[:, None, :, :, :], axis=4)
    part += tl.sum(high * x1[:, None, :, :, :], axis=4)
    part -= zeros[:, :, :, None] * totals[:, None, :, :]
    return acc + part * scales[:, :, :, None]


@triton.jit
def _load_scales(
    scale_rows: tl.tensor,
    zero_rows: tl.tensor,
    own: tl.tensor,
    step: tl.tensor,
    K: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Scales and zero points of BLOCK_K columns as they are stored, `[vectors * rows, spans]` each.
    They are converted later, because a conversion waits for its load.

    Args:
        scale_rows: `[vectors * rows, 1]`: pointers to scales of each row; `zero_rows` likewise.
    """
    SPANS: tl.constexpr = BLOCK_K // SPAN
    group = step * SPANS + tl.arange(0, SPANS)[None, :]
    has_scale = own & (group < (K + SPAN - 1) // SPAN)
    if GROUP != SPAN:
        group = group * SPAN // GROUP
    scales = tl.load(scale_rows + group, mask=has_scale, other=0.0)
    zeros = scales
    if ZEROS:
        zeros = tl.load(zero_rows + group, mask=has_scale, other=0)
    return scales, zeros


@triton.jit
def _add_step_(
    acc: tl.tensor,
    elements: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    x: tl.tensor,
    x_scales: tl.tensor,
    used: tl.tensor,
    step: tl.tensor,
    K: tl.constexpr,
    FP8: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Add the products of BLOCK_K columns, `elements` `[vectors * rows, BLOCK_K]` as they are
    stored, to `acc` `[vectors, rows, spans, pieces]`. Scales and zero points are from
    `_load_scales`, the other arguments as in `multiply_rows`."""
    COUNT: tl.constexpr = acc.shape[0]
    ROWS: tl.constexpr = acc.shape[1]
    SPANS: tl.constexpr = acc.shape[2]
    cols = step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    inside = used[:, None] & (cols < K)
    part = tl.load(x[:, None] + cols, mask=inside, other=0.0).to(tl.float32)
    scales = tl.reshape(scales.to(tl.float32), [COUNT, ROWS, SPANS])
    PIECE: tl.constexpr = elements.shape[1] // SPANS // acc.shape[3]
    tile = tl.reshape(elements, [COUNT, ROWS, SPANS, acc.shape[3], PIECE])
    if FP8:
        acc = _add_fp8_(acc, tile, scales, part, x_scales, FP8 and GROUP == K)
    else:
        points = tl.full([1, 1, 1], 8.0, tl.float32)
        if ZEROS:
            points = tl.reshape(zeros.to(tl.float32), [COUNT, ROWS, SPANS])
        acc = _add_int4_(acc, tile, scales, points, part, PACKED)
    return acc


@triton.jit
def multiply_rows(
    x: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    rows: tl.tensor,
    used: tl.tensor,
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
    """Sums of the products of vectors and rows of a weight, fp32 `[vectors, rows]`.

    Reads BLOCK_K inputs of the weight and their scales before it waits for earlier kernels; see
    `early_start`.

    Args:
        x: `[vectors]`, pointers to vectors of K.
        rows: int64 `[vectors * rows]`: indices into the weight, all experts' rows in one.
        used: `[vectors]`; the others' sums are 0.
    """
    WHOLE: tl.constexpr = FP8 and GROUP == K
    SPANS: tl.constexpr = BLOCK_K // SPAN
    SHARE: tl.constexpr = 1 if FP8 else 2
    BYTES_AT_ONCE: tl.constexpr = _PIECE if FP8 else min(_BYTES, SPAN // 2)
    PIECES: tl.constexpr = SPAN // SHARE // BYTES_AT_ONCE
    GROUPS: tl.constexpr = K // GROUP
    BYTES: tl.constexpr = K // SHARE
    STEP: tl.constexpr = BLOCK_K // SHARE
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    COUNT: tl.constexpr = x.shape[0]
    ROWS: tl.constexpr = rows.shape[0] // COUNT
    # Loads have two dimensions, so that neighbours in a row belong to neighbouring threads.
    cols = tl.max_contiguous(tl.arange(0, STEP), BYTES_AT_ONCE)[None, :]
    weights = weight_ptr + (rows * BYTES)[:, None] + cols
    own = tl.reshape(tl.broadcast_to(used[:, None], [COUNT, ROWS]), [COUNT * ROWS])[:, None]
    scale_rows = scales_ptr + (rows // HEIGHT * GROUPS)[:, None]
    zero_rows = zeros_ptr + (rows * GROUPS)[:, None]
    elements = tl.load(weights, mask=own & (cols < BYTES), other=0.0)
    scales, zeros = _load_scales(scale_rows, zero_rows, own, 0, K, ZEROS, GROUP, SPAN, BLOCK_K)
    await_kernels_before(EARLY)
    x_scales = tl.full([COUNT], 1.0, tl.float32)
    if WHOLE:
        x_scales = scale_of(most_of_rows(x, used, K, BLOCK_K))
    acc = tl.zeros([COUNT, ROWS, SPANS, PIECES], tl.float32)
    acc = _add_step_(
        acc, elements, scales, zeros, x, x_scales, used, 0,
        K, FP8, ZEROS, GROUP, PACKED, BLOCK_K,
    )  # fmt: skip
    for step in range(1, STEPS):
        is_read = own & (cols < BYTES - step * STEP)
        elements = tl.load(weights + step * STEP, mask=is_read, other=0.0)
        scales, zeros = _load_scales(
            scale_rows, zero_rows, own, step, K, ZEROS, GROUP, SPAN, BLOCK_K
        )
        acc = _add_step_(
            acc, elements, scales, zeros, x, x_scales, used, step,
            K, FP8, ZEROS, GROUP, PACKED, BLOCK_K,
        )  # fmt: skip
    return tl.sum(tl.sum(acc, axis=3), axis=2) * x_scales[:, None]


@triton.jit
def multiply_row(
    x: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    rows: tl.tensor,
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
    """`multiply_rows` of one vector `x`: sums `[rows]`."""
    one = tl.arange(0, 1)
    totals = multiply_rows(
        x + one, weight_ptr, scales_ptr, zeros_ptr, rows, one == 0,
        K, FP8, ZEROS, HEIGHT, GROUP, SPAN, PACKED, BLOCK_K, EARLY,
    )  # fmt: skip
    return tl.reshape(totals, [rows.shape[0]])


@triton.jit
def _scaled_gemv_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    FP8: tl.constexpr,
    ZEROS: tl.constexpr,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(n / BLOCK_N,)`: one program computes BLOCK_N outputs."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(rows, N - 1).to(tl.int64)
    total = multiply_row(
        x_ptr, weight_ptr, scales_ptr, zeros_ptr, read,
        K, FP8, ZEROS, HEIGHT, GROUP, SPAN, PACKED, BLOCK_K, EARLY,
    )  # fmt: skip
    if BIAS:
        total += tl.load(bias_ptr + read).to(tl.float32)
    tl.store(out_ptr + rows, total.to(out_ptr.dtype.element_ty), mask=rows < N)


@triton.jit
def _scaled_gated_gemv_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    FP8: tl.constexpr,
    ZEROS: tl.constexpr,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute BLOCK_N features, each from its row of gate and, N rows below, its row of up."""
    nth = tl.arange(0, 2 * BLOCK_N)
    rows = tl.minimum(tl.program_id(0) * BLOCK_N + nth // 2, N - 1) + nth % 2 * N
    totals = multiply_row(
        x_ptr, weight_ptr, scales_ptr, zeros_ptr, rows.to(tl.int64),
        K, FP8, ZEROS, HEIGHT, GROUP, SPAN, PACKED, BLOCK_K, EARLY,
    )  # fmt: skip
    # Rounded at the same points as in `scaled_gemv` and `silu_and_mul`.
    dtype = out_ptr.dtype.element_ty
    first, up = tl.split(tl.reshape(totals.to(dtype).to(tl.float32), [BLOCK_N, 2]))
    gated = gate(first, up, dtype)
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + features, gated.to(dtype), mask=features < N)


def inputs_at_once(inputs: int, kind: WeightKind, most: int) -> int:
    """BLOCK_K of `multiply_rows`: up to `most`, and a divisor of `inputs` if that is not small."""
    block: int = min(most, triton.next_power_of_2(inputs))
    while inputs % block and block > max(256, kind["SPAN"]):
        block //= 2
    return max(kind["SPAN"], block)


class GemvPlan(TypedDict):
    """Sizes of a program."""

    BLOCK_N: int
    BLOCK_K: int
    num_warps: int


def plan(weight: ScaledWeight) -> GemvPlan:
    """Rows, columns and warps of a program for a weight `[outputs, inputs]`."""
    outputs, inputs = weight.shape
    is_narrow = not weight.is_fp8 and outputs <= 8192
    is_small = outputs <= 4096 and inputs <= 4096
    most = 4096 if is_narrow and not is_small else 2048
    block_k = inputs_at_once(inputs, kind_of(weight), most)
    warps = min(8 if is_narrow and outputs <= 4096 else 4, max(1, block_k // 256))
    return {"BLOCK_N": 8 if weight.is_fp8 else 16, "BLOCK_K": block_k, "num_warps": warps}


def scaled_gemv(
    x: torch.Tensor,
    weight: ScaledWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: GemvPlan | None = None,
) -> None:
    """`out[0] = weight @ x[0] + bias`, summed in fp32.

    Args:
        x: `[1, inputs]`, dense. Rounded as by `quantize_activations` if the weight is fp8.
        weight: `[outputs, inputs]`.
        out: `[1, outputs]`, any float dtype.
    """
    outputs, inputs = weight.shape
    assert x.stride(-1) == 1 and out.stride(-1) == 1
    config = config or plan(weight)
    _scaled_gemv_kernel[(triton.cdiv(outputs, config["BLOCK_N"]),)](
        x, weight.elements, weight.scales, zeros_of(weight),
        bias if bias is not None else weight.scales, out,
        N=outputs, K=inputs, BIAS=bias is not None, **kind_of(weight), **config, **early_start(x),
    )  # fmt: skip


def scaled_gated_gemv(
    x: torch.Tensor, weight: ScaledWeight, out: torch.Tensor, config: GemvPlan | None = None
) -> None:
    """`out[0] = silu(gate @ x[0]) * (up @ x[0])` in one launch, rounded at the same points as
    `scaled_gemv` and `silu_and_mul`.

    Args:
        x: `[1, inputs]`, dense.
        weight: `[2 * features, inputs]`: gate, then up.
        out: `[1, features]`, of the dtype of `x`.
    """
    outputs, inputs = weight.shape
    assert x.stride(-1) == 1 and out.stride(-1) == 1
    config = config or plan(weight)
    features, half = outputs // 2, config["BLOCK_N"] // 2
    _scaled_gated_gemv_kernel[(triton.cdiv(features, half),)](
        x, weight.elements, weight.scales, zeros_of(weight), out,
        N=features, K=inputs, **kind_of(weight), **{**config, "BLOCK_N": half}, **early_start(x),
    )  # fmt: skip


def zeros_of(weight: ScaledWeight) -> torch.Tensor:
    """The zero points, or a tensor in their place that no kernel reads."""
    return weight.elements if weight.zeros is None else weight.zeros
