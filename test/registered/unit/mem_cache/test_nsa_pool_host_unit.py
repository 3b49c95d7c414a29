"""Host pools of latent rows and indexer keys: bytes in every layout, and what is refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rigs.caches.mla_pools import (
    INDEXER_KEYS,
    LATENT_ROWS,
    indexer_keys,
    latent_rows,
    make_indexer_pool,
    make_mla_pool,
)
from rigs.stores.host_pools import (
    PAGE,
    PoolKind,
    copy_to_device,
    copy_to_host,
    device_bytes,
    page_keys,
    page_slots,
    round_trip,
    storage_config,
)
from sglang.srt.mem_cache.device.base_device_pool import PagedDevicePool
from sglang.srt.mem_cache.device.mla_pool import MLATokenToKVPool
from sglang.srt.mem_cache.device.nsa_pool import IndexerSpec, NSAIndexerPool, NSATokenToKVPool
from sglang.srt.mem_cache.hicache_storage import (
    CacheOutcome,
    HiCacheFile,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.host.host_layout import HostLayout
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.memory_pool_host import (
    DSAIndexerPoolHost,
    MLATokenToKVPoolHost,
    NSAIndexerPoolHost,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
MAKERS = pytest.mark.parametrize("make", [make_mla_pool, make_indexer_pool])
IN_LAYOUTS = pytest.mark.parametrize("layout", list(HostLayout))
SPLIT = HostLayout.PAGE_FIRST_KV_SPLIT


def host_of(device: PagedDevicePool, layout: str) -> HostKVCache:
    kind = INDEXER_KEYS if isinstance(device, NSAIndexerPool) else LATENT_ROWS
    return kind.host_pool_class.make(device, page_num=32, layout=layout)


def expected_parts(device: PagedDevicePool, page: int, layout: str) -> list[bytes]:
    layers = torch.stack([buffer[page_slots([page])] for buffer in device.parts[0]])
    if layout == "page_first":
        layers = layers.transpose(0, 1)
    cut = [layers.shape[-1]]
    if layout == SPLIT and isinstance(device, MLATokenToKVPool):
        cut = [part.shape[-1] for part in device.split_rows(layers)]
    return [
        part.reshape(-1).view(torch.uint8).numpy().tobytes()
        for part in torch.split(layers, cut, dim=-1)
    ]


def expected_page(device: PagedDevicePool, page: int, layout: str) -> bytes:
    return b"".join(expected_parts(device, page, layout))


# -- L1 to L2 and back ---------------------------------------------------------------------------


@MAKERS
@IN_LAYOUTS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pages", [[3, 1, 15, 8], [5, 6, 7]])
def test_device_host_device_is_bit_exact(
    make: Callable[..., PagedDevicePool], layout: str, dtype: torch.dtype, pages: list[int]
) -> None:
    device, other = make(0, dtype=dtype), make(1, dtype=dtype)
    untouched = device_bytes(other, page_slots([0, 2]))
    host = host_of(device, layout)
    copy_to_host(device, host, [0])
    slots = copy_to_host(device, host, pages)
    targets = [14, 4, 10, 11][: len(pages)]
    copy_to_device(host, other, slots, targets)
    assert device_bytes(other, page_slots(targets)) == device_bytes(device, page_slots(pages))
    assert device_bytes(other, page_slots([0, 2])) == untouched


# -- bytes of pages ------------------------------------------------------------------------------


@MAKERS
@IN_LAYOUTS
def test_page_bytes_follow_the_byte_order(
    make: Callable[..., PagedDevicePool], layout: str
) -> None:
    device = make()
    host = host_of(device, layout)
    slots = copy_to_host(device, host, [7, 3])
    flat = host.get_data_page(int(slots[PAGE]))
    assert flat.view(torch.uint8).numpy().tobytes() == expected_page(device, 3, layout)
    layers, item = device.layer_num, device.spec.buffers[0].shape
    tokens_and_layers = (PAGE, layers) if layout == "page_first" else (layers, PAGE)
    if len(expected_parts(device, 3, layout)) == 1:
        assert host.get_data_page(0, flat=False).shape == (*tokens_and_layers, *item)
    else:
        with pytest.raises(ValueError, match="unlike parts has only its flat form"):
            host.get_data_page(0, flat=False)
    host.set_from_flat_data_page(40, flat)
    assert torch.equal(host.get_data_page(40).view(torch.uint8), flat.view(torch.uint8))


@MAKERS
@IN_LAYOUTS
def test_gathered_pages_scatter_back(make: Callable[..., PagedDevicePool], layout: str) -> None:
    device, other = make(0), make(1)
    host = host_of(device, layout)
    slots = copy_to_host(device, host, [6, 2, 9])
    # Rows with a gap, as a staging page with its trailer has.
    rows = torch.zeros((3, host.page_bytes + 32), dtype=torch.uint8)
    host.gather_pages(slots, rows[:, : host.page_bytes])
    for row, page in zip(rows, (6, 2, 9), strict=True):
        assert row[: host.page_bytes].numpy().tobytes() == expected_page(device, page, layout)
        assert not row[host.page_bytes :].any()
    copies = host.alloc(len(slots))
    assert copies is not None
    host.scatter_pages(copies, rows[:, : host.page_bytes])
    copy_to_device(host, other, copies, [6, 2, 9])
    wanted = page_slots([6, 2, 9])
    assert device_bytes(other, wanted) == device_bytes(device, wanted)


@MAKERS
@pytest.mark.parametrize("layout", list(HostLayout)[1:])
def test_a_part_of_a_page_is_one_run_of_memory(
    make: Callable[..., PagedDevicePool], layout: str
) -> None:
    device = make()
    host = host_of(device, layout)
    slots = copy_to_host(device, host, [7, 3])
    expected = [expected_parts(device, page, layout) for page in (7, 3)]
    assert len(expected[0]) == (2 if (make, layout) == (make_mla_pool, SPLIT) else 1)
    ptrs, sizes = host.get_page_buffer_meta(slots)
    at = [ctypes.string_at(ptr, size) for ptr, size in zip(ptrs, sizes, strict=True)]
    assert at == [part for parts in expected for part in parts]
    assert [[bytes(view) for view in views] for views in host.get_page_views(slots)] == expected
    with pytest.raises(ValueError, match="leave the pool"):
        host.get_page_buffer_meta(page_slots([32]))


def test_rows_cut_in_two_lie_in_two_buffers() -> None:
    host = host_of(make_mla_pool(), SPLIT)
    assert [list(one.shape) for one in host.get_hybrid_pool_buffer()] == [
        [32, 3, PAGE, 1, 10], [32, 3, PAGE, 1, 2],
    ]  # fmt: skip
    assert (host.get_ksize_per_token(), host.size_per_token) == (60, 72)
    keys = host_of(make_indexer_pool(), SPLIT)
    assert [list(one.shape) for one in keys.get_hybrid_pool_buffer()] == [[32, 2, PAGE, 6]]


def test_rows_cut_in_two_have_a_byte_order_of_their_own() -> None:
    orders = [host_of(make_mla_pool(), layout).page_byte_order for layout in HostLayout]
    assert orders == ["layer_major", "token_major", "layer_major", "layer_major_split"]
    assert host_of(make_indexer_pool(), SPLIT).page_byte_order == "layer_major"


# -- L2 to L3 and back ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [latent_rows, indexer_keys])
@pytest.mark.parametrize("dtype", DTYPES)
@IN_LAYOUTS
def test_pages_go_to_files_and_come_back(
    kind: Callable[[torch.dtype], PoolKind], dtype: torch.dtype, layout: str, tmp_path: Path
) -> None:
    storage = HiCacheFile(storage_config(), str(tmp_path))
    round_trip(storage, layout, page_keys(5), [9, 4, 5, 0, 11], kind=kind(dtype))


def test_a_prefix_is_a_hit_as_far_as_both_pools_have_its_pages(tmp_path: Path) -> None:
    storage = HiCacheFile(storage_config(), str(tmp_path))
    keys, transfers = page_keys(5), []
    for kind, count in ((LATENT_ROWS, 5), (INDEXER_KEYS, 3)):
        device = kind.make_device_pool(0)
        host = kind.host_pool_class.make(device, page_num=32, layout="page_first_direct")
        storage.register_mem_host_pool_v2(host, kind.name)
        slots = copy_to_host(device, host, list(range(count)))
        transfers.append(PoolTransfer(kind.name, slots, keys=keys[:count]))
    written = storage.batch_set_v2(transfers)
    assert written == {"kv": [CacheOutcome.LANDED] * 5, "indexer": [CacheOutcome.LANDED] * 3}
    assert storage.batch_exists_v2(keys).kv_hit_pages == 5
    with_keys = storage.batch_exists_v2(keys, [PoolTransfer(PoolName.INDEXER)])
    assert (with_keys.kv_hit_pages, with_keys.extra_pool_hit_pages) == (3, {"indexer": 3})


# -- sizes, names, and what is refused -----------------------------------------------------------


def test_host_pools_of_latent_rows_and_keys_count_their_bytes() -> None:
    host = MLATokenToKVPoolHost(make_mla_pool(), 2.0, 0, PAGE, "page_first")
    assert (host.page_num, host.size_per_token, host.get_ksize_per_token()) == (32, 72, 72)
    assert (host.page_bytes, host.nbytes) == (288, 32 * 288)
    indexer = NSAIndexerPoolHost(make_indexer_pool(), host, "page_first")
    assert (indexer.page_num, indexer.size, indexer.page_bytes) == (32, 128, 96)
    assert DSAIndexerPoolHost is NSAIndexerPoolHost


def test_the_pool_of_a_sparse_model_has_both_host_pools() -> None:
    both = NSATokenToKVPool(64, 4, 6, torch.bfloat16, 2, 3, "cpu", 5, kv_cache_dim=8)
    rows = MLATokenToKVPoolHost(both, 2.0, 0, PAGE, "page_first")
    keys = NSAIndexerPoolHost(both, rows, "page_first")
    assert (rows.page_num, rows.page_bytes) == (32, 4 * 3 * 8 * 2)
    assert (keys.page_num, keys.page_bytes) == (32, 4 * 3 * 5 * 2)


@MAKERS
def test_an_unknown_layout_is_refused(make: Callable[..., PagedDevicePool]) -> None:
    with pytest.raises(ValueError, match="unknown layout 'page_last'; use auto or one of: layer_f"):
        host_of(make(), "page_last")


def test_an_indexer_with_longer_pages_than_its_anchor_is_refused() -> None:
    primary = MLATokenToKVPoolHost(make_mla_pool(), 2.0, 0, PAGE, "page_first")
    longer = NSAIndexerPool(IndexerSpec.of((0,), 6, torch.bfloat16), 64, 8, "cpu")
    with pytest.raises(ValueError, match=r"pages of 8 tokens .* pages of 4"):
        NSAIndexerPoolHost(longer, primary, "page_first")
