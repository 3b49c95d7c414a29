"""Activation functions of gated layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang.srt.layers.fused_kernels import fused_kernels


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[..., 2 * size]`, gate and up side by side, to silu(gate) * up, `[..., size]`."""
    kernels = fused_kernels(gate_up.device)
    if kernels is not None:
        return kernels.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def scale_by_gates_(
    x: torch.Tensor, gates: torch.Tensor, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply attention's output by the sigmoid of each head's gate, in place.

    Args:
        x: Contiguous `[n, num_heads * head_dim]`.
        gates: `[num_tokens, num_heads, head_dim]`, the last dimension dense.
        rows: int64 `[n]`: the token of each row of `x`; None: row i is token i.

    Returns:
        `x`.
    """
    kernels = fused_kernels(x.device)
    if kernels is not None:
        kernels.scale_by_gates_(x, gates, rows)
        return x
    own = gates if rows is None else gates.index_select(0, rows)
    return x.mul_(own.flatten(1).sigmoid())
