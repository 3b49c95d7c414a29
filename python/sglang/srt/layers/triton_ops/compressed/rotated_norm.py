"""Norms of vectors and the rotation of their last elements, in pairs of neighbours, in one pass.

They round at the same points as `WideRMSNorm` and `layers/compressed/rotation.py`.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.early_start import await_kernels_before, early_start

_ELEMENTS: Final = 4096
"""Elements of a program."""


@triton.jit
def _finish(
    x: tl.tensor,
    to: tl.tensor,
    rows: tl.tensor,
    stride: tl.constexpr,
    is_row: tl.tensor,
    weight_ptr: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    eps: tl.tensor,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    """Normalise, rotate and store vectors `[ROWS, BLOCK_D]` of one token, as `rows` of `to`."""
    dims = tl.arange(0, BLOCK_D)
    dtype = x.dtype
    if NORM:
        x = x.to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]
        if weight_ptr is not None:
            x = x * tl.load(weight_ptr + dims, mask=dims < DIM, other=0.0)[None, :]
        x = x.to(dtype)
    if ROTARY > 0:
        x = x.to(tl.float32)
        first, second = tl.split(tl.reshape(x, [ROWS, BLOCK_D // 2, 2]))
        place = tl.arange(0, BLOCK_D // 2) - (DIM - ROTARY) // 2
        is_turned = (place >= 0) & (place < ROTARY // 2)
        c = tl.load(cos + place, mask=is_turned, other=1.0).to(tl.float32)[None, :]
        s = tl.load(sin + ROTARY // 2 + place, mask=is_turned, other=0.0).to(tl.float32)[None, :]
        x = tl.reshape(tl.join(first * c - second * s, second * c + first * s), [ROWS, BLOCK_D])
    at = to + rows[:, None] * stride + dims[None, :]
    tl.store(at, x.to(dtype), mask=is_row[:, None] & (dims < DIM)[None, :])


@triton.jit
def _finish_one(
    at: tl.tensor,
    to: tl.tensor,
    weight_ptr: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    eps: tl.tensor,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Normalise, rotate and store one vector."""
    row = tl.arange(0, 1)
    dims = tl.arange(0, BLOCK_D)
    x = tl.load(at + row[:, None] + dims[None, :], mask=(dims < DIM)[None, :], other=0.0)
    _finish(x, to, row, DIM, row == 0, weight_ptr, cos, sin, eps, DIM, ROTARY, 1, BLOCK_D, True)


@triton.jit
def _heads_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(tokens, heads / ROWS)`: one program takes ROWS heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    is_head = heads < NUM_HEADS
    await_kernels_before(EARLY)
    at = x_ptr + token * x_stride + heads[:, None] * HEAD_STRIDE + dims[None, :]
    x = tl.load(at, mask=is_head[:, None] & (dims < DIM)[None, :], other=0.0)
    cos, sin = cos_ptr + token * ROTARY, sin_ptr + token * ROTARY
    to = out_ptr + token * out_stride
    _finish(
        x, to, heads, HEAD_STRIDE, is_head, None, cos, sin, eps, DIM, ROTARY, ROWS, BLOCK_D, NORM
    )


@triton.jit
def _latents_kernel(
    x_ptr: tl.tensor,
    latent_ptr: tl.tensor,
    key_ptr: tl.tensor,
    latent_weight_ptr: tl.tensor,
    key_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    RANK: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(tokens, 2)`: one program takes the latent vector, one the key."""
    token = tl.program_id(0).to(tl.int64)
    cos, sin = cos_ptr + token * ROTARY, sin_ptr + token * ROTARY
    await_kernels_before(EARLY)
    at = x_ptr + token * x_stride
    if tl.program_id(1) == 0:
        to = latent_ptr + token * RANK
        _finish_one(at, to, latent_weight_ptr, cos, sin, eps, RANK, 0, BLOCK_R)
    else:
        to = key_ptr + token * DIM
        _finish_one(at + RANK, to, key_weight_ptr, cos, sin, eps, DIM, ROTARY, BLOCK_D)


def rotate_heads(
    x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], eps: float | None = None
) -> torch.Tensor:
    """Rotate the last elements of heads, which may be normalised first.

    Args:
        x: `[num_tokens, num_heads, dim]`, dense except for the first stride.
        angles: Cosines and signed sines, contiguous `[num_tokens, 1, rotary_dim]` each.
        eps: Epsilon of a norm of each head without a weight; None: no norm.

    Returns:
        Contiguous, of the shape of `x`.
    """
    assert x.stride(1) == x.shape[2]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_heads(x, out, angles, eps)
    return out


def rotate_back_(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Undo a rotation of the last elements of heads, in place.

    Args:
        x: `[num_tokens, num_heads, dim]`, the last dimension dense.
        angles: As in `rotate_heads`.
    """
    cos, sin = angles
    turned = x[..., -cos.shape[-1] :]
    _launch_heads(turned, turned, (cos, -sin), None)


def _launch_heads(
    x: torch.Tensor,
    out: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    eps: float | None,
) -> None:
    """Write heads of `x`, normalised and rotated, to those of `out`, which have the same stride."""
    num_tokens, num_heads, dim = x.shape
    cos, sin = angles
    assert x.stride()[1:] == out.stride()[1:] == (x.stride(1), 1)
    assert cos.is_contiguous() and sin.is_contiguous()
    block_d = int(triton.next_power_of_2(dim))
    rows = min(max(1, _ELEMENTS // block_d), int(triton.next_power_of_2(num_heads)))
    _heads_kernel[(num_tokens, triton.cdiv(num_heads, rows))](
        x,
        out,
        cos,
        sin,
        x.stride(0),
        out.stride(0),
        0.0 if eps is None else eps,
        NUM_HEADS=num_heads,
        HEAD_STRIDE=x.stride(1),
        DIM=dim,
        ROTARY=cos.shape[-1],
        ROWS=rows,
        BLOCK_D=block_d,
        NORM=eps is not None,
        num_warps=4,
        **early_start(x),
    )


def normalise_latents(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    angles: tuple[torch.Tensor, torch.Tensor],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise latent vectors and keys, and rotate the keys' last elements.

    Args:
        x: `[num_tokens, rank + dim]` with dense rows: latent vectors and keys side by side.
        weights: fp32 `[rank]` and `[dim]`.
        angles: As in `rotate_heads`.

    Returns:
        Contiguous `[num_tokens, rank]` and `[num_tokens, dim]`.
    """
    num_tokens, rank, dim = len(x), len(weights[0]), len(weights[1])
    cos, sin = angles
    assert x.stride(1) == 1 and x.shape[1] == rank + dim
    assert cos.is_contiguous() and sin.is_contiguous()
    latents = torch.empty((num_tokens, rank), dtype=x.dtype, device=x.device)
    keys = torch.empty((num_tokens, dim), dtype=x.dtype, device=x.device)
    _latents_kernel[(num_tokens, 2)](
        x,
        latents,
        keys,
        *weights,
        cos,
        sin,
        x.stride(0),
        eps,
        RANK=rank,
        DIM=dim,
        ROTARY=cos.shape[-1],
        BLOCK_R=int(triton.next_power_of_2(rank)),
        BLOCK_D=int(triton.next_power_of_2(dim)),
        num_warps=4,
        **early_start(x),
    )
    return latents, keys
