"""Pools of latent rows and indexer keys: rows, views of their parts, and waiting for a load."""

from __future__ import annotations

import pytest
import torch

from rigs.stores.pool_readers import Layer, SpyCounter
from sglang.srt.mem_cache.device.mla_pool import MLASpec, MLATokenToKVPool
from sglang.srt.mem_cache.device.nsa_pool import (
    DSATokenToKVPool,
    IndexerSpec,
    NSAIndexerPool,
    NSASpec,
    NSATokenToKVPool,
)
from sglang.srt.mem_cache.device.pool_registry import kv_pool, make_pools
from sglang.srt.mem_cache.device.state_spec import PoolName, RankShare, RankSplit
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

MLA = MLASpec.of((3, 7), 4, 2, torch.float32)
INDEXER = IndexerSpec.of((7,), 3, torch.bfloat16)


def mla_pool(dtype: torch.dtype = torch.float32) -> MLATokenToKVPool:
    return MLATokenToKVPool.from_spec(MLASpec.of((3, 7), 4, 2, dtype), 8, 4, "cpu")


def indexer_pool() -> NSAIndexerPool:
    return NSAIndexerPool(INDEXER, 8, 4, "cpu")


def test_a_row_costs_the_latent_and_the_rope_part_on_every_rank() -> None:
    assert (MLA.row_dim, MLA.layer_bytes, MLA.num_bytes) == (6, 24, 48)
    assert (INDEXER.index_head_dim, INDEXER.num_bytes) == (3, 6)
    assert MLA.share == INDEXER.share == RankShare(RankSplit.SAME)
    assert INDEXER.indices_from_pool is PoolName.KV


def test_the_pools_of_a_sparse_model_share_their_slots() -> None:
    pools = make_pools([MLA, INDEXER], 8, 4, "cpu")
    latent, side = kv_pool(pools), pools[PoolName.INDEXER]
    assert isinstance(latent, MLATokenToKVPool)
    assert isinstance(side, NSAIndexerPool)
    assert (latent.spec, side.spec) == (MLA, INDEXER)
    assert latent.kv_buffer[0].shape == (12, 1, 6)
    assert side.get_index_k_buffer(7).shape == (12, 3)
    assert side.dtype is torch.bfloat16


def test_one_pool_of_a_sparse_model_makes_both() -> None:
    spec = NSASpec.beside(MLA, 3, torch.bfloat16)
    pools = make_pools([spec, spec.indexer], 8, 4, "cpu")
    both, slots = kv_pool(pools), torch.tensor([4])
    assert isinstance(both, NSATokenToKVPool) and DSATokenToKVPool is NSATokenToKVPool
    assert list(pools) == [PoolName.KV, PoolName.INDEXER]
    assert pools[PoolName.INDEXER] is both.index_pool
    assert (both.spec, both.index_pool.spec) == (spec, spec.indexer)
    assert both.get_kv_size_bytes() == (2 * 12 * 6 * 4 + 2 * 12 * 3 * 2, 0)
    both.set_kv_buffer(3, slots, torch.ones(1, 1, 6), torch.ones(1, 1, 4))
    both.set_index_k_buffer(Layer(3), slots, torch.full((1, 3), 2.0))
    both.move_kv_cache(torch.tensor([9]), slots)
    assert both.get_key_buffer(3)[9].sum() == both.get_index_k_buffer(3)[9].sum() == 6
    assert both.get_index_k_buffer(7).abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_ways_to_store_a_row_give_the_same(dtype: torch.dtype) -> None:
    pool = mla_pool(dtype)
    row = torch.arange(12.0).view(2, 1, 6)
    pool.set_kv_buffer(Layer(7), torch.tensor([4, 11]), row, row[..., :4])
    pool.set_mla_kv_buffer(3, torch.tensor([4, 11]), row[:, 0, :4], row[..., 4:])
    for layer in (3, 7):
        assert torch.equal(pool.get_key_buffer(layer)[[4, 11]], row.to(dtype))
        assert torch.equal(pool.get_value_buffer(layer)[[4, 11]], row[..., :4].to(dtype))
        assert pool.get_key_buffer(layer).sum(dim=(1, 2)).nonzero().flatten().tolist() == [4, 11]


def test_values_are_a_view_of_the_rows() -> None:
    pool = mla_pool()
    keys, values = pool.get_kv_buffer(7)
    assert keys is pool.kv_buffer[1]
    assert (values.shape, values.data_ptr()) == ((12, 1, 4), keys.data_ptr())
    assert pool.kv_buffer_to_write(3)[1].data_ptr() == pool.kv_buffer[0].data_ptr()


def test_rows_are_read_by_slot_in_the_dtype_asked_for() -> None:
    pool = mla_pool(torch.bfloat16)
    pool.set_mla_kv_buffer(7, torch.tensor([5]), torch.ones(1, 4), torch.full((1, 2), 2.0))
    latent, rope = pool.get_mla_kv_buffer(Layer(7), torch.tensor([5, 4]), torch.float32)
    assert latent.dtype is rope.dtype is torch.float32
    assert latent.tolist() == [[[1.0] * 4], [[0.0] * 4]]
    assert rope.tolist() == [[[2.0] * 2], [[0.0] * 2]]
    assert pool.get_mla_kv_buffer(7, torch.tensor([5]))[0].dtype is torch.bfloat16


