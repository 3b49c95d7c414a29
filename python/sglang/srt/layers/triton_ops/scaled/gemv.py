"""One row times a weight with scales."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple, TypedDict

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import ExpertActivation, ScaledWeight
from sglang.srt.layers.triton_ops.early_start import early_start
from sglang.srt.layers.triton_ops.gating import clamped_gate, rule_of
from sglang.srt.layers.triton_ops.gemv import multiply_rows
from sglang.srt.layers.triton_ops.gemv import plan as plan_plain
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
    plain_ptr: tl.tensor,
    plain_out_ptr: tl.tensor,
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
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    BESIDE: tl.constexpr,
    PLAIN_N: tl.constexpr,
    PLAIN_K: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(BESIDE + n / BLOCK_N,)`: one program computes BLOCK_N outputs, or features if GATED,
    each from its row of gate and, N rows below, its row of up. The first BESIDE programs multiply
    the same vector with a plain weight; each computes PLAIN_N outputs."""
    nth = tl.program_id(0)
    if BESIDE > 0:
        if nth < BESIDE:
            first = nth * PLAIN_N
            multiply_rows(
                x_ptr, plain_ptr, plain_ptr, plain_out_ptr, first, K, PLAIN_N, PLAIN_K, False, EARLY
            )
            return
        nth -= BESIDE
    store_scaled_rows(
        x_ptr, weight_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, nth * BLOCK_N, N, K, FP8,
        ZEROS, HEIGHT, GROUP, SPAN, PACKED, BLOCK_N, BLOCK_K, BIAS, GATED, LIMIT, ALPHA, SHIFT,
        EARLY,
    )  # fmt: skip


@triton.jit
def store_scaled_rows(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first: tl.tensor,
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
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Store BLOCK_N outputs, or features, from `first` on; see `_scaled_gemv_kernel`."""
    HALF: tl.constexpr = N if GATED else 0
    rows = first + tl.arange(0, BLOCK_N)
    totals = multiply_row(
        x_ptr, weight_ptr, scales_ptr, zeros_ptr, first.to(tl.int64), rows_left(N, first, BLOCK_N),
        BLOCK_N, HALF, K, FP8, ZEROS, HEIGHT, GROUP, SPAN, PACKED, BLOCK_K, EARLY,
    )  # fmt: skip
    dtype = out_ptr.dtype.element_ty
    if GATED:
        # Rounded at the same points as in `scaled_gemv` and `silu_and_mul`.
        first_half, up = tl.split(tl.reshape(totals.to(dtype).to(tl.float32), [BLOCK_N, 2]))
        if LIMIT > 0:
            totals = clamped_gate(first_half, up, LIMIT, ALPHA, SHIFT)
        else:
            totals = gate(first_half, up, dtype)
    if BIAS:
        totals += tl.load(bias_ptr + tl.minimum(rows, N - 1)).to(tl.float32)
    tl.store(out_ptr + rows, totals.to(dtype), mask=rows < N)


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


class PlainProduct(NamedTuple):
    """A product of one row with a weight without scales."""

    weight: torch.Tensor
    """Contiguous `[n, inputs]`, any float dtype, with a plan of `gemv.plan`."""
    out: torch.Tensor
    """`[1, n]`, any float dtype."""


def constants_of(
    weight: ScaledWeight, config: GemvPlan | None, activation: ExpertActivation | None
) -> dict[str, Any]:
    """Constants of `store_scaled_rows`, and warps.

    Args:
        config: None: that of `plan`.
        activation: None: the rows are no gates.
    """
    outputs, inputs = weight.shape
    constants: dict[str, Any] = {**(config or plan(weight)), **kind_of(weight)}
    is_gated = activation is not None
    if is_gated:
        constants["BLOCK_N"] //= 2
    return {
        "N": outputs // 2 if is_gated else outputs,
        "K": inputs,
        "GATED": is_gated,
        **rule_of(activation or "silu"),
        **constants,
    }


def scaled_gemv(
    x: torch.Tensor,
    weight: ScaledWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: GemvPlan | None = None,
    *,
    beside: PlainProduct | None = None,
) -> None:
    """`out[0] = weight @ x[0] + bias`, summed in fp32.

    Args:
        x: `[1, inputs]`, dense. Rounded as by `quantize_activations` if the weight is fp8.
        weight: `[outputs, inputs]`.
        out: `[1, outputs]`, any float dtype.
        beside: Another product of `x`, which is not rounded for it, in the same launch.
    """
    _launch(x, weight, bias, out, config, beside, None)


def scaled_gated_gemv(
    x: torch.Tensor,
    weight: ScaledWeight,
    out: torch.Tensor,
    config: GemvPlan | None = None,
    *,
    activation: ExpertActivation = "silu",
    beside: PlainProduct | None = None,
) -> None:
    """`out[0] = silu(gate @ x[0]) * (up @ x[0])` in one launch, or that of a clamped gate, rounded
    at the same points as `scaled_gemv` and `silu_and_mul`.

    Args:
        x: `[1, inputs]`, dense.
        weight: `[2 * features, inputs]`: gate, then up.
        out: `[1, features]`, of the dtype of `x`.
        beside: See `scaled_gemv`.
    """
    _launch(x, weight, None, out, config, beside, activation)


def _launch(
    x: torch.Tensor,
    weight: ScaledWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: GemvPlan | None,
    beside: PlainProduct | None,
    activation: ExpertActivation | None,
) -> None:
    """Args: see `scaled_gemv` and `constants_of`."""
    assert x.stride(-1) == 1 and out.stride(-1) == 1
    assert not weight.is_fp4 or is_aligned(x, weight.elements)
    plain, programs = (weight.elements, out), 0
    sizes = {"PLAIN_N": 1, "PLAIN_K": 1}
    if beside is not None:
        rows = len(beside.weight)
        own = plan_plain(rows, x.shape[1])
        assert own is not None and beside.weight.is_contiguous() and beside.out.stride(-1) == 1
        plain, programs = (beside.weight, beside.out), rows // own[0]
        sizes = {"PLAIN_N": own[0], "PLAIN_K": own[1]}
    constants = constants_of(weight, config, activation)
    own_programs = triton.cdiv(constants["N"], constants["BLOCK_N"])
    _scaled_gemv_kernel[(programs + own_programs,)](
        x, weight.elements, weight.scales, zeros_of(weight),
        weight.scales if bias is None else bias, out, *plain, BIAS=bias is not None,
        BESIDE=programs, **sizes, **constants, **early_start(x),
    )  # fmt: skip
