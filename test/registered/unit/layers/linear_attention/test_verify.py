"""Verification of drafts by delta-net layers. Its outputs equal those of decode steps, and it
changes no state. A commit then advances the states by the accepted tokens alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rigs.layers.delta_layers import (
    buffers_of,
    copied,
    decode_all,
    delta_net,
    normal,
    pool_of,
    run_step,
    verify,
)
from sglang.srt.layers.forward_batch_info import StateBatch
from sglang.srt.layers.linear_attention.verify import VerifyBuffers, commit_verified
from sglang.srt.mem_cache.device.state_pool import MambaPool, MambaSpec
from sglang.srt.speculative.eagle_worker import verification_bytes
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"is_grouped": False, "num_key_heads": 2, "num_heads": 4},
    {"kernel": 2},
    {"is_grouped": False, "kernel": 6},
)
"""Layers of Qwen3-Next's form and of Qwen3.5's; convolutions shorter and longer than a batch."""


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def assert_same_states(got: MambaPool, want: MambaPool, slots: torch.Tensor) -> None:
    """Bit for bit."""
    assert torch.equal(got.temporal[:, slots], want.temporal[:, slots])
    assert torch.equal(got.conv[:, slots], want.conv[:, slots])


@pytest.mark.parametrize("changes", SHAPES)
@pytest.mark.parametrize("each", [1, 4, 9])
def test_outputs_are_those_of_decode_steps(changes: dict[str, Any], each: int) -> None:
    layer = delta_net(torch.float32, "cpu", **changes)
    pool = pool_of(layer, torch.float32, torch.float32)
    x, slots, before = normal(3, each, 32, seed=4), torch.tensor([3, 7, 1]), copied(pool)
    out = verify(layer, pool, x, slots, buffers_of(pool, x))
    assert_same_states(pool, before, torch.arange(13))
    close(out, decode_all(layer, pool, x, slots))


@pytest.mark.parametrize("changes", SHAPES)
@pytest.mark.parametrize("ssm_dtype", [torch.float32, torch.bfloat16])
def test_every_count_in_one_batch(changes: dict[str, Any], ssm_dtype: torch.dtype) -> None:
    """Request `i` has accepted `i` tokens."""
    each, slots, counts = 5, torch.tensor([3, 7, 1, 2, 8, 12]), torch.arange(6)
    layer = delta_net(torch.float32, "cpu", **changes)
    pool = pool_of(layer, ssm_dtype, torch.float32)
    x, steps = normal(6, each, 32, seed=5), copied(pool)
    before, buffers = copied(pool), buffers_of(pool, x)
    verify(layer, pool, x, slots, buffers)
    commit_verified(buffers, pool, slots, counts, slots)
    bound = 1e-5 if ssm_dtype is torch.float32 else 2e-2
    for request, slot in enumerate(slots.tolist()):
        own = slice(request, request + 1)
        if request:
            decode_all(layer, steps, x[own, :request], slots[own])
        for got, want in zip(pool.buffers, steps.buffers, strict=True):
            torch.testing.assert_close(got[:, slot], want[:, slot], rtol=bound, atol=bound)
    assert_same_states(pool, before, slots[:1])
    others = torch.tensor([4, 5, 6, 9, 10, 11])
    assert_same_states(pool, before, others)


def test_the_next_step_continues_from_what_is_accepted() -> None:
    """A verification of rounded states, a commit, and a verification of the rest, against one
    verification of all: how tokens fall into steps makes no difference."""
    layer = delta_net(torch.float32, "cpu")
    pool = pool_of(layer, torch.bfloat16, torch.float32)
    x, slots, whole = normal(2, 8, 32, seed=6), torch.tensor([3, 7]), copied(pool)
    want = verify(layer, whole, x, slots, buffers_of(whole, x))
    outs, done = [], 0
    for count in (2, 4, 1, 1):
        part = torch.cat([x[:, done:], x], dim=1)[:, :4].contiguous()
        buffers = buffers_of(pool, part)
        outs.append(verify(layer, pool, part, slots, buffers)[:, :count])
        commit_verified(buffers, pool, slots, torch.tensor([count, count]), slots)
        done += count
    close(torch.cat(outs, dim=1), want)


@pytest.mark.parametrize("rejected", [1.0, float("nan")])
def test_rejected_tokens_leave_no_trace(rejected: float) -> None:
    layer = delta_net(torch.float32, "cpu")
    x, slots, counts = normal(3, 4, 32, seed=7), torch.tensor([3, 7, 1]), torch.tensor([2, 0, 4])
    others = x.clone()
    others[0, 2:], others[1] = rejected, rejected
    pools = []
    for tokens in (x, others):
        pool = pool_of(layer, torch.float32, torch.float32)
        buffers = buffers_of(pool, tokens)
        verify(layer, pool, tokens, slots, buffers)
        commit_verified(buffers, pool, slots, counts, slots)
        pools.append(pool)
    assert_same_states(pools[0], pools[1], torch.arange(1, 13))
    assert not pools[0].temporal.isnan().any()


def test_a_snapshot_is_committed_before_the_running_states() -> None:
    """Two requests pass a page's end. The third has no snapshot, so its target is padding."""
    layer = delta_net(torch.float32, "cpu")
    pool = pool_of(layer, torch.bfloat16, torch.float32)
    x, slots = normal(3, 4, 32, seed=8), torch.tensor([3, 7, 1])
    before, buffers = copied(pool), buffers_of(pool, x)
    verify(layer, pool, x, slots, buffers)
    commit_verified(buffers, pool, slots, torch.tensor([2, 3, 0]), torch.tensor([10, 11, 0]))
    assert_same_states(pool, before, slots)
    snapshots = copied(pool)
    commit_verified(buffers, pool, slots, torch.tensor([4, 3, 1]), slots)
    assert_same_states(pool, snapshots, torch.tensor([10, 11]))
    # The tokens after a snapshot are computed from the stored (rounded) snapshot.
    assert torch.equal(pool.temporal[:, 7], pool.temporal[:, 11])
    assert torch.equal(pool.conv[:, 7], pool.conv[:, 11])
    rest = StateBatch(slots=torch.tensor([9]), first_slots=torch.tensor([10]))
    run_step(layer, pool, x[0, 2:3], None, rest)
    run_step(layer, pool, x[0, 3:4], None, replace(rest, first_slots=None))
    close(pool.temporal[:, 9].float(), pool.temporal[:, 3].float())
    close(pool.conv[:, 9], pool.conv[:, 3])


