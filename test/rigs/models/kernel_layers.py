"""Layers and random numbers on the device of Triton's kernels.

Skips the importing module where kernels cannot run; see `triton_device`.
"""

from __future__ import annotations

from typing import Any

import torch

from rigs.layers import delta_layers
from rigs.models.triton_device import triton_device
from sglang.srt.layers.linear_attention.delta_net import GatedDeltaNet
from sglang.srt.layers.linear_attention.kda import KimiDeltaAttention

DEVICE = triton_device()
# The interpreter's bf16 is no real one.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return delta_layers.normal(*shape, seed=seed).to(DEVICE, dtype)


def delta_net(dtype: torch.dtype, **changes: Any) -> GatedDeltaNet:
    return delta_layers.delta_net(dtype, DEVICE, **changes)


def kda(dtype: torch.dtype, **changes: Any) -> KimiDeltaAttention:
    return delta_layers.kda(dtype, DEVICE, **changes)
