"""Kernels of linear attention, for few tokens and for many: what the same layers give in torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from rigs.layers.delta_layers import pool_of, run_step
from rigs.models.kernel_layers import DEVICE, HALF, delta_net, randn, relative_error
from sglang.srt.layers.cuda_kernels import KERNELS
from sglang.srt.layers.forward_batch_info import StateBatch
from sglang.srt.layers.linear_attention.delta_net import GatedDeltaNet
from sglang.srt.layers.triton_ops.arguments import MOST_TAPS
from sglang.srt.mem_cache.device.state_pool import MambaPool
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=30, suite="base-b-test-1-gpu-large")


WHOLE: dict[str, Any] = {"key_dim": 64, "value_dim": 128}
"""Heads that the kernels for many tokens take."""


def on_device(values: list[int] | None) -> torch.Tensor | None:
    return None if values is None else torch.tensor(values, device=DEVICE)


def run_both(
    layer: GatedDeltaNet,
    ssm_dtype: torch.dtype,
    new: list[int] | None,
    slots: list[int],
    first: list[int] | None = None,
    track: dict[str, list[int]] | None = None,
) -> list[tuple[torch.Tensor, MambaPool]]:
    """Outputs and states in torch and by the kernels, the second step for last tokens alone."""
    dtype = next(layer.in_proj.parameters()).dtype
    count = len(slots) if new is None else sum(new)
    x = randn(count, layer.options.hidden_size, seed=count, dtype=dtype)
    rows = None if new is None else torch.tensor(new, device=DEVICE).cumsum(0) - 1
    found = []
    for kernels in (None, KERNELS):
        pool = pool_of(layer, ssm_dtype, dtype)
        own = copy.copy(layer)
        own._kernels = kernels
        written = on_device(slots)
        assert written is not None
        states = StateBatch(slots=written, first_slots=on_device(first))
        if track is not None:
            states.track_slots = on_device(track["slots"])
            states.track_lens_cpu = track["lens"]
        out = run_step(own, pool, x, new, states)
        last = run_step(own, pool, x, new, states, rows)
        assert rows is None or len(last) == len(rows)
        found.append((torch.cat([out, last]), pool))
    return found


def assert_same(found: list[tuple[torch.Tensor, MambaPool]], bound: float) -> None:
    (want, want_pool), (got, pool) = found
    assert relative_error(got, want) < bound
    assert relative_error(pool.temporal, want_pool.temporal) < bound
    assert relative_error(pool.conv, want_pool.conv) < bound
    untouched = (want_pool.conv == pool.conv).flatten(2).all(dim=-1)[0]
    assert untouched.sum() >= 6, "others' slots are as they were"


@pytest.mark.parametrize("changes", [{}, {"is_grouped": False}, {"kernel": 2}])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_decoding_moves_the_states_on(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    layer = delta_net(dtype, **changes)
    bound = 1e-5 if dtype is torch.float32 else 5e-3
    assert_same(run_both(layer, torch.float32, None, [3, 7, 1]), bound)
    assert_same(run_both(layer, HALF, None, [3, 7, 1], first=[4, 7, 9]), 5e-3)


@pytest.mark.parametrize("changes", [{}, {"is_grouped": False}])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("tracks", [False, True])
def test_short_prefills_leave_states_and_snapshots(
    dtype: torch.dtype, changes: dict[str, Any], tracks: bool
) -> None:
    """Shorter and longer than the convolution sees, snapshots in the middle and at the end."""
    layer = delta_net(dtype, **changes)
    track = {"slots": [10, 0, 11, 12], "lens": [5, 0, 2, 1]} if tracks else None
    found = run_both(layer, torch.float32, [9, 1, 2, 3], [3, 7, 1, 2], [4, 7, 9, 2], track)
    assert_same(found, 1e-5 if dtype is torch.float32 else 5e-3)


@pytest.mark.parametrize(
    "changes",
    [{}, {"is_grouped": False, "num_key_heads": 2, "num_heads": 4}, {"kernel": 2, "value_dim": 64}],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("tracks", [False, True])
def test_long_prefills_leave_states_and_snapshots(
    dtype: torch.dtype, changes: dict[str, Any], tracks: bool
) -> None:
    """Computed in chunks, which begin anew after a snapshot; requests of one token among them."""
    layer = delta_net(dtype, **WHOLE | changes)
    track = {"slots": [10, 0, 11, 12], "lens": [128, 0, 64, 77]} if tracks else None
    found = run_both(layer, torch.float32, [150, 1, 64, 130], [3, 7, 1, 2], [4, 7, 9, 2], track)
    assert_same(found, 1e-5 if dtype is torch.float32 else 5e-3)


@pytest.mark.parametrize("strength", [0.0, 4.0])
def test_keys_that_repeat_are_corrected_exactly(strength: float) -> None:
    """The same token again and again: systems of ones, whose inverse must not be a long series."""
    layer = delta_net(torch.float32, num_heads=1, **WHOLE)
    layer.gates.a_log.fill_(-20.0 + 5 * strength)
    found = []
    for kernels in (None, KERNELS):
        own, pool = copy.copy(layer), pool_of(layer, torch.float32, torch.float32)
        own._kernels = kernels
        slots = on_device([3])
        assert slots is not None
        x = randn(1, 32, seed=5).expand(300, 32).contiguous()
        found.append((run_step(own, pool, x, [300], StateBatch(slots=slots)), pool))
    assert_same(found, 1e-4)


@pytest.mark.parametrize("tokens", [7, 300])
def test_what_follows_a_snapshot_is_computed_from_what_is_kept(tokens: int) -> None:
    layer = delta_net(HALF, **WHOLE)
    layer._kernels = KERNELS
    _, _, pool = run_from_snapshot(layer, tokens)
    assert torch.equal(pool.temporal[:, 4], pool.temporal[:, 3])
    assert torch.equal(pool.conv[:, 4], pool.conv[:, 3])
    assert not torch.equal(pool.temporal[:, 10], pool.temporal[:, 3])


@pytest.mark.parametrize("tokens", [7, 300])
def test_exact_activations_show_what_a_snapshot_has_lost(tokens: int) -> None:
    """States are kept in half precision, so a state that is not rounded gives other outputs."""
    layer = delta_net(torch.float32, **WHOLE)
    layer._kernels = KERNELS
    whole, rest, _ = run_from_snapshot(layer, tokens)
    assert relative_error(rest, whole[4:]) < 1e-5


def run_from_snapshot(
    layer: GatedDeltaNet, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, MambaPool]:
    """Outputs of all tokens, with a snapshot of four in slot 10 and the state in slot 3; those of
    the others from the snapshot, with the state in slot 4."""
    dtype = next(layer.in_proj.parameters()).dtype
    x, pool = randn(tokens, 32, seed=7, dtype=dtype), pool_of(layer, HALF, dtype)
    slots = torch.tensor([[3], [4], [10]], device=DEVICE)
    tracked = StateBatch(slots=slots[0], track_slots=slots[2], track_lens_cpu=[4])
    whole = run_step(layer, pool, x, [tokens], tracked)
    states = StateBatch(slots=slots[1], first_slots=slots[2])
    return whole, run_step(layer, pool, x[4:], [tokens - 4], states), pool


def test_wide_convolutions_and_odd_heads_are_left_to_torch() -> None:
    assert delta_net(HALF, kernel=MOST_TAPS + 1)._kernels is None
    assert not delta_net(HALF)._takes_chunks
    assert delta_net(HALF, **WHOLE)._takes_chunks
