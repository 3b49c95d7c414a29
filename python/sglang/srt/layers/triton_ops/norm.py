"""Root-mean-square normalisation that can add the residual in the same pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.early_start import await_kernels_before, early_start


@triton.jit
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    CENTERED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(num_tokens,)`: one program normalises one token; BLOCK covers it."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < SIZE
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    await_kernels_before(EARLY)
    x = tl.load(x_ptr + row * SIZE + cols, mask=inside, other=0.0)
    dtype = x.dtype
    if ADD:
        residual = tl.load(residual_ptr + row * SIZE + cols, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(residual_ptr + row * SIZE + cols, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    if CENTERED:
        normed = wide * scale * (1.0 + weight)
    else:
        # Rounded before the weight is applied, as in the training of checkpoints.
        normed = (wide * scale).to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + row * SIZE + cols, normed.to(dtype), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, is_centered: bool = False
) -> torch.Tensor:
    """Normalise contiguous `[num_tokens, size]` into a new tensor.

    Args:
        is_centered: If true, multiply by (1 + weight) in fp32, then round.
    """
    assert x.is_contiguous()
    out = torch.empty_like(x)
    _launch(x, None, weight, out, eps, is_centered)
    return out


def add_rms_norm_(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    is_centered: bool = False,
) -> None:
    """`residual += x`, then `x = norm(residual)`: both contiguous `[num_tokens, size]`."""
    assert x.is_contiguous() and residual.is_contiguous()
    _launch(x, residual, weight, x, eps, is_centered)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    is_centered: bool,
) -> None:
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(x.numel() // size,)](
        x,
        residual if residual is not None else x,
        weight,
        out,
        eps,
        SIZE=size,
        BLOCK=block,
        ADD=residual is not None,
        CENTERED=is_centered,
        num_warps=min(16, max(1, block // 512)),
        **early_start(x),
    )
