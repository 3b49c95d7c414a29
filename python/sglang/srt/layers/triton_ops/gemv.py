"""One row times a weight matrix. Reading the weights is the bound, so no tensor cores are used."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import ExpertActivation
from sglang.srt.layers.triton_ops.early_start import await_kernels_before, early_start
from sglang.srt.layers.triton_ops.gating import clamped_gate, rule_of


@triton.jit
def _products(
    x_ptr: tl.tensor,
    weights: tl.tensor,
    cols: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
) -> tl.tensor:
    """Sums of the products of a vector of K and some rows, `[rows]`. Reads BLOCK_K columns of the
    rows before it waits for earlier kernels.

    Args:
        weights: Pointers to the first `cols`, `[rows, BLOCK_K]`.
    """
    first = tl.load(weights)
    await_kernels_before(EARLY)
    acc = first.to(tl.float32) * tl.load(x_ptr + cols).to(tl.float32)[None, :]
    whole: tl.constexpr = K // BLOCK_K * BLOCK_K
    for begin in range(BLOCK_K, whole, BLOCK_K):
        w = tl.load(weights + begin)
        x = tl.load(x_ptr + begin + cols)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    if whole < K:
        is_col = whole + cols < K
        w = tl.load(weights + whole, mask=is_col[None, :], other=0.0)
        x = tl.load(x_ptr + whole + cols, mask=is_col, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    return tl.sum(acc, axis=1)


@triton.jit
def multiply_rows(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first: tl.tensor,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Store the products of a vector of K and BLOCK_N rows of a weight, from `first` on."""
    rows = first + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_K)
    weights = weight_ptr + rows.to(tl.int64)[:, None] * K + cols[None, :]
    total = _products(x_ptr, weights, cols, K, BLOCK_K, EARLY)
    if BIAS:
        total += tl.load(bias_ptr + rows).to(tl.float32)
    tl.store(out_ptr + rows, total.to(out_ptr.dtype.element_ty))


@triton.jit
def _gemv_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    OF_GROUP: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(n / BLOCK_N,)`: one program computes BLOCK_N outputs. OF_GROUP: outputs of a group,
    which has its own K inputs; 0: all have the same."""
    if OF_GROUP > 0:
        x_ptr += tl.program_id(0) * BLOCK_N // OF_GROUP * K
    first = tl.program_id(0) * BLOCK_N
    multiply_rows(x_ptr, weight_ptr, bias_ptr, out_ptr, first, K, BLOCK_N, BLOCK_K, BIAS, EARLY)


@triton.jit
def _gated_gemv_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute one feature from its row of gate and, N rows below, its row of up."""
    feature = tl.program_id(0).to(tl.int64)
    both = tl.arange(0, 2)
    cols = tl.arange(0, BLOCK_K)
    weights = weight_ptr + (feature + both * N)[:, None] * K + cols[None, :]
    total = _products(x_ptr, weights, cols, K, BLOCK_K, EARLY)
    # Rounded at the same points as in `gemv` and `silu_and_mul`.
    dtype = out_ptr.dtype.element_ty
    total = total.to(dtype).to(tl.float32)
    gate = tl.sum(tl.where(both == 0, total, 0.0), axis=0)
    up = tl.sum(tl.where(both == 1, total, 0.0), axis=0)
    if LIMIT > 0:
        gated = clamped_gate(gate, up, LIMIT, ALPHA, SHIFT)
    else:
        gated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    tl.store(out_ptr + feature, gated.to(dtype))


_MANY_ROWS = 2048
"""Rows of a weight from which programs with more rows and fewer columns still fill the device.
Measured for the shapes of Qwen3-8B on one and two ranks, Qwen3-Next and DeepSeek-V3.2."""

_ALIGNED: Final = 64
"""Rows of a weight begin at multiples of this number of elements, so that programs read whole
lines."""


def plan(n: int, k: int) -> tuple[int, int, int] | None:
    """Rows, columns and warps of a program for a weight `[n, k]`; None: unsupported shape."""
    sizes = (2048, 1024, 512, 256) if n < _MANY_ROWS else (1024, 512, 256)
    block_k = next((size for size in sizes if k % size == 0), None)
    if block_k is None and k % _ALIGNED == 0:
        # The last columns are masked: at most an eighth of what a program computes is nothing.
        block_k = next(
            (size for size in sizes if size <= k and 8 * (-k % size) <= k + -k % size), None
        )
    if block_k is None or n % 8:
        return None
    is_broad = _MANY_ROWS <= n <= 32768 and block_k == 1024 and k <= 6144
    is_narrow = n >= _MANY_ROWS and block_k == 512
    return 4 if is_broad else 2, block_k, 2 if is_narrow else 4


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: tuple[int, int, int],
    *,
    groups: int = 1,
) -> None:
    """`out[0] = weight @ x[0] + bias`, summed in fp32.

    Args:
        x: `[1, groups * k]`, dense.
        weight: Contiguous `[n, k]`. Each group of rows is multiplied with its own `k` inputs.
        out: `[1, n]`, any float dtype.
        config: From `plan`.
        groups: Parts of the rows, each a multiple of 8.
    """
    n, k = weight.shape
    block_n, block_k, num_warps = config
    assert weight.is_contiguous() and x.stride(-1) == 1 and n % (8 * groups) == 0
    _gemv_kernel[(n // block_n,)](
        x,
        weight,
        bias if bias is not None else weight,
        out,
        K=k,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BIAS=bias is not None,
        OF_GROUP=n // groups if groups > 1 else 0,
        num_warps=num_warps,
        **early_start(x),
    )


def gated_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    config: tuple[int, int, int],
    *,
    activation: ExpertActivation = "silu",
) -> None:
    """`out[0] = silu(gate @ x[0]) * (up @ x[0])` in one launch, or that of a clamped gate, rounded
    at the same points as `gemv` and `silu_and_mul`.

    Args:
        x: `[1, k]`, dense.
        weight: Contiguous `[2 * n, k]`: gate, then up.
        out: `[1, n]`, of the dtype of `x`.
        config: From `plan`, for the weight's shape.
    """
    rows, k = weight.shape
    _, block_k, num_warps = config
    assert weight.is_contiguous() and x.stride(-1) == 1
    _gated_gemv_kernel[(rows // 2,)](
        x,
        weight,
        out,
        N=rows // 2,
        K=k,
        BLOCK_K=block_k,
        **rule_of(activation),
        num_warps=num_warps,
        **early_start(x),
    )