def test_padding_rows_touch_no_state() -> None:
    """A captured step has padding rows, whose slot is 0; others' states are not touched by them."""
    layer = delta_net(torch.float32, "cpu")
    pool = pool_of(layer, torch.float32, torch.float32)
    x, slots = normal(4, 3, 32, seed=9), torch.tensor([3, 0, 0, 1])
    alone, buffers = copied(pool), buffers_of(pool, x, spare=5)
    verify(layer, pool, x, slots, buffers)
    commit_verified(buffers, pool, slots, torch.tensor([2, 0, 3, 1]), slots)
    decode_all(layer, alone, x[:1, :2], slots[:1])
    decode_all(layer, alone, x[3:, :1], slots[3:])
    close(pool.temporal[:, 1:], alone.temporal[:, 1:])
    close(pool.conv[:, 1:], alone.conv[:, 1:])


def test_every_layer_has_a_place_of_its_own() -> None:
    layers = [delta_net(torch.float32, "cpu", layer_id=nth) for nth in (1, 6)]
    pool = pool_of(layers[0], torch.float32, torch.float32, layers=(1, 6))
    x, slots, steps = normal(2, 4, 32, seed=10), torch.tensor([3, 7]), copied(pool)
    buffers = buffers_of(pool, x)
    for layer in layers:
        verify(layer, pool, x, slots, buffers)
        decode_all(layer, steps, x[:, :3], slots)
    commit_verified(buffers, pool, slots, torch.tensor([3, 3]), slots)
    close(pool.temporal, steps.temporal)
    close(pool.conv, steps.conv)


def test_their_size_is_known_before_they_are_made() -> None:
    """A token of a layer of Qwen3-Next: 8192 inputs, 2048 elements of keys and 4096 of values in
    bf16, and two fp32 numbers of 32 heads; 3.97 MiB for four tokens of a request."""
    spec = MambaSpec.of_shapes(
        tuple(range(36)), (32, 128, 128), (8192, 3),
        ssm_dtype=torch.float32, conv_dtype=torch.bfloat16,
    )  # fmt: skip
    buffers = VerifyBuffers.of(spec, max_batch_size=64, num_draft_tokens=4, device="meta")
    assert buffers.num_bytes == 64 * 4 * 36 * (2 * (8192 + 2048 + 4096) + 4 * (32 + 32))
    logits = 256 * 1000 * 4
    assert verification_bytes([spec], 4, 1000) == buffers.num_bytes + 2 * logits
    assert verification_bytes([spec], 1, 1000) == 0, "nothing is drafted"


def test_shapes_that_do_not_fit_are_named() -> None:
    heads: dict[str, Any] = {"ssm_dtype": torch.float32, "conv_dtype": torch.float32}
    spec = MambaSpec.of_shapes((0,), (2, 16, 24), (80, 3), **heads)
    sizes: dict[str, Any] = {"max_batch_size": 2, "num_draft_tokens": 4, "device": "meta"}
    assert VerifyBuffers.of(spec, **sizes).inputs.k.shape == (1, 8, 1, 16)
    with pytest.raises(ValueError, match="num_draft_tokens=0"):
        VerifyBuffers.of(spec, **sizes | {"num_draft_tokens": 0})
    odd = MambaSpec.of_shapes((0,), (2, 16, 24), (81, 3), **heads)
    with pytest.raises(ValueError, match="81 channels"):
        VerifyBuffers.of(odd, **sizes)
