"""Several rows times a weight with scales, on tensor cores.

See `groups` for fp8. 4-bit weights are dequantized to the dtype of `x` first, in the registers that
tensor cores read. They are the left operand, because they have enough rows for tensor cores even
where there are few tokens.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.functional import ScalingType
from triton.tools.tensor_descriptor import TensorDescriptor

from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.layers.triton_ops.arguments import RoundedRows, ScaledWeight
from sglang.srt.layers.triton_ops.early_start import (
    SEVERAL_ROWS,
    await_kernels_before,
    early_start,
)
from sglang.srt.layers.triton_ops.scaled.deep_gemm import dense_product
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
from sglang.srt.layers.triton_ops.scaled.tiles import MULTIPROCESSORS, zeros_of

_PART: Final = 128
"""Inputs that are multiplied at a time: a group, or a part of one."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How programs divide a product."""

    outputs: int
    tokens: int
    group: int
    """Tiles of tokens whose programs follow each other with the same weights."""
    warps: int
    stages: int
    """Steps read ahead."""
    depth: int = 1
    """Parts of 128 inputs of a step, for fp8 weights. The threads of a program wait for each other
    once a step."""


@triton.jit(do_not_specialize=["tokens"])
def _product_kernel(
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    tokens: tl.tensor,
    stride: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    FP8: tl.constexpr,
    ZEROS: tl.constexpr,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,
    TILES: tl.constexpr,
    TMA: tl.constexpr,
    CUDA: tl.constexpr,
    BIAS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute a tile of outputs and tokens over a share of the inputs.

    Grid `(tiles of outputs * tiles of tokens, SPLITS)`. If SPLITS is above 1, the program of a tile
    that ends last adds the parts, fp32 `[SPLITS, tokens, N]`, in their order. For fp8 weights `x`
    is rounded.
    """
    await_kernels_before(EARLY)
    blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    group = tl.program_id(0) // (TILES * blocks)
    within = tl.program_id(0) % (TILES * blocks)
    size = tl.minimum(tl.cdiv(tokens, BLOCK_T) - group * TILES, TILES)
    token = (group * TILES + within % size) * BLOCK_T
    output = within // size * BLOCK_N
    rows, own = token + tl.arange(0, BLOCK_T), output + tl.arange(0, BLOCK_N)
    FP4: tl.constexpr = scales_ptr.dtype.element_ty == tl.uint8
    cols = tl.arange(0, BLOCK_K) if FP8 or FP4 else first_halves(BLOCK, BLOCK_K)
    read = tl.minimum(own, N - 1)
    used = rows < tokens
    x_at = x_ptr
    if not TMA:
        x_at = x_ptr + (rows.to(tl.int64) * stride)[:, None] + cols[None, :]
    weights = weight_ptr
    if FP8 and not TMA:
        weights = weight_ptr + read.to(tl.int64)[:, None] * K + cols[None, :]
    GROUPS: tl.constexpr = K // GROUP
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SHARE: tl.constexpr = ((STEPS + SPLITS - 1) // SPLITS + DEPTH - 1) // DEPTH * DEPTH
    first = tl.program_id(1) * SHARE
    LEFT: tl.constexpr = FP8 and BLOCK_T >= ROWS_OF_LEFT
    ONE: tl.constexpr = HEIGHT % BLOCK_N == 0
    block = output // HEIGHT if ONE else read // HEIGHT
    acc = tl.zeros([BLOCK_T, BLOCK_N] if LEFT else [BLOCK_N, BLOCK_T], tl.float32)
    if FP8:
        scales = load_scales(
            x_scales_ptr, scales_ptr, first, tokens, rows, used, block, GROUPS, DEPTH
        )
    for step in range(first, tl.minimum(first + SHARE, STEPS), DEPTH):
        if FP8:
            # All loads come first, so that threads wait for them once.
            parts: tl.tuple = ()
            for n in tl.static_range(DEPTH):
                k = (step + n) * BLOCK_K
                if TMA:
                    parts += ((weights.load([output, k]), x_at.load([token, k])),)
                else:
                    inside = (cols < K - k)[None, :]
                    w = tl.load(weights + k, mask=inside, other=0.0)
                    parts += ((w, tl.load(x_at + k, mask=used[:, None] & inside, other=0.0)),)
            next_scales = load_scales(
                x_scales_ptr, scales_ptr, step + DEPTH, tokens, rows, used, block, GROUPS, DEPTH
            )
            acc = add_products_(acc, parts, scales, GROUPS, ONE, LEFT, DEPTH)
            scales = next_scales
        else:
            k = step * BLOCK_K
            is_read = used[:, None]
            if K % BLOCK_K != 0:
                is_read = is_read & (cols < K - k)[None, :]
            if FP4:
                scales = load_fp4_scales(scales_ptr, read.to(tl.int64), k, K, BLOCK_K)
                w = load_fp4(
                    weight_ptr, scales, read.to(tl.int64), k, K, BLOCK_K, x_ptr.dtype.element_ty,
                    CUDA,
                )  # fmt: skip
                x = tl.load(x_at + k, mask=is_read, other=0.0)
                acc = awaited(tl.dot(w, x.T, acc), CUDA)
            else:
                w, high = load_int4(
                    weight_ptr, scales_ptr, zeros_ptr, read.to(tl.int64), k, K, ZEROS, GROUP,
                    BLOCK, BLOCK_K, x_ptr.dtype.element_ty, CUDA,
                )  # fmt: skip
                x = tl.load(x_at + k, mask=is_read, other=0.0)
                acc = tl.dot(w, x.T, acc)
                x = tl.load(x_at + (k + BLOCK // 2), mask=is_read, other=0.0)
                acc = awaited(tl.dot(high, x.T, acc), CUDA)
    if FP4:
        acc = unbiased(acc, x_ptr.dtype.element_ty)
    if FP8 and GROUPS == 1:
        x_scales = tl.load(x_scales_ptr + rows, mask=used, other=0.0)
        acc *= by_output(tl.load(scales_ptr + read // HEIGHT), LEFT) * by_token(x_scales, LEFT)
    at = by_token(rows.to(tl.int64) * N, LEFT) + by_output(own, LEFT)
    stored = by_token(used, LEFT) & by_output(own < N, LEFT)
    if SPLITS > 1:
        step_of_parts = tokens.to(tl.int64) * N
        tl.store(parts_ptr + tl.program_id(1) * step_of_parts + at, acc, mask=stored)
        # Every thread of this program stores before the program is counted.
        tl.debug_barrier()
        arrivals = arrivals_ptr + tl.program_id(0)
        if tl.atomic_add(arrivals, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(arrivals, 0)
        acc = tl.zeros(acc.shape, tl.float32)
        for split in tl.static_range(SPLITS):
            # Past the L1 cache, because it is not coherent.
            part = parts_ptr + split * step_of_parts + at
            acc += tl.load(part, mask=stored, other=0.0, cache_modifier=".cg")
    if BIAS:
        acc += by_output(tl.load(bias_ptr + read).to(tl.float32), LEFT)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=stored)


@functools.cache
def _arrivals(device: torch.device, stream: int) -> torch.Tensor:
    """Counters of a tile's finished parts, int32 zeros between products. Each calling stream has
    its own. A graph is captured on a stream that has run the same products before."""
    return torch.zeros(MULTIPROCESSORS, dtype=torch.int32, device=device)


def plan(tokens: int, weight: ScaledWeight) -> tuple[Tiles, int]:
    """Tiles of a product, and the number of programs that share a tile's inputs. Measured on H100s
    and H200s with the shapes of Qwen3-8B, for fp8 also with others."""
    outputs, inputs = weight.shape
    rows = max(16, min(64, triton.next_power_of_2(tokens)))
    if weight.is_fp8:
        tiles, wanted = Tiles(64, rows, 8, 4, 4), 96 if inputs <= 8192 else 128
    elif tokens > 128:
        tiles, wanted = Tiles(64, 128, 8, 4, 3), 192
    else:
        wanted = 384 if tokens <= 32 else 256
        is_wide = outputs > 8192
        # Wide weights read further ahead for up to 64 tokens, the others for more.
        stages = 4 if is_wide == (tokens <= 64) else 3
        tiles = Tiles(128 if is_wide and rows == 64 else 64, rows, 8, 4, stages)
    programs = triton.cdiv(outputs, tiles.outputs) * triton.cdiv(tokens, tiles.tokens)
    splits = 1
    if programs < MULTIPROCESSORS:
        while programs * splits < wanted and inputs >= splits * 1024:
            splits *= 2
    if weight.is_fp8:
        shared = device_runtime(weight.elements.device).shared_memory
        depth, stages = depth_of(programs * splits, tiles, shared)
        tiles = replace(tiles, depth=depth, stages=stages)
    return tiles, splits


@functools.cache
def depth_of(programs: int, tiles: Tiles, shared_memory: int) -> tuple[int, int]:
    """Parts of a step, and stages, of fp8 products: the most that lets all programs run at once.

    Args:
        tiles: Tiles whose parts and stages are not set yet.
        shared_memory: Bytes of a multiprocessor.
    """
    rows = tiles.outputs + tiles.tokens
    for depth, stages in ((2, 4), (2, 3), (1, 4), (1, 3)):
        at_once = shared_memory // shared_memory_of(rows, stages * depth * _PART)
        if programs <= MULTIPROCESSORS * at_once:
            return depth, stages
    return 1, 4


def multiply_on_tensor_cores(
    x: torch.Tensor | RoundedRows,
    weight: ScaledWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: tuple[Tiles, int] | None = None,
) -> None:
    """`x @ weight.T + bias` by this module's kernel.

    Args:
        x: `[num_tokens, inputs]`, dense rows of any stride; for an fp8 weight rounded, without more
            rows.
        weight: `[outputs, inputs]`.
        out: Contiguous `[num_tokens, outputs]`, any float dtype.
        config: From `plan`.
    """
    tokens, (outputs, inputs) = len(x), weight.shape
    tiles, splits = config or plan(tokens, weight)
    assert out.is_contiguous() and (weight.is_fp8 or tiles.depth == 1)
    elements: Any = weight.elements
    tma = False
    assert isinstance(x, RoundedRows) == weight.is_fp8
    if isinstance(x, RoundedRows):
        given, x_scales = x.elements, x.scales
        assert len(given) == tokens and weight.group in (_PART, inputs)
        tma = inputs % 16 == 0
        if tma:
            elements = TensorDescriptor.from_tensor(elements, [tiles.outputs, _PART])
    else:
        given, x_scales = x, weight.scales
        assert given.stride(1) == 1
    grid = triton.cdiv(outputs, tiles.outputs) * triton.cdiv(tokens, tiles.tokens)
    parts = arrivals = weight.scales
    if splits > 1:
        assert grid <= MULTIPROCESSORS
        parts = torch.empty((splits, tokens, outputs), dtype=torch.float32, device=out.device)
        stream = torch.accelerator.current_stream(out.device).stream_id if out.is_cuda else 0
        arrivals = _arrivals(out.device, stream)
    _product_kernel[(grid, splits)](
        TensorDescriptor.from_tensor(given, [tiles.tokens, _PART]) if tma else given,
        x_scales, elements, weight.scales, zeros_of(weight),
        weight.scales if bias is None else bias, out, parts, arrivals, tokens, given.stride(0),
        N=outputs, K=inputs, FP8=weight.is_fp8, ZEROS=weight.zeros is not None,
        HEIGHT=weight.height, GROUP=weight.group, BLOCK=weight.block, SPLITS=splits,
        BLOCK_N=tiles.outputs, BLOCK_T=tiles.tokens,
        BLOCK_K=_PART, DEPTH=tiles.depth, TILES=tiles.group, TMA=tma, CUDA=out.is_cuda,
        BIAS=bias is not None, num_warps=tiles.warps, num_stages=tiles.stages,
        **early_start(given, most_rows=SEVERAL_ROWS),
    )  # fmt: skip


def more_rows_of_library(tokens: int, weight: ScaledWeight) -> int:
    """Rows of zeros that `multiply_fp8_by_library` needs after so many tokens: scales of blocks are
    read 16 bytes at a time."""
    return 0 if weight.group == weight.shape[1] else -tokens % 4


def multiply_fp8_by_library(
    x: RoundedRows, weight: ScaledWeight, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """`x @ weight.T + bias` by DeepGEMM or `torch.nn.functional.scaled_mm`: blocks of 128 inputs
    with 1 or 128 outputs, or one group of inputs.

    Args:
        x: Has `more_rows_of_library` rows of zeros after its tokens.
    """
    (outputs, inputs), x_scales = weight.shape, x.scales
    scales = weight.scales
    dense = dense_product(len(x), weight, out_dtype)
    if dense is not None:
        out = x.elements.new_empty((len(x.elements), outputs), dtype=out_dtype)
        dense((x.elements, x_scales), (weight.elements, scales), out)
        result = out[: len(x)]
        return result if bias is None else result.add_(bias)
    if weight.group == inputs:
        x_recipe = recipe = ScalingType.RowWise
        scales = scales.repeat_interleave(weight.height, 0).t().contiguous()
        x_scales = x_scales.contiguous()
    elif weight.height == 1:
        x_recipe = recipe = ScalingType.BlockWise1x128
        scales = scales.t().contiguous().t()
    else:
        # cuBLAS takes columns of a multiple of four scales.
        x_recipe, recipe = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        missing = -scales.shape[1] % 4
        # `pad` copies even if there is nothing to add: a launch for each product.
        scales = (F.pad(scales, (0, missing)) if missing else scales).t()
    result = F.scaled_mm(
        x.elements,
        weight.elements.t(),
        scale_a=x_scales,
        scale_recipe_a=x_recipe,
        scale_b=scales,
        scale_recipe_b=recipe,
        output_dtype=out_dtype,
    )[: len(x)]
    return result if bias is None else result.add_(bias)
