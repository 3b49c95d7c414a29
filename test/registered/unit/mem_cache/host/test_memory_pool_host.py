"""Host pools: accounting of pages, bit-exact copies in every layout, checked addresses."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rigs.stores.host_pools import (
    PAGE,
    copy_to_device,
    copy_to_host,
    device_bytes,
    make_device_pool,
    make_host_pool,
    page_slots,
)
from sglang.srt.environ import envs
from sglang.srt.mem_cache.host.host_layout import HostLayout, page_byte_order
from sglang.srt.mem_cache.host.host_page_list import HostPageList
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

LAYOUTS = [layout.value for layout in HostLayout]
ZERO_COPY = [layout for layout in LAYOUTS if layout != "layer_first"]


# -- pages ---------------------------------------------------------------------------------------


def test_slots_are_whole_ascending_pages() -> None:
    pages = HostPageList(4, 4)
    first = pages.alloc(8)
    assert first is not None
    assert first.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert pages.alloc(12) is None
    assert pages.available_size() == 8
    assert pages.free(first[4:]) == 4
    again = pages.alloc(12)
    assert again is not None
    assert sorted(again.tolist()) == list(range(4, 16))
    pages.check_integrity()


def test_a_part_of_a_page_is_refused() -> None:
    pages = HostPageList(4, 4)
    with pytest.raises(ValueError, match="need_tokens=6"):
        pages.alloc(6)
    held = pages.alloc(8)
    assert held is not None
    for wrong in (held[:2], held[1:5], held.flip(0), held.to(torch.int32), held + 12):
        with pytest.raises(ValueError, match="host_indices"):
            pages.free(wrong)
    pages.check_integrity()
    assert pages.available_size() == 8


def test_double_free_names_the_pages() -> None:
    pages = HostPageList(4, 4)
    held = pages.alloc(12)
    assert held is not None
    pages.free(held[4:8])
    with pytest.raises(AssertionError, match=r"double free of host pages \[1\]"):
        pages.free(held)
    with pytest.raises(AssertionError, match="double free"):
        pages.free(torch.cat([held[:4], held[:4]]))
    assert pages.available_size() == 8
    pages.check_integrity()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_pages_are_accounted_for_in_any_order(steps: list[tuple[bool, int]]) -> None:
    pages = HostPageList(8, 2)
    held: list[torch.Tensor] = []
    for is_alloc, number in steps:
        if is_alloc:
            slots = pages.alloc(number * 2)
            if slots is not None:
                held.append(slots)
        elif held:
            pages.free(held.pop(number % len(held)))
        owned = torch.cat(held) if held else torch.empty(0)
        assert len(set(owned.tolist())) == len(owned) == 16 - pages.available_size()
        pages.check_integrity()


# -- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_size_in_gb_wins_over_the_ratio(layout: str) -> None:
    device = make_device_pool(num_pages=16)
    assert make_host_pool(device, "page_first", ratio=2.0).size == 128
    token_bytes = 2 * 2 * 4 * 3 * 2  # K and V, heads, dim, layers, bf16
    host = MHATokenToKVPoolHost(device, 2.0, 41 * token_bytes / 1e9, PAGE, layout)
    assert (host.size, host.page_num, host.page_bytes) == (40, 10, PAGE * token_bytes)
    assert sum(buffer.nbytes for buffer in host.get_hybrid_pool_buffer()) == 40 * token_bytes


def test_sizes_that_cannot_work_name_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    device = make_device_pool()
    for ratio, size in ((0.0, 0.0), (2.0, 1e-9)):
        with pytest.raises(ValueError, match=r"--hicache-size.*--hicache-ratio"):
            MHATokenToKVPoolHost(device, ratio, size, PAGE, "layer_first")
    with pytest.raises(ValueError, match="--hicache-size or --hicache-ratio"):
        MHATokenToKVPoolHost(device, 2.0, 1e6, PAGE, "layer_first")
    monkeypatch.setenv(envs.HICACHE_HOST_MEMORY_RESERVE_BYTES.name, "1000tb")
    with pytest.raises(ValueError, match="HICACHE_HOST_MEMORY_RESERVE_BYTES"):
        make_host_pool(device, "layer_first")


def test_unknown_names_are_refused() -> None:
    device = make_device_pool()
    with pytest.raises(ValueError, match="unknown layout"):
        make_host_pool(device, "page_last")
    with pytest.raises(ValueError, match="allocator_type"):
        MHATokenToKVPoolHost(device, 2.0, 0, PAGE, "page_first", allocator_type="malloc")
    host = make_host_pool(device, "page_first")
    slots = page_slots([1])
    with pytest.raises(ValueError, match="io_backend kernel"):
        host.backup_from_device_all_layer(device, slots, slots, "kernel")


# -- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("v_head_dim", [4, 6])
@pytest.mark.parametrize("pages", [[3, 1, 15, 8], [5, 6, 7], [9]])
def test_device_host_device_is_bit_exact(
    layout: str, dtype: torch.dtype, v_head_dim: int, pages: list[int]
) -> None:
    device = make_device_pool(dtype=dtype, v_head_dim=v_head_dim)
    other = make_device_pool(dtype=dtype, v_head_dim=v_head_dim, seed=1)
    untouched = device_bytes(other, page_slots([0, 2]))
    host = make_host_pool(device, layout)
    host.alloc(3 * PAGE)
    copy_to_host(device, host, [0])
    slots = copy_to_host(device, host, pages)
    targets = [14, 4, 10, 11][: len(pages)]
    copy_to_device(host, other, slots, targets)
    assert device_bytes(other, page_slots(targets)) == device_bytes(device, page_slots(pages))
    assert device_bytes(other, page_slots([0, 2])) == untouched


def test_one_layer_is_loaded_at_a_time() -> None:
    device, other = make_device_pool(), make_device_pool(seed=1)
    host = make_host_pool(device, "page_first_direct")
    slots = copy_to_host(device, host, [2])
    before = [buffer.clone() for buffer in other.k_buffer]
    host.load_to_device_per_layer(other, slots, page_slots([5]), 1, "direct")
    bits = torch.int16
    assert torch.equal(other.k_buffer[1][20:24].view(bits), device.k_buffer[1][8:12].view(bits))
    for layer in (0, 2):
        assert torch.equal(other.k_buffer[layer].view(bits), before[layer].view(bits))


def test_unlike_or_outside_indices_are_refused() -> None:
    device = make_device_pool()
    host = make_host_pool(device, "layer_first")
    with pytest.raises(ValueError, match="4 host_indices for 8"):
        host.backup_from_device_all_layer(device, page_slots([0]), page_slots([0, 1]), "direct")
    with pytest.raises(ValueError, match="leave the pool"):
        host.load_to_device_per_layer(device, page_slots([0]), page_slots([17]), 0, "direct")
    with pytest.raises(ValueError, match="leave the pool"):
        host.load_to_device_per_layer(device, page_slots([-1]), page_slots([1]), 0, "direct")


# -- bytes of pages ------------------------------------------------------------------------------


def expected_page(device_page: int, layout: str) -> torch.Tensor:
    device = make_device_pool()
    slots = page_slots([device_page])
    parts = []
    for buffers in (device.k_buffer, device.v_buffer):
        layers = torch.stack([buffer[slots] for buffer in buffers])  # [layer, token, head, dim]
        token_major = page_byte_order(layout) == "token_major"
        parts.append((layers.transpose(0, 1) if token_major else layers).reshape(-1))
    return torch.cat(parts).view(torch.uint8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_bytes_follow_the_byte_order(layout: str) -> None:
    device = make_device_pool()
    host = make_host_pool(device, layout)
    slots = copy_to_host(device, host, [7, 3])
    flat = host.get_data_page(int(slots[PAGE]))
    assert flat.dtype == torch.bfloat16
    assert torch.equal(flat.view(torch.uint8), expected_page(3, layout))
    shaped = host.get_data_page(int(slots[PAGE]), flat=False)
    assert shaped.shape == ((2, 4, 3, 2, 4) if layout == "page_first" else (2, 3, 4, 2, 4))
    host.set_from_flat_data_page(40, flat)
    assert torch.equal(host.get_data_page(40).view(torch.uint8), flat.view(torch.uint8))
    with pytest.raises(ValueError, match="data_page"):
        host.set_from_flat_data_page(40, flat[1:])
    assert host.get_dummy_flat_data_page().nbytes == host.page_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pages", [[6, 2, 9], [4, 5]])
def test_gathered_pages_scatter_back(layout: str, pages: list[int]) -> None:
    device = make_device_pool()
    host = make_host_pool(device, layout)
    slots = copy_to_host(device, host, pages)
    # Rows with a gap, as a staging page with its trailer has.
    rows = torch.zeros((len(pages), host.page_bytes + 32), dtype=torch.uint8)
    host.gather_pages(slots, rows[:, : host.page_bytes])
    for row, page in zip(rows, pages, strict=True):
        assert torch.equal(row[: host.page_bytes], expected_page(page, layout))
        assert not row[host.page_bytes :].any()
    copies = host.alloc(len(slots))
    assert copies is not None
    host.scatter_pages(copies, rows[:, : host.page_bytes])
    other = make_device_pool(seed=1)
    copy_to_device(host, other, copies, pages)
    assert device_bytes(other, page_slots(pages)) == device_bytes(device, page_slots(pages))


@pytest.mark.parametrize("layout", ZERO_COPY)
@pytest.mark.parametrize("v_head_dim", [4, 6])
def test_addresses_and_views_are_the_pages(layout: str, v_head_dim: int) -> None:
    device = make_device_pool(v_head_dim=v_head_dim)
    host = make_host_pool(device, layout)
    slots = copy_to_host(device, host, [7, 3, 4])[[0, 1, 2, 3, 8, 9, 10, 11]]
    ptrs, sizes = host.get_page_buffer_meta(slots)
    views = host.get_page_views(slots)
    assert len(ptrs) == len(sizes) == 4
    for page in range(2):
        k_then_v = range(2 * page, 2 * page + 2)
        by_address = [ctypes.string_at(ptrs[part], sizes[part]) for part in k_then_v]
        assert by_address == [bytes(view) for view in views[page]]
        flat = host.get_data_page(int(slots[page * PAGE])).view(torch.uint8)
        assert b"".join(by_address) == flat.numpy().tobytes()


@pytest.mark.parametrize("wrong", [[-1], [32], [0, 99]])
def test_addresses_outside_the_pool_never_leave_python(wrong: list[int]) -> None:
    host = make_host_pool(make_device_pool(), "page_first")
    with pytest.raises(ValueError, match="leave the pool"):
        host.get_page_buffer_meta(page_slots(wrong))
    with pytest.raises(ValueError, match="leave the pool"):
        host.get_page_views(page_slots(wrong))
    with pytest.raises(ValueError, match="not whole pages"):
        host.get_page_buffer_meta(page_slots([2]) + 1)


def test_layer_first_has_no_page_addresses() -> None:
    host = make_host_pool(make_device_pool(), "layer_first")
    assert not host.is_zero_copy
    with pytest.raises(ValueError, match="gather_pages"):
        host.get_page_buffer_meta(page_slots([0]))


def test_kv_split_has_two_buffers() -> None:
    buffers = {
        layout: len(make_host_pool(make_device_pool(), layout).get_hybrid_pool_buffer())
        for layout in LAYOUTS
    }
    assert buffers == {
        "layer_first": 1,
        "page_first": 1,
        "page_first_direct": 1,
        "page_first_kv_split": 2,
    }
