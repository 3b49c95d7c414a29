"""Kernels of verification and commit: what the same layers give in torch, and bit for bit the same
states whatever is rejected."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from rigs.layers.delta_layers import (
    buffers_of,
    copied,
    decode_all,
    pool_of,
    verify,
)
from rigs.models.kernel_layers import DEVICE, HALF, delta_net, randn, relative_error
from sglang.srt.layers.cuda_kernels import KERNELS
from sglang.srt.layers.linear_attention import delta_layer
from sglang.srt.layers.linear_attention import verify as verify_module
from sglang.srt.layers.linear_attention.verify import commit_verified
from sglang.srt.layers.triton_ops import verified_delta_net
from sglang.srt.mem_cache.device.state_pool import MambaPool
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=20, suite="base-b-test-1-gpu-large")

SLOTS = torch.tensor([3, 7, 1, 0], device=DEVICE)
"""Three requests and a padding row."""


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


def commit_all(
    layer: Any, x: torch.Tensor, ssm_dtype: torch.dtype, patch: pytest.MonkeyPatch, kernels: Any
) -> tuple[torch.Tensor, MambaPool]:
    """Outputs of a verification, and the pool after both commits of a step; `kernels` None: in
    torch."""
    own = copy.copy(layer)
    own._kernels = kernels
    patch.setattr(verify_module, "fused_kernels", lambda device: kernels)
    pool = pool_of(layer, ssm_dtype, x.dtype)
    buffers, before = buffers_of(pool, x), copied(pool)
    out = verify(own, pool, x, SLOTS, buffers)
    assert torch.equal(pool.temporal, before.temporal)
    assert torch.equal(pool.conv, before.conv)
    commit_verified(buffers, pool, SLOTS, ids(0, 2, 1, 0), ids(10, 11, 0, 0))
    # Padding rows all write to slot 0 in torch, in any order.
    first = 1 if kernels is None else 0
    found, kept = pool.temporal[:, first:10], before.temporal[:, first:10]
    assert torch.equal(found, kept), "padding is left out"
    commit_verified(buffers, pool, SLOTS, ids(3, 2, 0, 1), SLOTS)
    assert torch.equal(pool.temporal[:, 1], before.temporal[:, 1])
    return out[:3], pool


@pytest.mark.parametrize(
    ("changes", "ssm_dtype"),
    [
        ({}, torch.float32),
        ({"is_grouped": False, "num_key_heads": 2, "num_heads": 4, "value_dim": 40}, HALF),
        ({"kernel": 2}, torch.float32),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_outputs_and_states_are_those_of_torch(
    changes: dict[str, Any],
    ssm_dtype: torch.dtype,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = delta_net(dtype, **changes)
    x = randn(4, 3, 32, seed=11, dtype=dtype)
    want, want_pool = commit_all(layer, x, ssm_dtype, monkeypatch, None)
    got, pool = commit_all(layer, x, ssm_dtype, monkeypatch, KERNELS)
    bound = 1e-5 if dtype is ssm_dtype is torch.float32 else 5e-3
    assert relative_error(got, want) < bound
    assert relative_error(pool.temporal[:, 1:], want_pool.temporal[:, 1:]) < bound
    assert relative_error(pool.conv[:, 1:], want_pool.conv[:, 1:]) < 1e-6
    for buffer in pool.buffers:
        assert torch.equal(buffer[:, 7], buffer[:, 11]), "the snapshot of as many tokens"


def test_what_is_rejected_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = delta_net(HALF)
    x = randn(4, 3, 32, seed=12, dtype=HALF)
    others = x.clone()
    others[1, 2:], others[2, 1:] = float("nan"), float("nan")
    _, want = commit_all(layer, x, torch.float32, monkeypatch, KERNELS)
    _, got = commit_all(layer, others, torch.float32, monkeypatch, KERNELS)
    assert torch.equal(got.temporal, want.temporal)
    assert torch.equal(got.conv, want.conv)


def test_kernels_of_decode_steps_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a verification of more tokens than a short prefill has is computed token by token."""
    layer = delta_net(torch.float32)
    layer._kernels = KERNELS
    monkeypatch.setattr(delta_layer, "SHORT", 1)
    monkeypatch.setattr(layer, "_rule", None)
    monkeypatch.setattr(verify_module, "fused_kernels", lambda device: KERNELS)
    pool = pool_of(layer, HALF, torch.float32)
    x, slots, steps = randn(2, 3, 32, seed=13), ids(3, 7), copied(pool)
    buffers = buffers_of(pool, x)
    out = verify(layer, pool, x, slots, buffers)
    commit_verified(buffers, pool, slots, ids(3, 3), slots)
    assert relative_error(out, decode_all(layer, steps, x, slots)) < 1e-5
    assert relative_error(pool.temporal, steps.temporal) < 1e-4
    assert relative_error(pool.conv, steps.conv) < 1e-5


@pytest.mark.parametrize("programs", [1, 4, 100])
def test_programs_have_one_layer_or_several(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers, two and the one that is left, or one."""
    monkeypatch.setattr(verified_delta_net, "_PROGRAMS", programs)
    pool = pool_of(delta_net(torch.float32), torch.float32, torch.float32, layers=(0, 1, 2))
    want, buffers = copied(pool), buffers_of(pool, randn(1, 2, 32, seed=14))
    for nth, tensor in enumerate(buffers.inputs):
        tensor.copy_(randn(*tensor.shape, seed=15 + nth))
    buffers.inputs.g.abs_().neg_()
    for kernels, states in ((None, want), (KERNELS, pool)):
        monkeypatch.setattr(verify_module, "fused_kernels", lambda device, found=kernels: found)
        commit_verified(buffers, states, ids(3), ids(2), ids(8))
    assert relative_error(pool.temporal, want.temporal) < 1e-6
    assert torch.equal(pool.conv, want.conv)
