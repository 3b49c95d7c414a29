"""Host pools of third parties: what a backend makes of `get_page_buffer_meta` alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rigs.stores.host_pools import make_device_pool, make_host_pool, storage_config
from rigs.stores.third_party_pool import PAGE, ThirdPartyPool
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage.plain_pool import PlainPool, as_storage_pool
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


def test_pools_that_have_everything_stay_themselves() -> None:
    pool = make_host_pool(make_device_pool(), "layer_first")
    assert as_storage_pool(pool) is pool
    theirs = ThirdPartyPool(2)
    adapted = as_storage_pool(theirs)
    assert as_storage_pool(theirs, adapted) is adapted
    assert as_storage_pool(ThirdPartyPool(2), adapted) is not adapted
    assert as_storage_pool(adapted) is adapted


def test_sizes_and_views_come_from_the_addresses() -> None:
    theirs = ThirdPartyPool(4)
    pool = PlainPool(theirs)
    assert (pool.page_size, pool.page_bytes, pool.is_zero_copy) == (PAGE, 2048, True)
    assert pool.get_hybrid_pool_buffer() == [theirs.kv_buffer]
    assert pool.layout == "page_first", "what else the pool has is still there"
    slots = torch.arange(PAGE, 3 * PAGE)
    views = pool.get_page_views(slots)
    assert [[len(view) for view in page] for page in views] == [[1024, 1024]] * 2
    assert b"".join(views[0]) == theirs.page(1).contiguous().numpy().tobytes()
    assert pool.get_page_views(torch.arange(0)) == []


def test_pages_are_gathered_and_scattered_bit_for_bit() -> None:
    theirs = ThirdPartyPool(6)
    pool = PlainPool(theirs)
    pages = torch.empty((2, pool.page_bytes), dtype=torch.uint8)
    pool.gather_pages(torch.arange(PAGE, 3 * PAGE), pages)
    assert torch.equal(pages[1].view(2, PAGE, -1), theirs.page(2))
    pool.scatter_pages(torch.arange(4 * PAGE, 6 * PAGE), pages)
    assert torch.equal(theirs.page(4), theirs.page(1))
    assert torch.equal(theirs.page(5), theirs.page(2))


def test_a_backend_moves_their_pages(tmp_path: Path) -> None:
    storage = HiCacheFile(storage_config(), str(tmp_path))
    theirs = ThirdPartyPool(4)
    storage.register_mem_pool_host(theirs)
    keys = ["ns/a", "ns/b"]
    there, back = torch.arange(2 * PAGE), torch.arange(2 * PAGE, 4 * PAGE)
    moves = [PoolTransfer(PoolName.KV, host_indices=there, keys=keys)]
    assert all(storage.batch_set_v2(moves)[PoolName.KV])
    moves = [PoolTransfer(PoolName.KV, host_indices=back, keys=keys)]
    assert all(storage.batch_get_v2(moves)[PoolName.KV])
    assert torch.equal(theirs.kv_buffer[:, : 2 * PAGE], theirs.kv_buffer[:, 2 * PAGE :])


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        (SimpleNamespace(), "SimpleNamespace: it has no page_size"),
        (SimpleNamespace(page_size=4), "it has no get_page_buffer_meta"),
        (
            SimpleNamespace(page_size=4, get_page_buffer_meta=len),
            "give it kv_buffer or get_hybrid_pool_buffer",
        ),
        (
            SimpleNamespace(
                page_size=4, get_page_buffer_meta=len, kv_buffer=torch.zeros(4, 2)[:, 0]
            ),
            "contiguous tensors",
        ),
    ],
)
def test_pools_with_less_are_refused_by_name(pool: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        as_storage_pool(pool)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (([1], [8]), "8 bytes at 0x1, which are not in its kv_buffer"),
        (([], []), "0 addresses and 0 sizes for 1 pages"),
        (([1, 2], [8]), "2 addresses and 1 sizes"),
    ],
)
def test_addresses_outside_the_pool_never_reach_a_backend(
    answer: tuple[list[int], list[int]], words: str
) -> None:
    theirs = ThirdPartyPool(2)
    pool = PlainPool(theirs)
    theirs.get_page_buffer_meta = lambda indices: answer  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=words):
        pool.get_page_buffer_meta(torch.arange(PAGE))


def test_slots_outside_the_pool_are_refused() -> None:
    pool = PlainPool(ThirdPartyPool(2))
    for slots in (torch.arange(1, 1 + PAGE), torch.arange(2 * PAGE, 3 * PAGE)):
        with pytest.raises(ValueError):
            pool.get_page_buffer_meta(slots)
