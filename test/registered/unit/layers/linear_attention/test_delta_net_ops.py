"""Kernels of linear attention, for few tokens and for many: what the same layers give in torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rigs.layers.delta_layers import batch_of, poison_new_memory, pool_of, run_step
from rigs.models.kernel_layers import DEVICE, HALF, delta_net, kda, randn, relative_error
from sglang.srt.layers.cuda_kernels import KERNELS
from sglang.srt.layers.forward_batch_info import StateBatch
from sglang.srt.layers.linear_attention.delta_layer import DeltaLayer
from sglang.srt.layers.linear_attention.delta_net import GatedDeltaNet
from sglang.srt.layers.linear_attention.extend_plan import ChunkPlan, ShortPlan
from sglang.srt.layers.triton_ops.arguments import MOST_TAPS, KdaProjected
from sglang.srt.mem_cache.device.state_pool import MambaPool
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=60, suite="base-b-test-1-gpu-large")


Make = Callable[..., DeltaLayer]
WHOLE: dict[str, Any] = {"key_dim": 64, "value_dim": 128}
"""Heads that the kernels for many tokens take."""
BOUNDED: dict[str, Any] = {"decay_bound": -5.0}
"""The decay of GLM-5.3-Flash."""


def on_device(values: list[int] | None) -> torch.Tensor | None:
    return None if values is None else torch.tensor(values, device=DEVICE)


def run_both(
    layer: DeltaLayer,
    ssm_dtype: torch.dtype,
    new: list[int] | None,
    slots: list[int],
    first: list[int] | None = None,
    track: dict[str, list[int]] | None = None,
) -> list[tuple[torch.Tensor, MambaPool]]:
    """Outputs and states in torch and by the kernels, the second step for last tokens alone."""
    dtype = layer.norm.weight.dtype
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


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (delta_net, {}),
        (delta_net, {"is_grouped": False}),
        (delta_net, {"kernel": 2}),
        (kda, {}),
        (kda, {"kernel": 2, "key_dim": 24}),
        (kda, BOUNDED),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_decoding_moves_the_states_on(
    dtype: torch.dtype, make: Make, changes: dict[str, Any]
) -> None:
    layer = make(dtype, **changes)
    bound = 1e-5 if dtype is torch.float32 else 5e-3
    assert_same(run_both(layer, torch.float32, None, [3, 7, 1]), bound)
    assert_same(run_both(layer, HALF, None, [3, 7, 1], first=[4, 7, 9]), 5e-3)


@pytest.mark.parametrize(
    ("make", "changes"),
    [(delta_net, {}), (delta_net, {"is_grouped": False}), (kda, {}), (kda, BOUNDED)],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("tracks", [False, True])
def test_short_prefills_leave_states_and_snapshots(
    dtype: torch.dtype, make: Make, changes: dict[str, Any], tracks: bool
) -> None:
    """Shorter and longer than the convolution sees, snapshots in the middle and at the end."""
    layer = make(dtype, **changes)
    track = {"slots": [10, 0, 11, 12], "lens": [5, 0, 2, 1]} if tracks else None
    found = run_both(layer, torch.float32, [9, 1, 2, 3], [3, 7, 1, 2], [4, 7, 9, 2], track)
    assert_same(found, 1e-5 if dtype is torch.float32 else 5e-3)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (delta_net, {}),
        (delta_net, {"is_grouped": False, "num_key_heads": 2, "num_heads": 4}),
        (delta_net, {"kernel": 2, "value_dim": 64}),
        (kda, {}),
        (kda, {"kernel": 2, "key_dim": 128, "num_heads": 1}),
        (kda, BOUNDED),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("tracks", [False, True])
def test_long_prefills_leave_states_and_snapshots(
    dtype: torch.dtype, make: Make, changes: dict[str, Any], tracks: bool
) -> None:
    """Computed in chunks, which begin anew after a snapshot; requests of one token among them."""
    layer = make(dtype, **WHOLE | changes)
    track = {"slots": [10, 0, 11, 12], "lens": [128, 0, 64, 77]} if tracks else None
    found = run_both(layer, torch.float32, [150, 1, 64, 130], [3, 7, 1, 2], [4, 7, 9, 2], track)
    assert_same(found, 1e-5 if dtype is torch.float32 else 5e-3)


@pytest.mark.parametrize("make", [delta_net, kda])
def test_padding_after_short_prefills_is_zero(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old values in memory would spread to later layers."""
    layer = make(torch.float32)
    layer._kernels = KERNELS
    pool = pool_of(layer, torch.float32, torch.float32)
    slots = on_device([3, 7])
    assert slots is not None
    batch = batch_of(pool, 16, [9, 2], StateBatch(slots=slots))
    poison_new_memory(monkeypatch)
    out = layer._attend_fused(randn(16, 32, seed=9), batch)
    assert out[:11].isfinite().all() and out[:11].any(dim=-1).all()
    assert not out[11:].any()


