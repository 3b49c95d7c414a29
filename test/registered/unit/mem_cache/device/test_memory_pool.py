"""ReqToTokenPool and MHATokenToKVPool: rows, slots, and waiting for a layer's load."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from rigs.stores.pool_readers import Layer, SpyCounter
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.device.state_spec import KVSpec
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


@dataclass
class Row:
    req_pool_idx: int | None = None


def make_pool(dtype: torch.dtype = torch.float32, start_layer: int = 0) -> MHATokenToKVPool:
    return MHATokenToKVPool(8, 4, dtype, 2, 3, 2, "cpu", v_head_dim=5, start_layer=start_layer)


def test_rows_are_handed_out_low_first_and_all_or_none() -> None:
    pool = ReqToTokenPool(2, 16, "cpu")
    a, b, c = Row(), Row(), Row()
    assert pool.alloc([a, b, c]) is None
    assert (a.req_pool_idx, pool.available_size()) == (None, 2)
    assert pool.alloc([a, b]) == [0, 1]
    pool.free(a)
    assert a.req_pool_idx is None
    assert pool.alloc([b, c]) == [1, 0]


def test_a_row_freed_twice_is_caught() -> None:
    pool = ReqToTokenPool(2, 16, "cpu")
    req = Row()
    pool.alloc([req])
    pool.free(req)
    with pytest.raises(AssertionError, match="no row"):
        pool.free(req)
    with pytest.raises(AssertionError, match="row 0 freed twice"):
        pool.free(Row(req_pool_idx=0))


def test_write_converts_slots_to_int32() -> None:
    pool = ReqToTokenPool(2, 4, "cpu")
    pool.write((1, slice(1, 3)), torch.tensor([7, 9]))
    assert pool.req_to_token.tolist() == [[0, 0, 0, 0], [0, 7, 9, 0], [0, 0, 0, 0]]
    assert pool.req_to_token.dtype is torch.int32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_what_is_stored_is_read_back(dtype: torch.dtype) -> None:
    pool = make_pool(dtype)
    keys, values = torch.ones(2, 2, 3), torch.full((2, 2, 5), 2.0)
    pool.set_kv_buffer(Layer(1), torch.tensor([4, 11]), keys, values)
    k, v = pool.get_kv_buffer(1)
    assert k.shape == (12, 2, 3)
    assert v.shape == (12, 2, 5)
    assert k.dtype is v.dtype is dtype
    assert k.float().sum(dim=(1, 2)).nonzero().flatten().tolist() == [4, 11]
    assert v.float()[11].flatten().tolist() == [2.0] * 10
    assert pool.get_key_buffer(0).float().abs().sum() == 0


def test_readers_wait_for_their_layer_and_writers_do_not() -> None:
    pool = make_pool(start_layer=10)
    counter = SpyCounter()
    pool.register_layer_transfer_counter(counter)
    pool.set_kv_buffer(10, torch.tensor([4]), torch.ones(1, 2, 3), torch.ones(1, 2, 5))
    pool.kv_buffer_to_write(11)
    assert counter.waits == []
    pool.get_key_buffer(10)
    pool.get_value_buffer(11)
    pool.get_kv_buffer(11)
    assert counter.waits == [10, 11, 11]


def test_a_layer_is_the_models_and_the_pool_finds_its_own() -> None:
    """Layers 3 and 7 of a hybrid have keys and values: they are the pool's layers 0 and 1."""
    spec = KVSpec.of_heads((3, 7), 2, 3, torch.float32)
    pool = MHATokenToKVPool.from_spec(spec, 8, 4, "cpu")
    assert (pool.start_layer, pool.end_layer, pool.layer_num) == (3, 7, 2)
    pool.set_kv_buffer(Layer(7), torch.tensor([4]), torch.ones(1, 2, 3), torch.ones(1, 2, 3))
    assert pool.get_key_buffer(7) is pool.k_buffer[1]
    assert pool.kv_buffer_to_write(3)[1].data_ptr() == pool.v_buffer[0].data_ptr()
    assert [buffer.sum().item() for buffer in pool.k_buffer] == [0, 6]
    with pytest.raises(KeyError):
        pool.get_key_buffer(1)


def test_slots_are_moved_and_sizes_are_told() -> None:
    pool = make_pool()
    pool.set_kv_buffer(0, torch.tensor([4]), torch.ones(1, 2, 3), torch.ones(1, 2, 5))
    pool.move_kv_cache(torch.tensor([7]), torch.tensor([4]))
    assert pool.k_buffer[0][7].sum() == 6
    assert pool.get_kv_size_bytes() == (2 * 12 * 6 * 4, 2 * 12 * 10 * 4)
    addresses, sizes, page_sizes = pool.get_contiguous_buf_infos()
    assert addresses[0] == pool.k_buffer[0].data_ptr()
    assert sizes == [12 * 6 * 4] * 2 + [12 * 10 * 4] * 2
    assert page_sizes == [4 * 6 * 4] * 2 + [4 * 10 * 4] * 2


def test_bad_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="size=6"):
        MHATokenToKVPool(6, 4, torch.float32, 1, 1, 1, "cpu")
    with pytest.raises(ValueError, match="layers"):
        KVSpec.of_heads((2, 1), 1, 1, torch.float32)
    with pytest.raises(ValueError, match="layers"):
        MHATokenToKVPool(8, 4, torch.float32, 1, 1, 0, "cpu")
    with pytest.raises(ValueError, match="end_layer=2"):
        MHATokenToKVPool(8, 4, torch.float32, 1, 1, 2, "cpu", end_layer=2)
    with pytest.raises(ValueError, match="max_context_len=0"):
        ReqToTokenPool(1, 0, "cpu")
    with pytest.raises(ValueError, match="enable_memory_saver"):
        ReqToTokenPool(1, 1, "cpu", enable_memory_saver=True)
