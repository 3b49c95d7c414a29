"""Layers on the device of Triton's kernels, random numbers, and batches for linear attention.

Skips the importing module where kernels cannot run; see `triton_device`.
"""

from __future__ import annotations

from typing import Any

import torch

from rigs.models.triton_device import triton_device
from sglang.srt.layers.forward_batch_info import ForwardBatch, ForwardMode, StateBatch
from sglang.srt.layers.linear_attention.delta_net import DeltaNetOptions, GatedDeltaNet
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.mem_cache.device.state_pool import MambaPool, MambaSpec
from sglang.srt.mem_cache.device.state_spec import PoolName

DEVICE = triton_device()
# The interpreter's bf16 is no real one.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def fill(module: torch.nn.Module, seed: int) -> None:
    """Small random weights, the same on every device."""
    numbers = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=numbers) * 0.2)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def delta_net(dtype: torch.dtype, **changes: Any) -> GatedDeltaNet:
    shape: dict[str, Any] = {
        "hidden_size": 32, "num_key_heads": 1, "num_heads": 2, "key_dim": 16, "value_dim": 24,
        "kernel": 4, "eps": 1e-6, "is_grouped": True,
    }  # fmt: skip
    options = DeltaNetOptions(**shape | changes)
    layer = GatedDeltaNet(options, TensorPlacement(dtype=dtype, device=DEVICE), 0)
    fill(layer, 1)
    return layer


def pool_of(layer: GatedDeltaNet, ssm_dtype: torch.dtype, dtype: torch.dtype) -> MambaPool:
    shape = layer.options
    spec = MambaSpec.of_shapes(
        (0,), (shape.num_heads, shape.key_dim, shape.value_dim),
        (shape.num_channels, shape.kernel - 1), ssm_dtype=ssm_dtype, conv_dtype=dtype,
    )  # fmt: skip
    pool = MambaPool(spec, 12, DEVICE)
    pool.temporal.copy_(randn(*pool.temporal.shape, seed=2))
    pool.conv.copy_(randn(*pool.conv.shape, seed=3))
    return pool


def batch_of(pool: MambaPool, num_tokens: int, new: list[int] | None, states: StateBatch) -> Any:
    """Tokens of several requests; `new` None: a decode step."""
    nothing: Any = None
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE if new is None else ForwardMode.EXTEND,
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE),
        positions=nothing, req_pool_indices=nothing, seq_lens=nothing,
        seq_lens_cpu=[1] * len(states.slots), out_cache_loc=nothing, req_to_token_pool=nothing,
        token_to_kv_pool=nothing, states=states, extend_seq_lens_cpu=new,
        pools={PoolName.MAMBA: pool},
    )  # fmt: skip