@pytest.mark.parametrize(
    ("make", "strength"), [(delta_net, 0.0), (delta_net, 4.0), (kda, 0.0), (kda, 3.0), (kda, 5.0)]
)
def test_keys_that_repeat_are_corrected_exactly(make: Make, strength: float) -> None:
    """The same token again and again: systems of ones, whose inverse must not be a long series.
    Without decay, with some, and with so much that nothing is left after a token."""
    layer = make(torch.float32, num_heads=1, **WHOLE)
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


def test_channels_decay_at_rates_far_apart() -> None:
    """In a chunk some channels lose all, others nothing; one after the other in strength, so that a
    part's decays would overflow if they were taken apart at another place."""
    layer = kda(torch.float32, num_heads=1, **WHOLE)
    channels = len(layer.gates.dt_bias)
    layer.gates.a_log.fill_(0.0)
    layer.gates.dt_bias.copy_(torch.linspace(-12.0, 90.0, channels))
    assert_same(run_both(layer, torch.float32, [150, 1, 64, 130], [3, 7, 1, 2]), 1e-5)


@pytest.mark.parametrize("make", [delta_net, kda])
def test_states_do_not_depend_on_how_a_prompt_is_cut(make: Make) -> None:
    """A prefill of 640 tokens with a snapshot, and one in two parts beside another request."""
    layer = make(HALF, num_heads=1, **WHOLE)
    layer._kernels = KERNELS
    x, pool = randn(640, 32, seed=7, dtype=HALF), pool_of(layer, torch.float32, HALF)
    slots = torch.tensor([3, 9, 10, 4, 1], device=DEVICE)
    tracked = StateBatch(
        slots=slots[:1], first_slots=slots[1:2], track_slots=slots[2:3], track_lens_cpu=[320]
    )
    run_step(layer, pool, x, [640], tracked)
    others = randn(65, 32, seed=8, dtype=HALF)
    first = torch.stack([slots[4], slots[1]])
    beside = StateBatch(slots=torch.stack([slots[4], slots[3]]), first_slots=first)
    run_step(layer, pool, torch.cat([others, x[:320]]), [65, 320], beside)
    for states in pool.buffers:
        assert torch.equal(states[:, 4], states[:, 10])
    run_step(layer, pool, x[320:], [320], StateBatch(slots=slots[3:4]))
    for states in pool.buffers:
        assert torch.equal(states[:, 4], states[:, 3])


@pytest.mark.parametrize("make", [delta_net, kda])
@pytest.mark.parametrize("tokens", [7, 300])
def test_what_follows_a_snapshot_is_computed_from_what_is_kept(make: Make, tokens: int) -> None:
    layer = make(HALF, **WHOLE)
    layer._kernels = KERNELS
    _, _, pool = run_from_snapshot(layer, tokens)
    assert torch.equal(pool.temporal[:, 4], pool.temporal[:, 3])
    assert torch.equal(pool.conv[:, 4], pool.conv[:, 3])
    assert not torch.equal(pool.temporal[:, 10], pool.temporal[:, 3])


@pytest.mark.parametrize("make", [delta_net, kda])
@pytest.mark.parametrize("tokens", [7, 300])
def test_exact_activations_show_what_a_snapshot_has_lost(make: Make, tokens: int) -> None:
    """States are kept in half precision, so a state that is not rounded gives other outputs."""
    layer = make(torch.float32, **WHOLE)
    layer._kernels = KERNELS
    whole, rest, _ = run_from_snapshot(layer, tokens)
    assert relative_error(rest, whole[4:]) < 1e-5


