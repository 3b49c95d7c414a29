"""Kernels of Mamba-2, for few tokens and for many: what the same layers give in torch."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch

from rigs.layers.delta_layers import run_step
from rigs.layers.mamba_layers import mamba2, pool_of
from rigs.models.kernel_layers import DEVICE, HALF, randn, relative_error
from sglang.srt.layers.cuda_kernels import KERNELS
from sglang.srt.layers.forward_batch_info import StateBatch
from sglang.srt.layers.linear_attention.extend_plan import ChunkPlan
from sglang.srt.layers.linear_attention.mamba2 import Mamba2
from sglang.srt.layers.triton_ops.arguments import MOST_TAPS
from sglang.srt.mem_cache.device.state_pool import MambaPool
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=30, suite="base-b-test-1-gpu-large")

WHOLE: dict[str, Any] = {"head_dim": 32, "state_size": 64}
"""Sizes that the kernels for many tokens take."""
HALVES: tuple[torch.dtype, ...] = tuple(dict.fromkeys((HALF, torch.float16)))
"""Dtypes of states of two bytes."""


def ids(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


def run_both(
    layer: Mamba2,
    ssm_dtype: torch.dtype,
    new: list[int] | None,
    slots: list[int],
    first: list[int] | None = None,
    track: tuple[list[int], list[int]] | None = None,
) -> list[tuple[torch.Tensor, MambaPool]]:
    """Outputs and states in torch and by the kernels, the second step for last tokens alone.

    Args:
        track: Slots of snapshots, and the tokens before each.
    """
    dtype = layer.weights.norm.dtype
    count = len(slots) if new is None else sum(new)
    x = randn(count, layer.options.hidden_size, seed=count, dtype=dtype)
    rows = None if new is None else ids(new).cumsum(0) - 1
    found = []
    for kernels in (None, KERNELS):
        pool = pool_of(layer, ssm_dtype, dtype)
        own = copy.copy(layer)
        own._kernels = kernels
        states = StateBatch(slots=ids(slots), first_slots=None if first is None else ids(first))
        if track is not None:
            states.track_slots, states.track_lens_cpu = ids(track[0]), track[1]
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


@pytest.mark.parametrize("changes", [{}, {"num_groups": 1}, {"kernel": 2, "num_groups": 4}])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_decoding_moves_the_states_on(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    layer = mamba2(dtype, DEVICE, **changes)
    bound = 1e-5 if dtype is torch.float32 else 5e-3
    assert_same(run_both(layer, torch.float32, None, [3, 7, 1]), bound)
    for ssm_dtype in HALVES:
        assert_same(run_both(layer, ssm_dtype, None, [3, 7, 1], first=[4, 7, 9]), 5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("tracks", [False, True])
def test_short_prefills_leave_states_and_snapshots(dtype: torch.dtype, tracks: bool) -> None:
    """Shorter and longer than the convolution sees, snapshots in the middle and at the end."""
    layer = mamba2(dtype, DEVICE)
    track = ([10, 0, 11, 12], [5, 0, 2, 1]) if tracks else None
    found = run_both(layer, torch.float32, [9, 1, 2, 3], [3, 7, 1, 2], [4, 7, 9, 2], track)
    assert_same(found, 1e-5 if dtype is torch.float32 else 5e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_groups": 1, "chunk": 128, "kernel": 2},
        {"num_groups": 4, "chunk": 32, "head_dim": 64, "state_size": 128},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("tracks", [False, True])
def test_long_prefills_leave_states_and_snapshots(
    dtype: torch.dtype, changes: dict[str, Any], tracks: bool
) -> None:
    """Computed in chunks, which begin anew after a snapshot; requests of one token among them."""
    layer = mamba2(dtype, DEVICE, **WHOLE | changes)
    track = ([10, 0, 11, 12], [128, 0, 64, 77]) if tracks else None
    found = run_both(layer, torch.float32, [150, 1, 64, 130], [3, 7, 1, 2], [4, 7, 9, 2], track)
    assert_same(found, 1e-5 if dtype is torch.float32 else 5e-3)


@pytest.mark.parametrize("bias", [-20.0, 40.0])
def test_steps_of_nothing_and_decays_to_nothing(bias: float) -> None:
    """Exponents over a whole chunk are far below what fp32 holds; steps beyond exp's range too."""
    layer = mamba2(torch.float32, DEVICE, **WHOLE)
    layer.weights.dt_bias.fill_(bias)
    layer.weights.a_log.fill_(1.0)
    for new in ([270], [40]):
        assert_same(run_both(layer, torch.float32, new, [3]), 1e-4)


