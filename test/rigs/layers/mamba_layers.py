"""Mamba-2 layers with random weights, and pools of their states."""

from __future__ import annotations

from typing import Any

import torch

from rigs.layers.delta_layers import POOL_SLOTS, fill, normal
from sglang.srt.layers.linear_attention.mamba2 import Mamba2, Mamba2Options
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.mem_cache.device.state_pool import MambaPool, MambaSpec


def mamba2(dtype: torch.dtype, device: str, **changes: Any) -> Mamba2:
    """Two groups of two heads; the states forget within some chunks."""
    shape: dict[str, Any] = {
        "hidden_size": 32, "num_heads": 4, "head_dim": 24, "num_groups": 2, "state_size": 20,
        "kernel": 4, "chunk": 64, "eps": 1e-5,
    }  # fmt: skip
    options = Mamba2Options(**shape | changes)
    layer = Mamba2(options, TensorPlacement(dtype=dtype, device=device), 0)
    fill(layer, 1)
    layer.weights.a_log.sub_(4.0)
    return layer


def pool_of(layer: Mamba2, ssm_dtype: torch.dtype, dtype: torch.dtype) -> MambaPool:
    """A pool of random states, on the layer's device."""
    shape = layer.options
    spec = MambaSpec.of_shapes(
        (0,), (shape.num_heads, shape.head_dim, shape.state_size),
        (sum(shape.runs), shape.kernel - 1), ssm_dtype=ssm_dtype, conv_dtype=dtype,
    )  # fmt: skip
    pool = MambaPool(spec, POOL_SLOTS, layer.weights.conv.device)
    pool.temporal.copy_(normal(*pool.temporal.shape, seed=2))
    pool.conv.copy_(normal(*pool.conv.shape, seed=3))
    return pool
