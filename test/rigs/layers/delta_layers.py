"""Delta-net layers with random weights, pools of their states, and their steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang.srt.layers.forward_batch_info import ForwardBatch, ForwardMode, StateBatch
from sglang.srt.layers.linear_attention.delta_layer import DeltaLayer, DeltaNetOptions
from sglang.srt.layers.linear_attention.delta_net import GatedDeltaNet
from sglang.srt.layers.linear_attention.kda import KimiDeltaAttention
from sglang.srt.layers.linear_attention.verify import VerifyBuffers
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.radix_attention import LayerStep
from sglang.srt.mem_cache.device.state_pool import MambaPool, MambaSpec
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.srt.models.llama import SelfAttention

POOL_SLOTS = 12
"""Slots of `pool_of`, besides padding."""


def fill(module: torch.nn.Module, seed: int) -> None:
    """Small random weights, the same on every device."""
    numbers = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=numbers) * 0.2)


def poison_new_memory(patch: pytest.MonkeyPatch) -> None:
    """Let new tensors of floats be NaN: on a GPU they have old values."""

    def poisoned(make: Any) -> Any:
        def made(*arguments: Any, **options: Any) -> torch.Tensor:
            found: torch.Tensor = make(*arguments, **options)
            return found.fill_(torch.nan) if found.is_floating_point() else found

        return made

    for owner, name in ((torch, "empty"), (torch.Tensor, "new_empty")):
        patch.setattr(owner, name, poisoned(getattr(owner, name)))


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def delta_net(dtype: torch.dtype, device: str, layer_id: int = 0, **changes: Any) -> GatedDeltaNet:
    shape: dict[str, Any] = {
        "hidden_size": 32, "num_key_heads": 1, "num_heads": 2, "key_dim": 16, "value_dim": 24,
        "kernel": 4, "eps": 1e-6, "is_grouped": True,
    }  # fmt: skip
    options = DeltaNetOptions(**shape | changes)
    layer = GatedDeltaNet(options, TensorPlacement(dtype=dtype, device=device), layer_id)
    fill(layer, 1 + layer_id)
    return layer


def kda(
    dtype: torch.dtype,
    device: str,
    layer_id: int = 0,
    *,
    decay_bound: float | None = None,
    **changes: Any,
) -> KimiDeltaAttention:
    """A layer of `num_heads` heads, whose keys and values have `key_dim` elements."""
    shape: dict[str, Any] = {
        "hidden_size": 32, "num_heads": 2, "key_dim": 16, "kernel": 4, "eps": 1e-6,
        "is_grouped": False,
    } | changes  # fmt: skip
    shape |= {"num_key_heads": shape["num_heads"], "value_dim": shape["key_dim"]}
    placement = TensorPlacement(dtype=dtype, device=device)
    options = DeltaNetOptions(**shape)
    layer = KimiDeltaAttention(options, placement, layer_id, decay_bound=decay_bound)
    fill(layer, 1 + layer_id)
    return layer


def pool_of(
    layer: DeltaLayer, ssm_dtype: torch.dtype, dtype: torch.dtype, layers: tuple[int, ...] = (0,)
) -> MambaPool:
    """A pool of random states, on the layer's device."""
    shape = layer.options
    spec = MambaSpec.of_shapes(
        layers, (shape.num_heads, shape.key_dim, shape.value_dim),
        (shape.num_channels, shape.kernel - 1), ssm_dtype=ssm_dtype, conv_dtype=dtype,
    )  # fmt: skip
    pool = MambaPool(spec, POOL_SLOTS, layer.gates.conv.device)
    pool.temporal.copy_(normal(*pool.temporal.shape, seed=2))
    pool.conv.copy_(normal(*pool.conv.shape, seed=3))
    return pool


def copied(pool: MambaPool) -> MambaPool:
    """A pool with the same states."""
    copy = MambaPool(pool.spec, pool.size, pool.device)
    for buffer, states in zip(copy.buffers, pool.buffers, strict=True):
        buffer.copy_(states)
    return copy


def batch_of(pool: MambaPool, num_tokens: int, new: list[int] | None, states: StateBatch) -> Any:
    """Tokens of several requests; `new` None: a decode step."""
    nothing: Any = None
    mode = ForwardMode.DECODE if new is None else ForwardMode.EXTEND
    return ForwardBatch(
        forward_mode=mode if states.verify is None else ForwardMode.TARGET_VERIFY,
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=pool.device),
        positions=nothing, req_pool_indices=nothing, seq_lens=nothing,
        seq_lens_cpu=[1] * len(states.slots), out_cache_loc=nothing, req_to_token_pool=nothing,
        token_to_kv_pool=nothing, states=states, extend_seq_lens_cpu=new,
        pools={PoolName.MAMBA: pool},
    )  # fmt: skip


def run_step(
    layer: SelfAttention,
    pool: MambaPool,
    x: torch.Tensor,
    new: list[int] | None,
    states: StateBatch,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The layer's output for a batch (`batch_of`)."""
    nothing: Any = None
    batch = batch_of(pool, len(x), new, states)
    out, residual = layer.forward(x, torch.zeros_like(x), LayerStep(nothing, batch, rows))
    if out is None:
        return residual
    assert isinstance(out, torch.Tensor)
    return out


def decode_all(
    layer: GatedDeltaNet, pool: MambaPool, x: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Outputs `[bs, num_tokens, hidden_size]` of decode steps, likewise `x`."""
    steps = x.unbind(1)
    outs = [run_step(layer, pool, step, None, StateBatch(slots=slots)) for step in steps]
    return torch.stack(outs, dim=1)


def verify(
    layer: GatedDeltaNet,
    pool: MambaPool,
    x: torch.Tensor,
    slots: torch.Tensor,
    buffers: VerifyBuffers,
) -> torch.Tensor:
    """Outputs of a verification, shaped as in `decode_all`."""
    states = StateBatch(slots=slots, verify=buffers)
    bs, each, _ = x.shape
    return run_step(layer, pool, x.flatten(0, 1), [each] * bs, states).view_as(x)


def buffers_of(pool: MambaPool, x: torch.Tensor, spare: int = 1) -> VerifyBuffers:
    """Buffers for `verify` and `spare` requests more, filled with NaN."""
    spec = pool.spec
    assert isinstance(spec, MambaSpec)
    bs, each, _ = x.shape
    buffers = VerifyBuffers.of(
        spec, max_batch_size=bs + spare, num_draft_tokens=each, device=pool.device
    )
    for tensor in buffers.inputs:
        tensor.fill_(float("nan"))
    return buffers
