"""Pages whose items stand for several tokens, in host pools: copies, bytes and checksums."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
import xxhash

from sglang.srt.mem_cache.device.row_pool import RowPool, RowSpec
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.srt.mem_cache.host.copy_runs import part_rows, runs_from_pool
from sglang.srt.mem_cache.host.host_layout import HostLayout
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

PAGE, PAGES, LAYERS = 256, 6, 3
LAYOUTS = [one.value for one in HostLayout]


def make_pool(stride: int) -> RowPool:
    """Rows of 1 KB with a number for each element."""
    spec = RowSpec.of((0, 2, 5), 512, torch.bfloat16, stride=stride, name=PoolName.C128)
    pool = RowPool.from_spec(spec, PAGE * PAGES, PAGE, "cpu")
    for number, layer in enumerate(pool.row_buffer):
        raw = layer.view(torch.int16)
        raw.copy_(torch.arange(raw.numel()).view_as(raw) % 30_011 + number)
    return pool


def slots_of(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def page_of(pool: RowPool, layer: int, page: int) -> torch.Tensor:
    size = pool.page_items
    return pool.row_buffer[layer][page * size : (page + 1) * size].view(torch.int16)


@pytest.mark.parametrize("stride", [4, 128, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_bit_by_bit(layout: str, stride: int) -> None:
    source, sink = make_pool(stride), make_pool(stride)
    host = HostKVCache.make(source, page_num=4, layout=layout)
    assert (host.size, host.page_items) == (4 * PAGE, PAGE // stride)
    assert host.page_bytes == LAYERS * PAGE // stride * 1024
    assert sum(buffer.nbytes for buffer in host.kv_buffer) == 4 * host.page_bytes == host.nbytes
    host.backup_from_device_all_layer(source, slots_of(3, 1), slots_of(5, 2), "direct")
    for rows in sink.row_buffer:
        rows.zero_()
    for layer in range(LAYERS):
        host.load_to_device_per_layer(sink, slots_of(1, 3), slots_of(1, 6), layer, "direct")
    for layer in range(LAYERS):
        assert torch.equal(page_of(sink, layer, 1), page_of(source, layer, 2))
        assert torch.equal(page_of(sink, layer, 6), page_of(source, layer, 5))
        assert not page_of(sink, layer, 2).any() and not page_of(sink, layer, 5).any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_has_the_bytes_of_its_items_and_their_checksum(layout: str) -> None:
    pool = make_pool(128)
    host = HostKVCache.make(pool, page_num=2, layout=layout)
    host.backup_from_device_all_layer(pool, slots_of(1), slots_of(4), "direct")
    flat = torch.zeros((1, host.page_bytes), dtype=torch.uint8)
    host.gather_pages(slots_of(1), flat)
    layers = torch.stack([page_of(pool, layer, 4) for layer in range(LAYERS)])
    in_order = layers.transpose(0, 1) if layout == HostLayout.PAGE_FIRST else layers
    assert torch.equal(flat[0], in_order.contiguous().view(torch.uint8).flatten())
    hasher = host.hasher_of(pool)
    assert hasher is not None
    (digests,) = hasher.digests(pool.items_of(slots_of(4))).wait()
    assert digests is not None
    assert digests.numpy().tobytes() == xxhash.xxh3_128_digest(flat.numpy().tobytes())
    other = HostKVCache.make(pool, page_num=2, layout=layout)
    other.scatter_pages(slots_of(0), flat)
    assert torch.equal(other.get_data_page(0), host.get_data_page(PAGE))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_of_copy_engines_are_those_of_items(layout: str) -> None:
    """The addresses that a GPU's copies use, moved here by the CPU."""
    pool = make_pool(128)
    host = HostKVCache.make(pool, page_num=4, layout=layout)
    pair = host._paired_with(pool)
    parts = [part_rows(a, b) for a, b in zip(pair.host, pair.device, strict=True)]
    assert parts[0].rows.row_bytes == 1024 and parts[0].rows.alignment == 16
    if not parts[0].rows.has_page_runs(pair.page_items):
        pytest.skip("tokens of a page do not adjoin: kernels copy them")
    runs = runs_from_pool(parts, pair.page_items, np.array([3, 0]), np.array([5, 2]), range(LAYERS))
    for target, source, size in zip(*_columns(runs), strict=True):
        ctypes.memmove(target, source, size)
    for page, own in ((3, 5), (0, 2)):
        want = HostKVCache.make(pool, page_num=4, layout=layout)
        want.backup_from_device_all_layer(pool, slots_of(page), slots_of(own), "direct")
        assert torch.equal(host.get_data_page(page * PAGE), want.get_data_page(page * PAGE))


def _columns(runs: object) -> list[list[int]]:
    return [getattr(runs, name).tolist() for name in ("destinations", "sources", "sizes")]


@pytest.mark.parametrize("stride", [1, 128])
def test_slots_that_are_no_pages_are_refused(stride: int) -> None:
    pool = make_pool(stride)
    host = HostKVCache.make(pool, page_num=4, layout="page_first")
    for bad, message in (
        (slots_of(1) + 2, "aligned to 256"),
        (slots_of(1)[:128], "no multiple of page_size=256"),
        (slots_of(7), "leave the pool"),
    ):
        with pytest.raises(ValueError, match=message):
            host.backup_from_device_all_layer(pool, slots_of(1), bad, "direct") if len(
                bad
            ) == PAGE else host.check_pages(bad)
    with pytest.raises(ValueError, match="256 host_indices for 512 device_indices"):
        host.backup_from_device_all_layer(pool, slots_of(1), slots_of(1, 2), "direct")


def test_a_page_of_tokens_is_described_as_before_strides() -> None:
    """Part of the namespace: objects of earlier builds stay readable."""
    tokens = HostKVCache.make(make_pool(1), page_num=1, layout="page_first")
    assert tokens.page_format == "torch.bfloat16 3 256 786432"
    rows = HostKVCache.make(make_pool(128), page_num=1, layout="page_first")
    assert rows.page_format == "torch.bfloat16 3 2 6144"
