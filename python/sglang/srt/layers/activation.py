"""Activation functions of gated feed-forward layers."""

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
