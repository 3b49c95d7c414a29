"""Gated activations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.hardware_backend.cuda.early_start import await_kernels_before, early_start


@triton.jit
def _silu_and_mul_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(num_tokens, size / BLOCK)`: a program computes BLOCK features of one token."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    await_kernels_before(EARLY)
    if EVEN:
        gate = tl.load(x_ptr + row * 2 * size + cols)
        up = tl.load(x_ptr + row * 2 * size + size + cols)
    else:
        gate = tl.load(x_ptr + row * 2 * size + cols, mask=cols < size, other=0.0)
        up = tl.load(x_ptr + row * 2 * size + size + cols, mask=cols < size, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    out = (activated * up.to(tl.float32)).to(gate.dtype)
    if EVEN:
        tl.store(out_ptr + row * size + cols, out)
    else:
        tl.store(out_ptr + row * size + cols, out, mask=cols < size)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Contiguous `[num_tokens, 2 * size]` to `[num_tokens, size]`."""
    assert gate_up.is_contiguous()
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(size))
    _silu_and_mul_kernel[(num_tokens, triton.cdiv(size, block))](
        gate_up,
        out,
        size,
        BLOCK=block,
        EVEN=size % block == 0,
        num_warps=4,
        **early_start(gate_up),
    )
    return out
