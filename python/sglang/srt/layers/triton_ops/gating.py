"""Gates: SiLU of one half times the other half, and sigmoid gates of attention's output."""

from __future__ import annotations

from typing import TypedDict

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import ClampedGate, ExpertActivation
from sglang.srt.layers.triton_ops.early_start import (
    SEVERAL_ROWS,
    await_kernels_before,
    early_start,
)


class GateRule(TypedDict):
    """A gate's rule, as kernels take it."""

    LIMIT: float
    """See `ClampedGate`; 0: SiLU."""
    ALPHA: float
    SHIFT: float


def rule_of(activation: ExpertActivation) -> GateRule:
    """The constant arguments of a kernel with gates of that kind."""
    if isinstance(activation, ClampedGate):
        return {"LIMIT": activation.limit, "ALPHA": activation.alpha, "SHIFT": activation.shift}
    return {"LIMIT": 0.0, "ALPHA": 0.0, "SHIFT": 0.0}


@triton.jit
def clamped_gate(
    gate: tl.tensor,
    up: tl.tensor,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
) -> tl.tensor:
    """See `ClampedGate`; fp32. NaN stays NaN."""
    every: tl.constexpr = tl.PropagateNan.ALL
    gate = tl.minimum(gate, LIMIT, propagate_nan=every)
    up = tl.minimum(tl.maximum(up, -LIMIT, propagate_nan=every), LIMIT, propagate_nan=every)
    return gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + SHIFT)


@triton.jit
def _silu_and_mul_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(num_tokens, size / BLOCK)`: one program computes BLOCK features of one token."""
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
    if LIMIT > 0:
        out = clamped_gate(wide, up.to(tl.float32), LIMIT, ALPHA, SHIFT).to(gate.dtype)
    else:
        activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
        out = (activated * up.to(tl.float32)).to(gate.dtype)
    if EVEN:
        tl.store(out_ptr + row * size + cols, out)
    else:
        tl.store(out_ptr + row * size + cols, out, mask=cols < size)


def silu_and_mul(gate_up: torch.Tensor, activation: ExpertActivation = "silu") -> torch.Tensor:
    """Contiguous `[num_tokens, 2 * size]` to `[num_tokens, size]`, also with a clamped gate."""
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
        **rule_of(activation),
        num_warps=4,
        **early_start(gate_up, most_rows=SEVERAL_ROWS, is_short=True),
    )
    return out


@triton.jit
def gated(out: tl.tensor, gate: tl.tensor) -> tl.tensor:
    """Multiply `out`, which is rounded already, by the sigmoid of its gate."""
    return (out.to(tl.float32) / (1.0 + tl.exp(-gate.to(tl.float32)))).to(out.dtype)


@triton.jit
def _gate_kernel(
    x_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    stride: tl.tensor,
    step: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(heads, num_tokens)`: one program scales one head of one token."""
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    await_kernels_before(EARLY)
    row = token
    if ROWS:
        row = tl.load(rows_ptr + token)
    dims = tl.arange(0, BLOCK)
    inside = dims < HEAD_DIM
    at = gates_ptr + row * stride + head * step + dims
    gate = tl.load(at, mask=inside, other=0.0)
    to = x_ptr + (token * HEADS + head) * HEAD_DIM + dims
    x = tl.load(to, mask=inside, other=0.0)
    tl.store(to, gated(x, gate), mask=inside)


def scale_by_gates_(x: torch.Tensor, gates: torch.Tensor, rows: torch.Tensor | None) -> None:
    """See `layers/activation.py`."""
    _, heads, head_dim = gates.shape
    assert x.is_contiguous() and gates.stride(2) == 1
    _gate_kernel[(heads, len(x))](
        x,
        gates,
        x if rows is None else rows,
        gates.stride(0),
        gates.stride(1),
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK=triton.next_power_of_2(head_dim),
        ROWS=rows is not None,
        num_warps=1,
        **early_start(x),
    )
