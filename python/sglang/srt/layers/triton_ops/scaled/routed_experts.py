"""Experts with scales for many tokens: `routed_experts` for weights of fewer bits.

fp8 activations are rounded before each product, in launches of their own; see `rounding`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.layers.triton_ops.arguments import (
    ExpertActivation,
    ExpertBiases,
    ScaledWeight,
)
from sglang.srt.layers.triton_ops.expert_order import ExpertTiles, order_by_expert
from sglang.srt.layers.triton_ops.gating import clamped_gate, rule_of, silu_and_mul
from sglang.srt.layers.triton_ops.rounding import gate, quantize_activations, quantize_gated
from sglang.srt.layers.triton_ops.routed_experts import (
    load_rows,
    load_weights,
    sum_of_uses,
    tile_of_program,
    uses_of_tile,
)
from sglang.srt.layers.triton_ops.scaled.deep_gemm import grouped_product, run_in_tiles
from sglang.srt.layers.triton_ops.scaled.fp4 import load_fp4, load_fp4_scales, unbiased
from sglang.srt.layers.triton_ops.scaled.groups import (
    ROWS_OF_LEFT,
    add_products_,
    by_output,
    by_token,
    load_scales,
    shared_memory_of,
)
from sglang.srt.layers.triton_ops.scaled.int4 import awaited, first_halves, load_int4
from sglang.srt.layers.triton_ops.scaled.tiles import zeros_of


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes for batches of so many uses of an expert."""

    most_uses: float
    """Most uses of an expert on average."""
    tile_rows: int
    outputs: int
    """Outputs that a program computes."""
    block: int
    """Inputs that it multiplies at a time."""
    group: int
    """Tiles whose programs follow each other with the same outputs, so that they share weights in
    the L2 cache."""
    warps: int
    stages: int
    """Steps read ahead."""
    depth: int = 1
    """Parts of `block` inputs of a step, for fp8 weights."""
    has_halves: bool = False
    """True if tiles of an expert's last uses may be half as large, for 4-bit weights."""
    has_gates: bool = False
    """True if the first product computes the gates too, for 4-bit weights. This costs few uses more
    than a kernel of its own."""


# Field by field: most uses, rows of a tile, then outputs, block, group, warps, stages and depth.
_FP8_PLANS: Final = (
    Plan(12.0, 16, 128, 128, 1, 4, 4),
    Plan(24.0, 32, 128, 128, 1, 4, 4),
    Plan(96.0, 64, 128, 128, 4, 4, 4),
    Plan(200.0, 64, 128, 128, 8, 4, 3),
    Plan(float("inf"), 128, 128, 128, 8, 8, 3, 2),
)
_INT4_PLANS: Final = (
    Plan(6.0, 16, 64, 256, 1, 4, 3),
    Plan(12.0, 16, 128, 128, 1, 4, 4),
    Plan(24.0, 32, 64, 128, 1, 4, 4),
    Plan(float("inf"), 64, 128, 128, 4, 4, 3),
)
_FP4_PLANS: Final = (
    Plan(6.0, 16, 64, 128, 1, 4, 3),
    *_INT4_PLANS[1:3],
    Plan(128.0, 64, 128, 64, 4, 4, 4, has_halves=True),
    Plan(float("inf"), 128, 128, 64, 8, 4, 3, has_halves=True, has_gates=True),
)


def plan_of(uses: float, weight: ScaledWeight) -> Plan:
    """The plan for `uses` of an expert on average, or the last one that the device has shared
    memory for."""
    if not weight.is_fp8:
        plans = _FP4_PLANS if weight.is_fp4 else _INT4_PLANS
        return next(plan for plan in plans if uses <= plan.most_uses)
    room = device_runtime(weight.elements.device).shared_memory
    fitting = [
        plan
        for plan in _FP8_PLANS
        if shared_memory_of(plan.tile_rows + plan.outputs, plan.stages * plan.depth * plan.block)
        <= room
    ]
    return next((plan for plan in fitting if uses <= plan.most_uses), fitting[-1])