def run_from_snapshot(
    layer: DeltaLayer, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, MambaPool]:
    """Outputs of all tokens, with a snapshot of four in slot 10 and the state in slot 3; those of
    the others from the snapshot, with the state in slot 4."""
    dtype = layer.norm.weight.dtype
    x, pool = randn(tokens, 32, seed=7, dtype=dtype), pool_of(layer, HALF, dtype)
    slots = torch.tensor([[3], [4], [10]], device=DEVICE)
    tracked = StateBatch(slots=slots[0], track_slots=slots[2], track_lens_cpu=[4])
    whole = run_step(layer, pool, x, [tokens], tracked)
    states = StateBatch(slots=slots[1], first_slots=slots[2])
    return whole, run_step(layer, pool, x[4:], [tokens - 4], states), pool


REMAINDERS = range(1, 65) if DEVICE == "cuda" else (1, 15, 40, 63, 64)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("make", "changes"), [(delta_net, {}), (kda, {}), (kda, BOUNDED)])
def test_padding_of_chunks_changes_no_bit(
    dtype: torch.dtype, make: Make, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured prefills have room for more tokens, requests and chunks than a step has."""
    poison_new_memory(monkeypatch)
    layer = make(dtype, num_heads=1, **WHOLE | changes)
    layer._kernels = KERNELS
    x = randn(256, 32, seed=9, dtype=dtype)
    keep_projections(layer, x, monkeypatch)
    # New tokens, tokens before snapshots, room for tokens and for requests.
    cases = [([last], [last // 2], 64, 1) for last in REMAINDERS]
    cases += [([70], [64], 128, 1), ([130, 20], [64, 0], 256, 4), ([64, 9, 1], [63, 9, 0], 128, 3)]
    for new, track, room, requests in cases:
        found, count = [], sum(new)
        for rows, padded in ((count, None), (room, (requests, room // 64 + 2 * requests))):
            nobody = [0] * (requests - len(new)) if padded else []
            slots, first, targets = (
                torch.tensor([*own[: len(new)], *nobody], device=DEVICE)
                for own in ([3, 7, 1], [4, 7, 2], [10, 11, 12])
            )
            plan = ChunkPlan.of(new, track, DEVICE, padded=padded)
            states = StateBatch(slots=slots, first_slots=first, track_slots=targets, plan=plan)
            pool = pool_of(layer, torch.float32, dtype)
            out = layer._attend_fused(x[:rows], batch_of(pool, rows, new, states))
            found.append((out, pool))
        (want, want_pool), (got, pool) = found
        assert want.isfinite().all() and want.any(dim=-1).all()
        assert torch.equal(got[:count], want), new
        assert not got[count:].any(), new
        for buffer, wanted in zip(pool.buffers, want_pool.buffers, strict=True):
            assert buffer.isfinite().all()
            assert torch.equal(buffer[:, 1:], wanted[:, 1:]), new


def keep_projections(layer: DeltaLayer, x: torch.Tensor, patch: pytest.MonkeyPatch) -> None:
    """Let steps of the first rows of `x` find those of its projections: a product of fewer rows
    may have other bits."""
    projections: Any = layer.in_proj
    if isinstance(layer, GatedDeltaNet):
        columns = projections.columns(x)
        patch.setattr(projections, "columns", lambda own: columns[: len(own)])
        return
    parts = projections.all(x)
    own_parts = lambda own: KdaProjected(*(part[: len(own)] for part in parts))  # noqa: E731
    patch.setattr(projections, "all", own_parts)


def test_odd_heads_are_computed_token_by_token_in_steps_of_chunks() -> None:
    """Heads that no kernel for many tokens takes."""
    layer, found = delta_net(torch.float32), []
    layer._kernels = KERNELS
    x = randn(64, 32, seed=9)
    for plan in (ShortPlan.of([40], [16], DEVICE), ChunkPlan.of([40], [16], DEVICE, padded=(1, 3))):
        pool = pool_of(layer, torch.float32, torch.float32)
        slots, targets = torch.tensor([[3], [10]], device=DEVICE)
        states = StateBatch(slots=slots, track_slots=targets, plan=plan)
        found.append((run_step(layer, pool, x, [40], states), pool))
    (want, want_pool), (got, pool) = found
    assert torch.equal(got, want) and got[:40].any(dim=-1).all()
    for buffer, wanted in zip(pool.buffers, want_pool.buffers, strict=True):
        assert torch.equal(buffer, wanted)


def test_wide_convolutions_and_odd_heads_are_left_to_torch() -> None:
    assert delta_net(HALF, kernel=MOST_TAPS + 1)._kernels is None
    assert not delta_net(HALF)._takes_chunks
    assert delta_net(HALF, **WHOLE)._takes_chunks
