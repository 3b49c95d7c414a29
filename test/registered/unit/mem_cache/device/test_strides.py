"""Items that stand for several tokens, and states of running requests: specs and device pools."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from sglang.srt.mem_cache.device.base_device_pool import PagedDevicePool
from sglang.srt.mem_cache.device.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.device.nsa_pool import IndexerSpec, NSAIndexerPool
from sglang.srt.mem_cache.device.pool_registry import ModelPools, kv_pool, make_pools
from sglang.srt.mem_cache.device.request_pool import RequestPool
from sglang.srt.mem_cache.device.row_pool import RowPool, RowSpec
from sglang.srt.mem_cache.device.state_pool import StatePool
from sglang.srt.mem_cache.device.state_spec import (
    ItemKind,
    PoolHitPolicy,
    PoolName,
    StateBuffer,
    StateSpec,
    bytes_per_request,
    bytes_per_state,
    bytes_per_token,
    check_page_size,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

ROWS = RowSpec.of((1, 2), 8, torch.bfloat16, stride=4)
KEYS = IndexerSpec.of((1, 2), 6, torch.float32, stride=4)
FAR = RowSpec.of(
    (3,), 8, torch.bfloat16, stride=128, name=PoolName.C128, indices_from_pool=PoolName.KV
)
OPEN = StateSpec(
    name=PoolName.OPEN_GROUP,
    layers=(1, 3),
    buffers=(StateBuffer("values", (5,), torch.float32), StateBuffer("gates", (3,), torch.int16)),
    item=ItemKind.REQUEST,
)
RING = StateSpec(
    name=PoolName.SWA,
    layers=(0,),
    buffers=(StateBuffer("ring", (4,), torch.float32),),
    item=ItemKind.STATE,
    hit_policy=PoolHitPolicy.TRAILING_PAGES,
)
SPECS = (ROWS, KEYS, FAR, RING, OPEN)


class Request:
    req_pool_idx: int | None = None


def test_pools_have_an_item_for_each_stride_of_tokens() -> None:
    pools = make_pools(SPECS, 512, 256, "cpu", 2, num_requests=3)
    rows, keys, far = pools[PoolName.KV], pools[PoolName.INDEXER], pools[PoolName.C128]
    assert isinstance(rows, RowPool) and isinstance(far, RowPool)
    assert isinstance(keys, NSAIndexerPool)
    assert [pool.page_items for pool in (rows, keys, far)] == [64, 64, 2]
    assert [pool.size for pool in (rows, keys, far)] == [512] * 3
    assert rows.row_buffer[0].shape == (768 // 4, 8)
    assert keys.index_k_buffer[0].shape == (768 // 4, 6)
    assert far.row_buffer[0].shape == (768 // 128, 8)
    assert far.get_contiguous_buf_infos()[2] == [2 * 8 * 2]
    assert kv_pool(pools) is rows


def test_whole_pages_of_slots_have_whole_items() -> None:
    far = make_pools(SPECS, 512, 256, "cpu", 2, num_requests=1)[PoolName.C128]
    assert far.items_of(torch.arange(256, 768)).tolist() == [2, 3, 4, 5]
    assert isinstance(far, RowPool)
    far.set_kv_buffer(3, torch.tensor([3]), torch.full((1, 8), 2.0), torch.empty(0))
    far.move_kv_cache(torch.arange(512, 768), torch.arange(256, 512))
    assert far.get_key_buffer(3)[:, 0].tolist() == [0, 0, 0, 2, 0, 2]


def test_a_token_costs_a_fraction_of_an_item() -> None:
    each = bytes_per_token(SPECS)
    assert each == Fraction(2 * 8 * 2 + 2 * 6 * 4, 4) + Fraction(8 * 2, 128)
    assert 256 * each == 64 * (2 * 8 * 2 + 2 * 6 * 4) + 2 * 8 * 2
    assert bytes_per_request(SPECS) == 2 * (5 * 4 + 3 * 2)
    assert bytes_per_state(SPECS) == 4 * 4


@pytest.mark.parametrize("page_size", [1, 64, 130])
def test_a_page_size_that_a_stride_does_not_divide_is_refused(page_size: int) -> None:
    message = rf"--page-size {page_size}: .* 'c128' stands for 128 tokens.* a multiple of 128"
    with pytest.raises(ValueError, match=message):
        check_page_size(SPECS, page_size)
    with pytest.raises(ValueError, match=message):
        make_pools(SPECS, 2 * page_size, page_size, "cpu", 2, num_requests=1)
    with pytest.raises(ValueError, match="'c128'"):
        PagedDevicePool(FAR, 2 * page_size, page_size, "cpu")


def test_the_page_size_that_is_named_works_for_all_strides() -> None:
    specs = (ROWS, replace(FAR, stride=6))
    with pytest.raises(ValueError, match=r"'c128' stands for 6 tokens.* a multiple of 12"):
        check_page_size(specs, 4)
    check_page_size(specs, 12)


def test_strides_and_requests_that_mean_nothing_are_refused() -> None:
    trailing = PoolHitPolicy.TRAILING_PAGES
    with pytest.raises(ValueError, match="'kv' has a stride of 0"):
        replace(ROWS, stride=0)
    with pytest.raises(ValueError, match="'open_group' has a stride of 2 and an item for each sta"):
        replace(OPEN, stride=2, item=ItemKind.STATE, hit_policy=trailing)
    with pytest.raises(ValueError, match="'open_group' has a stride of 2 and an item for each req"):
        replace(OPEN, stride=2)
    with pytest.raises(ValueError, match=r"'open_group' is in the rows of requests: .* of 'kv'"):
        replace(OPEN, indices_from_pool=PoolName.KV)
    with pytest.raises(ValueError, match="'kv': rows are not kept in float8_e4m3fn; use --kv-cac"):
        RowSpec.of((0,), 8, torch.float8_e4m3fn)
    with pytest.raises(
        ValueError, match=r"'open_group' of running requests needs a state of whole"
    ):
        make_pools((ROWS, OPEN), 512, 256, "cpu", num_requests=1)
    with pytest.raises(ValueError, match="cannot have 0 rows"):
        RequestPool(OPEN, 0, "cpu")
    with pytest.raises(ValueError, match="'swa', one for each state, cannot have 3 rows of requ"):
        RequestPool(RING, 3, "cpu")
    with pytest.raises(ValueError, match="'open_group' has an item for each request, not a state"):
        StatePool(OPEN, 3, "cpu")
    assert StatePool(RING, 1, "cpu").size == 1


def test_a_request_begins_with_zeros_in_its_row() -> None:
    pools = make_pools(SPECS, 512, 256, "cpu", 2, num_requests=3)
    own = pools[PoolName.OPEN_GROUP]
    assert isinstance(own, RequestPool)
    rows = ReqToTokenPool(3, 8, "cpu")
    rows.request_pools = [own]
    for buffer in own.buffers:
        buffer.fill_(7)
    first, second = Request(), Request()
    assert rows.alloc([first]) == [0]
    assert [buffer[:, :, 0].tolist() for buffer in own.buffers] == [[[0, 7, 7, 7]] * 2] * 2
    own.buffers[0].fill_(5)
    assert rows.alloc([first, second]) == [0, 1]
    assert own.buffers[0][0, :, 0].tolist() == [5, 0, 5, 5], "a request keeps what it has"
    assert own.buffers[0].shape == (2, 4, 5)


def test_prefixes_keep_no_state_of_a_request() -> None:
    pools = make_pools(SPECS, 512, 256, "cpu", 2, num_requests=1)
    kept = ModelPools.of(pools.values(), 4).pools
    assert [pool.spec.name for pool in kept] == ["kv", "indexer", "c128", "swa"]
