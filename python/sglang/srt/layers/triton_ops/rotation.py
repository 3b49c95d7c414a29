"""Rotation of queries or keys by the angles of their positions, in one pass.

It rounds to the model's dtype at the same points as `layers/rotary_embedding.py`.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.early_start import await_kernels_before, early_start

_BLOCK_PAIRS: Final = 2048
"""Pairs of dimensions that a program rotates."""


@triton.jit
def rotated_heads(
    at: tl.tensor,
    dims: tl.tensor,
    inside: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> tl.tensor:
    """Load heads and rotate them, rounded at the same points as by `rotate`.

    Args:
        at: Pointers to the heads, `[..., 1]`, or one.
        cos: fp32, of each dimension; `sin` likewise, signed.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    own = tl.load(at + dims, mask=inside, other=0.0)
    other = tl.load(at + tl.where(dims < HALF, dims + HALF, dims - HALF), mask=inside, other=0.0)
    turned = (own.to(tl.float32) * cos).to(own.dtype).to(tl.float32)
    return (turned + other.to(tl.float32) * sin).to(own.dtype)


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_kernel(
    x_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    x_stride: tl.tensor,
    x_head_stride: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program rotates HEADS heads of TOKENS tokens, and copies the REST dimensions behind;
    BLOCK covers HALF of the rotated ones."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :, None]
    is_row = (token < num_tokens) & (head < NUM_HEADS)
    cols = tl.arange(0, BLOCK)[None, None, :]
    inside = is_row & (cols < HALF)
    # Angles were written before the embedding lookup, which does not start early.
    has_angle = (token < num_tokens) & (cols < HALF)
    angle = token * (2 * HALF) + cols
    low_cos = tl.load(cos_ptr + angle, mask=has_angle, other=0.0).to(tl.float32)
    high_cos = tl.load(cos_ptr + angle + HALF, mask=has_angle, other=0.0).to(tl.float32)
    low_sin = tl.load(sin_ptr + angle, mask=has_angle, other=0.0).to(tl.float32)
    high_sin = tl.load(sin_ptr + angle + HALF, mask=has_angle, other=0.0).to(tl.float32)
    x = x_ptr + token * x_stride + head * x_head_stride
    out = out_ptr + token * out_stride + head * out_head_stride
    await_kernels_before(EARLY)
    if INTERLEAVED:
        both_cols = tl.arange(0, 2 * BLOCK)[None, None, :]
        both = tl.load(x + both_cols, mask=is_row & (both_cols < 2 * HALF), other=0.0)
        low, high = tl.split(tl.reshape(both, [TOKENS, HEADS, BLOCK, 2]))
    else:
        low = tl.load(x + cols, mask=inside, other=0.0)
        high = tl.load(x + HALF + cols, mask=inside, other=0.0)
    dtype = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    new_low = (low * low_cos).to(dtype).to(tl.float32) + high * low_sin
    new_high = (high * high_cos).to(dtype).to(tl.float32) + low * high_sin
    # In place: heads must be read before any of them is overwritten.
    tl.debug_barrier()
    tl.store(out + cols, new_low.to(dtype), mask=inside)
    tl.store(out + HALF + cols, new_high.to(dtype), mask=inside)
    if REST > 0:
        rest_cols = 2 * HALF + tl.arange(0, BLOCK_REST)[None, None, :]
        is_rest = is_row & (rest_cols < 2 * HALF + REST)
        tl.store(out + rest_cols, tl.load(x + rest_cols, mask=is_rest, other=0.0), mask=is_rest)


def rotate(
    x: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor | None = None,
    *,
    is_interleaved: bool = False,
) -> torch.Tensor:
    """Rotate the first `rotary_dim` dimensions and copy the others.

    Args:
        x: `[num_tokens, num_heads, head_dim]`, the last dimension dense.
        angles: Cosines and signed sines, contiguous `[num_tokens, 1, rotary_dim]` each.
        out: Overwritten: like `x`, or `x` itself. None: a new tensor.
        is_interleaved: If true, dimensions 2i and 2i + 1 of `x` are a pair, and become dimensions i
            and i + rotary_dim / 2. Else dimensions i and i + rotary_dim / 2 are a pair.

    Returns:
        `out`.
    """
    num_tokens, num_heads, head_dim = x.shape
    cos, sin = angles
    assert cos.is_contiguous() and sin.is_contiguous()
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    assert x.stride(2) == 1 and out.stride(2) == 1
    rotary_dim = cos.shape[-1]
    rest = 0 if out is x else head_dim - rotary_dim
    block = triton.next_power_of_2(rotary_dim // 2)
    rows = max(1, _BLOCK_PAIRS // block)
    heads = min(rows, triton.next_power_of_2(num_heads))
    tokens = rows // heads
    _rotate_kernel[(triton.cdiv(num_tokens, tokens), triton.cdiv(num_heads, heads))](
        x,
        cos,
        sin,
        out,
        num_tokens,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        NUM_HEADS=num_heads,
        HALF=rotary_dim // 2,
        REST=rest,
        TOKENS=tokens,
        HEADS=heads,
        BLOCK=block,
        BLOCK_REST=triton.next_power_of_2(max(1, rest)),
        INTERLEAVED=is_interleaved,
        num_warps=4,
        **early_start(x),
    )
    return out