def test_readers_wait_for_their_layer_and_writers_do_not() -> None:
    pool, side, counter = mla_pool(), indexer_pool(), SpyCounter()
    pool.register_layer_transfer_counter(counter)
    side.register_layer_transfer_counter(counter)
    slots = torch.tensor([4])
    pool.set_kv_buffer(3, slots, torch.ones(1, 1, 6), torch.ones(1, 1, 4))
    pool.set_mla_kv_buffer(3, slots, torch.ones(1, 4), torch.ones(1, 2))
    pool.kv_buffer_to_write(3)
    side.set_index_k_buffer(Layer(7), slots, torch.ones(1, 3))
    assert counter.waits == []
    pool.get_key_buffer(3)
    pool.get_value_buffer(7)
    pool.get_kv_buffer(3)
    pool.get_mla_kv_buffer(7, slots)
    side.get_index_k_buffer(7)
    assert counter.waits == [3, 7, 3, 7, 7]


def test_indexer_keys_are_stored_in_their_own_dtype_and_layer() -> None:
    pool = indexer_pool()
    pool.set_index_k_buffer(7, torch.tensor([4, 6]), torch.arange(6.0).view(2, 3))
    assert pool.get_index_k_buffer(7)[[4, 6]].tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(KeyError):
        pool.get_index_k_buffer(3)


def test_slots_are_moved_and_sizes_are_told() -> None:
    pool, side = mla_pool(), indexer_pool()
    pool.set_kv_buffer(3, torch.tensor([4]), torch.ones(1, 1, 6), torch.ones(1, 1, 4))
    pool.move_kv_cache(torch.tensor([9]), torch.tensor([4]))
    assert pool.kv_buffer[0][9].sum() == 6
    assert pool.get_kv_size_bytes() == (2 * 12 * 6 * 4, 0)
    addresses, sizes, pages = pool.get_contiguous_buf_infos()
    assert addresses == [buffer.data_ptr() for buffer in pool.kv_buffer]
    assert (sizes, pages) == ([12 * 6 * 4] * 2, [4 * 6 * 4] * 2)
    assert side.get_contiguous_buf_infos()[1:] == ([12 * 3 * 2], [4 * 3 * 2])


def test_fp8_but_e4m3_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'kv': latent rows of MLA are not kept in float8_e5m2"):
        mla_pool(torch.float8_e5m2)
    with pytest.raises(ValueError, match=r"'indexer': indexer keys .* bfloat16 or fp8_e4m3"):
        IndexerSpec.of((0,), 4, torch.float8_e5m2)


def test_what_cannot_be_held_is_refused() -> None:
    with pytest.raises(ValueError, match="size=6"):
        MLATokenToKVPool(6, 4, torch.float32, 4, 2, 1, "cpu")
    with pytest.raises(ValueError, match="layer_num=3"):
        MLATokenToKVPool(8, 4, torch.float32, 4, 2, 3, "cpu", start_layer=3, end_layer=7)
    with pytest.raises(ValueError, match="enable_memory_saver"):
        MLATokenToKVPool(8, 4, torch.float32, 4, 2, 1, "cpu", True)
    with pytest.raises(ValueError, match="size=6"):
        NSAIndexerPool(INDEXER, 6, 4, "cpu")
    with pytest.raises(ValueError, match="kv_cache_dim=656: rows of 6 elements are kept"):
        NSATokenToKVPool(8, 4, 4, torch.float32, 2, 1, "cpu", 3, kv_cache_dim=656)


# -- SGLang's names --------------------------------------------------------------------------------


def sparse_pool() -> NSATokenToKVPool:
    """Two layers, pages of 4 tokens, keys of 3 elements that tell slot and layer."""
    pool = NSATokenToKVPool(16, 4, 4, torch.float32, 2, 2, "cpu", 3, False, 6, 0, 1, 16)
    for layer in range(2):
        slots = torch.arange(4, 20)
        pool.set_index_k_buffer(layer, slots, (slots[:, None] + 100 * layer).expand(-1, 3))
    return pool


def test_a_sparse_pool_has_the_arguments_and_buffers_of_sglang() -> None:
    pool = sparse_pool()
    assert pool.kv_cache_dim == 6
    assert pool.index_k_with_scale_buffer_dtype == torch.float32
    assert [one.shape for one in pool.index_k_with_scale_buffer] == [(20, 3)] * 2
    for layer, buffer in enumerate(pool.index_k_with_scale_buffer):
        assert pool.get_index_k_with_scale_buffer(layer).data_ptr() == buffer.data_ptr()
    # Six tokens in pages 3 and 1.
    keys = pool.get_index_k_continuous(1, 6, torch.tensor([3, 1], dtype=torch.int32))
    assert keys[:, 0].tolist() == [112, 113, 114, 115, 104, 105]


@pytest.mark.parametrize(
    "name",
    ["get_index_k_scale_continuous", "get_index_k_scale_buffer", "set_index_k_scale_buffer"],
)
def test_scales_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: the indexer's keys have no scales"):
        getattr(sparse_pool(), name)(0, 1, 2, index_k_scale=3)


def test_arguments_that_would_change_the_memory_are_refused() -> None:
    with pytest.raises(ValueError, match="index_buf_size=8: keys have the slots of the rows, 16"):
        NSATokenToKVPool(16, 4, 4, torch.float32, 2, 1, "cpu", 3, index_buf_size=8)
    mla = (16, 4, torch.float32, 4, 2, 1, "cpu")
    assert MLATokenToKVPool(*mla, override_kv_cache_dim=6).kv_cache_dim == 6
    with pytest.raises(ValueError, match="override_kv_cache_dim=656: rows of 6 elements"):
        MLATokenToKVPool(*mla, override_kv_cache_dim=656)
    with pytest.raises(ValueError, match="use_dsa: make a DSATokenToKVPool"):
        MLATokenToKVPool(*mla, use_dsa=True)
