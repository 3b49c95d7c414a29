"""MambaPool: slots of recurrent states, handed out, copied and zeroed."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.device.pool_registry import make_pools
from sglang.srt.mem_cache.device.state_pool import MambaPool, MambaSpec
from sglang.srt.mem_cache.device.state_spec import (
    ItemKind,
    KVSpec,
    PoolHitPolicy,
    PoolName,
    bytes_per_token,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

SPEC = MambaSpec.of_shapes(
    (0, 2), (2, 3, 4), (5, 3), ssm_dtype=torch.float32, conv_dtype=torch.bfloat16
)


def test_spec_is_of_one_state_that_stands_for_a_prefix() -> None:
    assert (SPEC.name, SPEC.item) == (PoolName.MAMBA, ItemKind.STATE)
    assert SPEC.hit_policy is PoolHitPolicy.TRAILING_PAGES
    assert SPEC.num_bytes == 2 * (2 * 3 * 4 * 4 + 5 * 3 * 2)
    assert bytes_per_token((SPEC,)) == 0


def test_buffers_have_a_padding_slot() -> None:
    pool = MambaPool(SPEC, 4, "cpu")
    assert pool.temporal.shape == (2, 5, 2, 3, 4)
    assert pool.conv.shape == (2, 5, 5, 3)
    assert (pool.temporal.dtype, pool.conv.dtype) == (torch.float32, torch.bfloat16)
    assert (pool.page_size, pool.layer_num, pool.wait_for_layer(2)) == (1, 2, 1)
    assert pool.get_contiguous_buf_infos()[1:] == (
        [5 * 96] * 2 + [5 * 30] * 2,
        [96] * 2 + [30] * 2,
    )


def test_slots_are_handed_out_low_first_and_never_padding() -> None:
    pool = MambaPool(SPEC, 4, "cpu")
    first = pool.alloc(3)
    assert first is not None
    assert first.tolist() == [1, 2, 3]
    assert first.dtype is torch.int64
    assert pool.alloc(2) is None
    assert pool.available_size() == 1
    pool.free(first[:1])
    pool.free([2])
    assert sorted(pool.free_page_ids()[0].tolist()) == [1, 2, 4]
    assert pool.take(3) == [2, 1, 4]
    pool.clear()
    assert pool.available_size() == 4


@pytest.mark.parametrize("slot", [0, 1, 5])
def test_a_slot_that_nobody_owns_cannot_be_freed(slot: int) -> None:
    pool = MambaPool(SPEC, 4, "cpu")
    with pytest.raises(AssertionError, match=f"state slot {slot}"):
        pool.free([slot])


@pytest.mark.parametrize("at_once", [2 * SPEC.num_bytes, SPEC.num_bytes - 1])
def test_one_state_is_copied_to_several(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("sglang.srt.mem_cache.device.state_pool.COPY_BYTES", at_once)
    pool = MambaPool(SPEC, 5, "cpu")
    pool.temporal[:, 2], pool.conv[:, 2] = 7.0, 8.0
    pool.copy_from(torch.tensor([2, 2, 2]), torch.tensor([1, 3, 5]))
    assert pool.temporal[:, :, 0, 0, 0].tolist() == [[0, 7, 7, 7, 0, 7]] * 2
    assert pool.conv[:, :, 4, 2].tolist() == [[0, 8, 8, 8, 0, 8]] * 2
    pool.zero(torch.tensor([2, 5]))
    assert pool.temporal[:, :, 1, 2, 3].tolist() == [[0, 7, 0, 7, 0, 0]] * 2
    assert pool.conv[:, :, 0, 0].tolist() == [[0, 8, 0, 8, 0, 0]] * 2


def test_registry_makes_the_pool_with_its_own_size() -> None:
    kv = KVSpec.of_heads((1, 3), 1, 2, torch.float32)
    pools = make_pools([kv, SPEC], 8, 4, "cpu", num_states=3)
    states = pools[PoolName.MAMBA]
    assert isinstance(pools[PoolName.KV], MHATokenToKVPool)
    assert isinstance(states, MambaPool)
    assert (states.size, states.page_size, pools[PoolName.KV].size) == (3, 1, 8)
    with pytest.raises(ValueError, match="needs at least 1 slot, not 0"):
        make_pools([kv, SPEC], 8, 4, "cpu")
