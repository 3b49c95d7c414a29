"""Several rows times a weight with scales, on tensor cores.

fp8: each group of inputs has a sum of its own, which both scales multiply in fp32. 4 bits: weights
are dequantized to the dtype of `x` first. Weights are the left operand:
they have enough rows for tensor cores even where there are few tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.functional import ScalingType
from triton.tools.tensor_descriptor import TensorDescriptor

from sglang.srt.layers.triton_ops.arguments import ScaledWeight
from sglang.srt.layers.triton_ops.early_start import await_kernels_before, early_start
from sglang.srt.layers.triton_ops.scaled.gemv import zeros_of
from sglang.srt.layers.triton_ops.scaled.int4 import load_int4
from sglang.srt.layers.triton_ops.scaled.rounding import quantize_activations

_DEPTH: Final = 128
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
    """Weights read ahead, in units of 128 inputs."""


@triton.jit(do_not_specialize=["tokens"])
def _product_kernel(
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tokens: tl.tensor,
    stride: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    FP8: tl.constexpr,
    ZEROS: tl.constexpr,
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    TMA: tl.constexpr,
    BIAS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute a tile of outputs and tokens over a share of the inputs.

    Grid `(tiles of outputs * tiles of tokens, SPLITS)`. If SPLITS is above 1, `out` is fp32
    `[SPLITS, tokens, N]`. For fp8 weights `x` is rounded.
    """
    await_kernels_before(EARLY)
    blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    group = tl.program_id(0) // (TILES * blocks)
    within = tl.program_id(0) % (TILES * blocks)
    size = tl.minimum(tl.cdiv(tokens, BLOCK_T) - group * TILES, TILES)
    token = (group * TILES + within % size) * BLOCK_T
    output = within // size * BLOCK_N
    rows, own = token + tl.arange(0, BLOCK_T), output + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_K)
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
    SHARE: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    first = tl.program_id(1) * SHARE
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for step in range(first, tl.minimum(first + SHARE, STEPS)):
        k = step * BLOCK_K
        inside = cols < K - k
        if not FP8:
            w = load_int4(
                weight_ptr, scales_ptr, zeros_ptr, read.to(tl.int64), k, K, ZEROS, GROUP, BLOCK_K,
                x_ptr.dtype.element_ty,
            )  # fmt: skip
        elif TMA:
            w = weights.load([output, k])
        else:
            w = tl.load(weights + k, mask=inside[None, :], other=0.0)
        if TMA:
            x = x_at.load([token, k])
        else:
            x = tl.load(x_at + k, mask=used[:, None] & inside[None, :], other=0.0)
        if not FP8:
            acc = tl.dot(w, x.T, acc)
        elif GROUP == K:
            acc += tl.dot(w, x.T)
        else:
            part = tl.dot(w, x.T)
            x_scales = tl.load(x_scales_ptr + step * tokens + rows, mask=used, other=0.0)
            if HEIGHT % BLOCK_N == 0:
                scale = tl.load(scales_ptr + output // HEIGHT * GROUPS + step)
                acc += part * (x_scales * scale)[None, :]
            else:
                scales = tl.load(scales_ptr + read // HEIGHT * GROUPS + step)
                acc += part * (scales[:, None] * x_scales[None, :])
    if FP8 and GROUP == K:
        x_scales = tl.load(x_scales_ptr + rows, mask=used, other=0.0)
        scales = tl.load(scales_ptr + read // HEIGHT)
        acc *= scales[:, None] * x_scales[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + read).to(tl.float32)[:, None]
    to = out_ptr + (tl.program_id(1).to(tl.int64) * tokens + rows)[None, :] * N + own[:, None]
    stored = used[None, :] & (own < N)[:, None]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["tokens"])
def _sum_kernel(
    parts_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tokens: tl.tensor,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(tokens, n / BLOCK)`: sum the parts of a token's outputs."""
    await_kernels_before(EARLY)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < N
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        part = parts_ptr + (split * tokens + token) * N + cols
        total += tl.load(part, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + cols, total.to(out_ptr.dtype.element_ty), mask=inside)


_PROGRAMS: Final = 192
"""Programs that fill a device. If tiles are fewer, several programs share the inputs of one."""


def plan(tokens: int, weight: ScaledWeight) -> tuple[Tiles, int]:
    """Tiles of a product, and the number of programs that share a tile's inputs. Measured on an
    H100 with the shapes of Qwen3-8B."""
    outputs, inputs = weight.shape
    rows = max(16, min(64, triton.next_power_of_2(tokens)))
    if tokens <= 32 and outputs > 4096:
        tiles = Tiles(128, rows, 8, 4, 4)
    elif tokens <= 256 or not weight.is_fp8:
        tiles = Tiles(64, rows, 8, 4, 5 if rows < 64 else 4)
    else:
        tiles = Tiles(128, 128, 8, 8, 4)
    programs = triton.cdiv(outputs, tiles.outputs) * triton.cdiv(tokens, tiles.tokens)
    splits = 1
    while programs * splits < _PROGRAMS and inputs >= splits * 2048:
        splits *= 2
    return tiles, splits


def multiply_on_tensor_cores(
    x: torch.Tensor,
    weight: ScaledWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: tuple[Tiles, int] | None = None,
) -> None:
    """`x @ weight.T + bias` by this module's kernel.

    Args:
        x: `[num_tokens, inputs]`, dense rows of any stride.
        weight: `[outputs, inputs]`.
        out: Contiguous `[num_tokens, outputs]`, any float dtype.
        config: From `plan`.
    """
    tokens, (outputs, inputs) = len(x), weight.shape
    tiles, splits = config or plan(tokens, weight)
    assert x.stride(1) == 1 and out.is_contiguous()
    given, x_scales = x, weight.scales
    elements: Any = weight.elements
    tma = False
    if weight.is_fp8:
        assert weight.group in (_DEPTH, inputs)
        given, x_scales = quantize_activations(x, weight.group)
        tma = inputs % 16 == 0
        if tma:
            elements = TensorDescriptor.from_tensor(elements, [tiles.outputs, _DEPTH])
    to = out
    if splits > 1:
        to = torch.empty((splits, tokens, outputs), dtype=torch.float32, device=x.device)
    grid = triton.cdiv(outputs, tiles.outputs) * triton.cdiv(tokens, tiles.tokens)
    _product_kernel[(grid, splits)](
        TensorDescriptor.from_tensor(given, [tiles.tokens, _DEPTH]) if tma else given,
        x_scales, elements, weight.scales, zeros_of(weight),
        weight.scales if bias is None else bias, to, tokens, given.stride(0), N=outputs, K=inputs,
        FP8=weight.is_fp8, ZEROS=weight.zeros is not None, HEIGHT=weight.height,
        GROUP=weight.group, SPLITS=splits, BLOCK_N=tiles.outputs, BLOCK_T=tiles.tokens,
        BLOCK_K=_DEPTH, TILES=tiles.group, TMA=tma,
        BIAS=bias is not None and splits == 1, num_warps=tiles.warps, num_stages=tiles.stages,
        **early_start(x),
    )  # fmt: skip
    if splits > 1:
        block = min(1024, triton.next_power_of_2(outputs))
        _sum_kernel[(tokens, triton.cdiv(outputs, block))](
            to, weight.scales if bias is None else bias, out, tokens, N=outputs, SPLITS=splits,
            BIAS=bias is not None, BLOCK=block, num_warps=4, **early_start(x),
        )  # fmt: skip


def multiply_fp8_by_library(
    x: torch.Tensor, weight: ScaledWeight, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """`x @ weight.T + bias` by `torch.nn.functional.scaled_mm`: blocks of 128 inputs with 1 or 128
    outputs, or one group of inputs."""
    tokens, inputs = len(x), weight.shape[1]
    # Scales of blocks are read 16 bytes at a time.
    rounded, x_scales = quantize_activations(
        x, weight.group, more_rows=0 if weight.group == inputs else -tokens % 4
    )
    scales = weight.scales
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
        scales = F.pad(scales, (0, -scales.shape[1] % 4)).t()
    result = F.scaled_mm(
        rounded,
        weight.elements.t(),
        scale_a=x_scales,
        scale_recipe_a=x_recipe,
        scale_b=scales,
        scale_recipe_b=recipe,
        output_dtype=out_dtype,
    )[:tokens]
    return result if bias is None else result.add_(bias)
