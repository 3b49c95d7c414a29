"""Angles of rotary positions, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.early_start import await_kernels_before, early_start

_BLOCK_TOKENS = 16


@triton.jit(do_not_specialize=["tokens"])
def _angles_kernel(
    positions_ptr: tl.tensor,
    freq_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    scale: tl.tensor,
    tokens: tl.tensor,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(tokens / BLOCK_T,)`."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    pair = tl.arange(0, BLOCK_H)
    freq = tl.load(freq_ptr + pair, mask=pair < HALF, other=0.0)
    await_kernels_before(EARLY)
    position = tl.load(positions_ptr + token, mask=token < tokens, other=0).to(tl.float32)
    angle = position[:, None] * freq[None, :]
    dtype = cos_ptr.dtype.element_ty
    cos = (tl.cos(angle) * scale).to(dtype)
    sin = tl.sin(angle) * scale
    at = token[:, None] * (2 * HALF) + pair[None, :]
    inside = (token < tokens)[:, None] & (pair < HALF)[None, :]
    tl.store(cos_ptr + at, cos, mask=inside)
    tl.store(cos_ptr + at + HALF, cos, mask=inside)
    tl.store(sin_ptr + at, (-sin).to(dtype), mask=inside)
    tl.store(sin_ptr + at + HALF, sin.to(dtype), mask=inside)


def rotary_angles(
    positions: torch.Tensor, inv_freq: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines for `Rotation`.

    Args:
        positions: int64 `[num_tokens]`.
        inv_freq: fp32 `[rotary_dim / 2]`.
        scale: Factor of both.
        dtype: Dtype of the results.

    Returns:
        Two `[num_tokens, 1, rotary_dim]`.
    """
    num_tokens, half = len(positions), len(inv_freq)
    assert positions.is_contiguous() and inv_freq.is_contiguous()
    cos = torch.empty((num_tokens, 1, 2 * half), dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    _angles_kernel[(triton.cdiv(num_tokens, _BLOCK_TOKENS),)](
        positions,
        inv_freq,
        cos,
        sin,
        scale,
        num_tokens,
        HALF=half,
        BLOCK_H=triton.next_power_of_2(half),
        BLOCK_T=_BLOCK_TOKENS,
        num_warps=4,
        **early_start(positions),
    )
    return cos, sin
