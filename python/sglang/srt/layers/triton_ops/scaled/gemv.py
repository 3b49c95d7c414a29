"""One row times a weight with scales."""

from __future__ import annotations

import math
from typing import Final, TypedDict

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import ExpertActivation, ScaledWeight
from sglang.srt.layers.triton_ops.early_start import early_start
from sglang.srt.layers.triton_ops.gating import clamped_gate, rule_of
from sglang.srt.layers.triton_ops.rounding import gate
from sglang.srt.layers.triton_ops.scaled.tiles import (
    MULTIPROCESSORS,
    WeightKind,
    inputs_at_once,
    is_aligned,
    kind_of,
    multiply_row,
    rows_left,
    zeros_of,
)


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
    first = tl.program_id(0) * BLOCK_N
    rows = first + tl.arange(0, BLOCK_N)
    total = multiply_row(
        x_ptr, weight_ptr, scales_ptr, zeros_ptr, first.to(tl.int64), rows_left(N, first, BLOCK_N),
        BLOCK_N, 0, K, FP8, ZEROS, HEIGHT, GROUP, SPAN, PACKED, BLOCK_K, EARLY,
    )  # fmt: skip
    if BIAS:
        total += tl.load(bias_ptr + tl.minimum(rows, N - 1)).to(tl.float32)
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
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute BLOCK_N features, each from its row of gate and, N rows below, its row of up."""
    begin = tl.program_id(0) * BLOCK_N
    totals = multiply_row(
        x_ptr, weight_ptr, scales_ptr, zeros_ptr, begin.to(tl.int64), rows_left(N, begin, BLOCK_N),
        BLOCK_N, N, K, FP8, ZEROS, HEIGHT, GROUP, SPAN, PACKED, BLOCK_K, EARLY,
    )  # fmt: skip
    # Rounded at the same points as in `scaled_gemv` and `silu_and_mul`.
    dtype = out_ptr.dtype.element_ty
    first, up = tl.split(tl.reshape(totals.to(dtype).to(tl.float32), [BLOCK_N, 2]))
    if LIMIT > 0:
        gated = clamped_gate(first, up, LIMIT, ALPHA, SHIFT)
    else:
        gated = gate(first, up, dtype)
    features = begin + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + features, gated.to(dtype), mask=features < N)


_WHOLE_ROWS: Final = {2048: 4096, 4096: 1536}
"""Most outputs of fp8 weights whose programs read whole rows at once, by inputs."""


class GemvPlan(TypedDict):
    """Sizes of a program."""

    BLOCK_N: int
    BLOCK_K: int
    num_warps: int


def plan(weight: ScaledWeight) -> GemvPlan:
    """Rows, columns and warps of a program for a weight `[outputs, inputs]`."""
    outputs, inputs = weight.shape
    if weight.is_fp8:
        return _plan_fp8(outputs, inputs, kind_of(weight))
    is_narrow = outputs <= 8192
    is_small = outputs <= 4096 and inputs <= 4096
    most = 4096 if is_narrow and not is_small else 2048
    block_k = inputs_at_once(inputs, kind_of(weight), most)
    warps = min(8 if is_narrow and outputs <= 4096 else 4, max(1, block_k // 256))
    return {"BLOCK_N": 16, "BLOCK_K": block_k, "num_warps": warps}


def _plan_fp8(outputs: int, inputs: int, kind: WeightKind) -> GemvPlan:
    """`plan` for fp8 weights, by measurements of 12 shapes on an H200
    (benchmark/results/2026-11-28-gpu-experts.md), and of small ones
    (benchmark/results/2026-11-30-gpu-deepseek-v4.md)."""
    if outputs <= _WHOLE_ROWS.get(inputs, 0):
        return {"BLOCK_N": 4, "BLOCK_K": inputs, "num_warps": inputs // 512}
    block_k = inputs_at_once(inputs, kind, 2048 if inputs > 2048 else 1024)
    is_broad = outputs > 16384
    warps = max(1, block_k // 256)
    rows = 8
    if block_k >= 1024 and not is_broad:
        # The most rows with which all multiprocessors have equal work, some programs each.
        for more in (16, 8, 4):
            programs = triton.cdiv(outputs, more) / MULTIPROCESSORS
            if programs > 2 and programs > 0.95 * math.ceil(programs):
                rows = more
                break
    return {"BLOCK_N": rows, "BLOCK_K": block_k, "num_warps": min(warps, 4 if is_broad else 8)}


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
    assert not weight.is_fp4 or is_aligned(x, weight.elements)
    config = config or plan(weight)
    _scaled_gemv_kernel[(triton.cdiv(outputs, config["BLOCK_N"]),)](
        x, weight.elements, weight.scales, zeros_of(weight),
        bias if bias is not None else weight.scales, out,
        N=outputs, K=inputs, BIAS=bias is not None, **kind_of(weight), **config, **early_start(x),
    )  # fmt: skip


def scaled_gated_gemv(
    x: torch.Tensor,
    weight: ScaledWeight,
    out: torch.Tensor,
    config: GemvPlan | None = None,
    *,
    activation: ExpertActivation = "silu",
) -> None:
    """`out[0] = silu(gate @ x[0]) * (up @ x[0])` in one launch, or that of a clamped gate, rounded
    at the same points as `scaled_gemv` and `silu_and_mul`.

    Args:
        x: `[1, inputs]`, dense.
        weight: `[2 * features, inputs]`: gate, then up.
        out: `[1, features]`, of the dtype of `x`.
    """
    outputs, inputs = weight.shape
    assert x.stride(-1) == 1 and out.stride(-1) == 1
    assert not weight.is_fp4 or is_aligned(x, weight.elements)
    config = config or plan(weight)
    features, half = outputs // 2, config["BLOCK_N"] // 2
    _scaled_gated_gemv_kernel[(triton.cdiv(features, half),)](
        x, weight.elements, weight.scales, zeros_of(weight), out,
        N=features, K=inputs, **kind_of(weight), **{**config, "BLOCK_N": half},
        **rule_of(activation), **early_start(x),
    )  # fmt: skip
