"""Root-mean-square normalisation, with the residual's addition in the same pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


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
) -> None:
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < SIZE
    x = tl.load(x_ptr + row * SIZE + cols, mask=inside, other=0.0)
    dtype = x.dtype
    if ADD:
        residual = tl.load(residual_ptr + row * SIZE + cols, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(residual_ptr + row * SIZE + cols, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    # Rounded before the weight is applied: the order that checkpoints were trained with.
    normed = (wide * scale).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + cols, (normed * weight).to(dtype), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise contiguous `[num_tokens, size]` into a new tensor."""
    assert x.is_contiguous()
    out = torch.empty_like(x)
    _launch(x, None, weight, out, eps)
    return out


def add_rms_norm_(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    """`residual += x`, then `x = norm(residual)`: both contiguous `[num_tokens, size]`."""
    assert x.is_contiguous() and residual.is_contiguous()
    _launch(x, residual, weight, x, eps)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
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
        num_warps=min(16, max(1, block // 512)),
    )