@triton.jit
def _multiply_tile(
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    out_ptr: tl.tensor,
    order_ptr: tl.tensor,
    num_rows: tl.tensor,
    stride: tl.tensor,
    bias_ptr: tl.tensor,
    block: tl.tensor,
    expert: tl.tensor,
    begin: tl.tensor,
    count: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    FP8: tl.constexpr,
    ZEROS: tl.constexpr,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    USES: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    FACTORS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,
    TMA: tl.constexpr,
    CUDA: tl.constexpr,
) -> None:
    """Compute BLOCK_N outputs of an expert for the rows of one tile, at most TILE_ROWS. GATED: half
    as many activated features."""
    used, uses = uses_of_tile(order_ptr, begin, count, TILE_ROWS)
    rows = uses // USES
    FP4: tl.constexpr = scales_ptr.dtype.element_ty == tl.uint8
    cols = tl.arange(0, BLOCK_K) if FP8 or FP4 else first_halves(BLOCK, BLOCK_K)
    x_at = x_ptr + (rows * K)[None, :] + cols[:, None]
    first = expert * N + block * BLOCK_N
    end = (expert + 1) * N
    if GATED:
        # Eight rows of gates, then those of up. A thread has both sums of a feature.
        nth = tl.arange(0, BLOCK_N)
        feature = block * (BLOCK_N // 2) + nth // 16 * 8 + nth % 8
        own = tl.minimum(feature, N // 2 - 1) + nth % 16 // 8 * (N // 2)
        own = (expert * N + own).to(tl.int64)
    else:
        own = tl.minimum(first + tl.arange(0, BLOCK_N), end - 1).to(tl.int64)
    GROUPS: tl.constexpr = K // GROUP
    LEFT: tl.constexpr = FP8 and TILE_ROWS >= ROWS_OF_LEFT
    ONE: tl.constexpr = HEIGHT % BLOCK_N == 0
    of_outputs = first.to(tl.int64) // HEIGHT if ONE else own // HEIGHT
    acc = tl.zeros([TILE_ROWS, BLOCK_N] if LEFT else [BLOCK_N, TILE_ROWS], tl.float32)
    if FP8:
        scales = load_scales(
            x_scales_ptr, scales_ptr, 0, num_rows, rows, used, of_outputs, GROUPS, DEPTH
        )
    if FP4:
        scales = load_fp4_scales(scales_ptr, own, 0, K, BLOCK_K)
    for start in range(0, K, DEPTH * BLOCK_K):
        # Weights first: their place is known before that of the rows.
        if FP8:
            parts: tl.tuple = ()
            for n in tl.static_range(DEPTH):
                k = start + n * BLOCK_K
                w = load_weights(weight_ptr, first, end, k, BLOCK_N, K, BLOCK_K, TMA)
                x = load_rows(x_at, used, cols, k, K, DEPTH * BLOCK_K)
                parts += ((w, x.T),)
            next_scales = load_scales(
                x_scales_ptr, scales_ptr, start // GROUP + DEPTH, num_rows, rows, used,
                of_outputs, GROUPS, DEPTH,
            )  # fmt: skip
            acc = add_products_(acc, parts, scales, GROUPS, ONE, LEFT, DEPTH)
            scales = next_scales
        elif FP4:
            next_scales = load_fp4_scales(scales_ptr, own, start + BLOCK_K, K, BLOCK_K)
            w = load_fp4(weight_ptr, scales, own, start, K, BLOCK_K, x_ptr.dtype.element_ty, CUDA)
            x = load_rows(x_at, used, cols, start, K, BLOCK_K)
            acc = awaited(tl.dot(w, x, acc), CUDA)
            scales = next_scales
        else:
            w, high = load_int4(
                weight_ptr, scales_ptr, zeros_ptr, own, start, K, ZEROS, GROUP, BLOCK, BLOCK_K,
                x_ptr.dtype.element_ty, CUDA,
            )  # fmt: skip
            acc = tl.dot(w, load_rows(x_at, used, cols, start, K, BLOCK_K), acc)
            x = load_rows(x_at + BLOCK // 2, used, cols, start, K, BLOCK_K)
            acc = awaited(tl.dot(high, x, acc), CUDA)
    if FP8 and GROUPS == 1:
        x_scales = tl.load(x_scales_ptr + rows, mask=used, other=0.0)
        acc *= by_output(tl.load(scales_ptr + own // HEIGHT), LEFT) * by_token(x_scales, LEFT)
    if FP4:
        acc = unbiased(acc, x_ptr.dtype.element_ty)
    if BIAS:
        acc += by_output(tl.load(bias_ptr + own).to(tl.float32), LEFT)
    if FACTORS:
        at = factors_ptr + uses // TOP_K * stride + uses % TOP_K
        acc *= by_token(tl.load(at, mask=used, other=0.0), LEFT)
    dtype = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = N // 2 if GATED else N
    OWN: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    if GATED:
        # Rounded at the same points as by `silu_and_mul`.
        both = tl.reshape(acc.to(dtype).to(tl.float32), [BLOCK_N // 16, 2, 8, TILE_ROWS])
        gates, ups = tl.split(tl.permute(both, [0, 2, 3, 1]))
        acc = (
            clamped_gate(gates, ups, LIMIT, ALPHA, SHIFT) if LIMIT > 0 else gate(gates, ups, dtype)
        )
        acc = tl.reshape(acc, [OWN, TILE_ROWS])
    outputs = block * OWN + tl.arange(0, OWN)
    to = out_ptr + by_token(uses * WIDTH, LEFT) + by_output(outputs, LEFT)
    stored = by_token(used, LEFT) & by_output(outputs < WIDTH, LEFT)
    tl.store(to, acc.to(dtype), mask=stored)


@triton.jit(do_not_specialize=["bound", "num_rows", "stride"])
def _product_kernel(
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    out_ptr: tl.tensor,
    order_ptr: tl.tensor,
    table_ptr: tl.tensor,
    count_ptr: tl.tensor,
    bound: tl.tensor,
    num_rows: tl.tensor,
    stride: tl.tensor,
    bias_ptr: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    FP8: tl.constexpr,
    ZEROS: tl.constexpr,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    USES: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    FACTORS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,
    TILES: tl.constexpr,
    HALVES: tl.constexpr,
    TMA: tl.constexpr,
    CUDA: tl.constexpr,
) -> None:
    """Compute BLOCK_N outputs of an expert for the rows of one tile, or with GATED the gate (with
    LIMIT a clamped one) of as many.

    A row of `x` (there are `num_rows`) has USES uses: TOP_K if it is a token, or 1. HALVES: a tile
    with half of the rows, or fewer, is multiplied as a smaller one.
    """
    tile, block, expert, begin, count = tile_of_program(
        table_ptr, bound, tl.cdiv(N, BLOCK_N), TILES
    )
    if tile >= tl.load(count_ptr):
        return
    if HALVES:  # noqa: SIM102 - known when this is compiled
        if count <= TILE_ROWS // 2:
            _multiply_tile(
                x_ptr, x_scales_ptr, weight_ptr, scales_ptr, zeros_ptr, factors_ptr, out_ptr,
                order_ptr, num_rows, stride, bias_ptr, block, expert, begin, count, N, K, FP8,
                ZEROS, HEIGHT, GROUP, BLOCK, TOP_K, USES, BIAS, GATED, LIMIT, ALPHA, SHIFT, FACTORS,
                TILE_ROWS // 2, BLOCK_N, BLOCK_K, DEPTH, TMA, CUDA,
            )  # fmt: skip
            return
    _multiply_tile(
        x_ptr, x_scales_ptr, weight_ptr, scales_ptr, zeros_ptr, factors_ptr, out_ptr, order_ptr,
        num_rows, stride, bias_ptr, block, expert, begin, count, N, K, FP8, ZEROS, HEIGHT, GROUP,
        BLOCK, TOP_K, USES, BIAS, GATED, LIMIT, ALPHA, SHIFT, FACTORS, TILE_ROWS, BLOCK_N, BLOCK_K,
        DEPTH, TMA, CUDA,
    )  # fmt: skip


def _multiply(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight: ScaledWeight,
    bias: torch.Tensor | None,
    factors: torch.Tensor | None,
    tiles: ExpertTiles,
    plan: Plan,
    dtype: torch.dtype,
    activation: ExpertActivation | None = None,
) -> torch.Tensor:
    """A product of all uses, `[num_uses, outputs]` of `dtype`.

    Args:
        x: Contiguous rows of inputs: one for each token, or with `factors` one for each use.
        x_scales: From `quantize_activations`, for fp8.
        weight: `[num_experts, outputs, inputs]`.
        bias: `[num_experts, outputs]`, added before the factors multiply; None: there is none.
        factors: fp32 `[num_tokens, top_k]`, which multiply the results; None: nothing does.
        activation: Of outputs that are gates, then as many ups: the result has half as many. For
            4-bit weights. None: there is none.
    """
    assert x.is_contiguous() and (bias is None or bias.is_contiguous())
    outputs, inputs = weight.shape[1:]
    gated = activation is not None
    width = outputs // 2 if gated else outputs
    out = torch.empty((len(tiles.order), width), dtype=dtype, device=x.device)
    tma = weight.is_fp8 and inputs % 16 == 0
    elements: Any = weight.elements
    if tma:
        elements = TensorDescriptor.from_tensor(elements.flatten(0, 1), [plan.outputs, plan.block])
    _product_kernel[(tiles.bound * triton.cdiv(outputs, plan.outputs),)](
        x, weight.scales if x_scales is None else x_scales, elements, weight.scales,
        zeros_of(weight), weight.scales if factors is None else factors, out, tiles.order,
        tiles.table, tiles.count, tiles.bound, len(x), 0 if factors is None else factors.stride(0),
        out if bias is None else bias,
        N=outputs, K=inputs, FP8=weight.is_fp8, ZEROS=weight.zeros is not None,
        HEIGHT=weight.height, GROUP=weight.group, BLOCK=weight.block, TOP_K=tiles.top_k,
        USES=tiles.top_k if factors is None else 1, BIAS=bias is not None, GATED=gated,
        **rule_of(activation or "silu"), FACTORS=factors is not None, TILE_ROWS=plan.tile_rows,
        BLOCK_N=plan.outputs, BLOCK_K=plan.block, DEPTH=plan.depth, TILES=plan.group,
        HALVES=plan.has_halves, TMA=tma, CUDA=out.is_cuda, num_warps=plan.warps,
        num_stages=plan.stages,
    )  # fmt: skip
    return out


def run_scaled_routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: ScaledWeight,
    down: ScaledWeight,
    plan: Plan | None = None,
    *,
    activation: ExpertActivation = "silu",
    biases: ExpertBiases | None = None,
    num_experts: int | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, summed in fp32; bits are the same in each run.

    Args:
        x: Contiguous `[num_tokens, hidden_size]`.
        weights: fp32 `[num_tokens, top_k]`, of any stride between tokens.
        ids: Contiguous `[num_tokens, top_k]`, any integer dtype.
        gate_up: See `ExpertWeights`; `down` likewise.
        plan: Sizes; None: those for the average uses of an expert.
        activation: With a gate.
        num_experts: See `routed_experts.run_routed_experts`.

    Returns:
        `[num_tokens, hidden_size]` of the dtype of `x`.
    """
    assert weights.stride(1) == 1
    own, total = gate_up.shape[0], num_experts or gate_up.shape[0]
    uses = ids.numel() / total
    library = None
    if plan is None and biases is None and activation == "silu":
        library = grouped_product(uses, x, gate_up, down)
    if library is not None:
        return run_in_tiles(library, x, weights, ids, gate_up, down, has_others=own < total)
    plan = plan or plan_of(uses, gate_up)
    tiles = order_by_expert(ids, own, plan.tile_rows, has_others=own < total)
    first, last = (None, None) if biases is None else biases
    given, scales = quantize_activations(x, gate_up.group) if gate_up.is_fp8 else (x, None)
    gates = activation if plan.has_gates else None
    inner = _multiply(given, scales, gate_up, first, None, tiles, plan, x.dtype, gates)
    if down.is_fp8 and activation == "silu":
        inner, scales = quantize_gated(inner, down.group)
    elif not plan.has_gates:
        inner = silu_and_mul(inner, activation)
        if down.is_fp8:
            inner, scales = quantize_activations(inner, down.group)
    parts = _multiply(inner, scales, down, last, weights, tiles, plan, x.dtype)
    return sum_of_uses(parts, ids, own, has_others=own < total)
