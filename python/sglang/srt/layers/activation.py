"""Activation functions of gated feed-forward layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[..., 2 * size]`, gate and up side by side, to silu(gate) * up, `[..., size]`."""
    if gate_up.is_cuda:
        from sglang.srt.layers.triton_ops import activation

        return activation.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