@pytest.mark.parametrize("ssm_dtype", HALVES)
@pytest.mark.parametrize("tokens", [7, 300])
def test_what_follows_a_snapshot_is_computed_from_what_is_kept(
    tokens: int, ssm_dtype: torch.dtype
) -> None:
    layer = mamba2(HALF, DEVICE, **WHOLE)
    layer._kernels = KERNELS
    _, _, pool = run_from_snapshot(layer, tokens, ssm_dtype)
    assert torch.equal(pool.temporal[:, 4], pool.temporal[:, 3])
    assert torch.equal(pool.conv[:, 4], pool.conv[:, 3])
    assert not torch.equal(pool.temporal[:, 10], pool.temporal[:, 3])


@pytest.mark.parametrize("ssm_dtype", HALVES)
@pytest.mark.parametrize("tokens", [7, 300])
def test_exact_activations_show_what_a_snapshot_has_lost(
    tokens: int, ssm_dtype: torch.dtype
) -> None:
    """States are kept in half precision, so a state that is not rounded gives other outputs."""
    layer = mamba2(torch.float32, DEVICE, **WHOLE)
    layer._kernels = KERNELS
    whole, rest, _ = run_from_snapshot(layer, tokens, ssm_dtype)
    assert relative_error(rest, whole[4:]) < 1e-5


def run_from_snapshot(
    layer: Mamba2, tokens: int, ssm_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, MambaPool]:
    """Outputs of all tokens, with a snapshot of four in slot 10 and the state in slot 3; those of
    the others from the snapshot, with the state in slot 4."""
    dtype = layer.weights.norm.dtype
    x, pool = randn(tokens, 32, seed=7, dtype=dtype), pool_of(layer, ssm_dtype, dtype)
    slots = ids([[3], [4], [10]])  # type: ignore[list-item]
    tracked = StateBatch(slots=slots[0], track_slots=slots[2], track_lens_cpu=[4])
    whole = run_step(layer, pool, x, [tokens], tracked)
    states = StateBatch(slots=slots[1], first_slots=slots[2])
    return whole, run_step(layer, pool, x[4:], [tokens - 4], states), pool


def test_states_do_not_depend_on_the_cuts_of_a_prefill_at_whole_chunks() -> None:
    """Bit for bit, in every dtype of activations; each part is long enough for chunks."""
    for dtype in (torch.float32, HALF):
        layer = mamba2(dtype, DEVICE, chunk=128, **WHOLE)
        layer._kernels = KERNELS
        x, found = randn(896, 32, seed=9, dtype=dtype), []
        # On a GPU the projection of a part may round otherwise than that of the whole.
        projected = layer.in_proj.forward(x)
        for cuts in ([896], [384, 512], [512, 384]):
            pool = pool_of(layer, torch.float32, dtype)
            parts = mock.Mock(side_effect=torch.split(projected, cuts))
            with mock.patch.object(layer.in_proj, "forward", parts):
                for part in torch.split(x, cuts):
                    run_step(layer, pool, part, [len(part)], StateBatch(slots=ids([3])))
            found.append(pool.temporal[:, 3])
        assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])


def test_wide_convolutions_and_odd_heads_are_left_to_torch() -> None:
    assert mamba2(HALF, DEVICE, kernel=MOST_TAPS + 1)._kernels is None
    assert not mamba2(HALF, DEVICE)._layout.takes_chunks
    assert mamba2(HALF, DEVICE, **WHOLE)._layout.takes_chunks


@pytest.mark.parametrize("track_lens", [None, [64, 0]])
def test_padded_chunks_change_nothing(track_lens: list[int] | None) -> None:
    """As in a captured prefill, which has room for more tokens, requests and chunks."""
    layer = mamba2(torch.float32, DEVICE, chunk=32, **WHOLE)
    layer._kernels = KERNELS
    x, found = randn(200, 32, seed=9), []
    for padded in (None, (4, 9)):
        pool, nobody = pool_of(layer, torch.float32, torch.float32), [0] * (2 * bool(padded))
        slots, first, targets = (ids([*own, *nobody]) for own in ([3, 7], [4, 7], [10, 11]))
        plan = ChunkPlan.of([130, 20], track_lens, DEVICE, 32, padded)
        states = StateBatch(slots=slots, first_slots=first, track_slots=targets, plan=plan)
        own = x if padded else x[:150]
        found.append((run_step(layer, pool, own, [130, 20], states), pool))
    (want, want_pool), (got, pool) = found
    assert relative_error(got[:150], want) < 1e-6
    assert not got[150:].any(), "padding spreads no stale memory"
    for buffer, wanted in zip(pool.buffers, want_pool.buffers, strict=True):
        assert relative_error(buffer[:, 1:], wanted[:, 1:]) < 1e-6
