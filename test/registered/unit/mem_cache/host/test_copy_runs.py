"""Lists of plain copies: what they move and merge. Carried out by memmove here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rigs.caches.mamba_pools import make_mamba_pool, mamba_spec
from rigs.caches.mla_pools import make_mla_pool
from rigs.caches.plain_copies import LAYERS, LAYOUTS, do, do_grids, host_of, parts_of
from rigs.stores.host_pools import (
    PAGE,
    copy_to_device,
    device_bytes,
    make_device_pool,
    make_host_pool,
    page_slots,
)
from sglang.srt.constants import KIB
from sglang.srt.mem_cache.device.mla_pool import MLATokenToKVPool
from sglang.srt.mem_cache.host import host_copy_cuda
from sglang.srt.mem_cache.host.copy_runs import (
    HostRows,
    PartRows,
    grids_from_pool,
    have_grids,
    runs_from_pool,
)
from sglang.srt.mem_cache.host.host_copy_cuda import CudaPageCopier, EngineUse
from sglang.srt.mem_cache.host.pool_kinds import MambaPoolHost, MLATokenToKVPoolHost
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

ALL = range(LAYERS)


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct", "page_first_kv_split"])
@pytest.mark.parametrize("v_head_dim", [None, 6])
def test_runs_from_the_pool_are_a_page_of_a_layer_each(layout: str, v_head_dim: int | None) -> None:
    device = make_device_pool(v_head_dim=v_head_dim)
    host = make_host_pool(device, layout)
    pages, into = [3, 1, 15, 8], [4, 9, 2, 6]
    runs = runs_from_pool(parts_of(host, device), PAGE, np.array(into), np.array(pages), ALL)
    assert len(runs) == 2 * LAYERS * len(pages)
    do(runs)
    other = make_device_pool(v_head_dim=v_head_dim, seed=1)
    copy_to_device(host, other, page_slots(into), pages)
    assert device_bytes(other, page_slots(pages)) == device_bytes(device, page_slots(pages))


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct", "page_first_kv_split"])
@pytest.mark.parametrize("v_head_dim", [None, 6])
def test_a_grid_from_the_pool_is_a_page_of_all_layers(layout: str, v_head_dim: int | None) -> None:
    device = make_device_pool(v_head_dim=v_head_dim)
    host = make_host_pool(device, layout)
    pages, into = [3, 1, 15, 8], [4, 9, 2, 6]
    parts = parts_of(host, device)
    assert all(have_grids(part) for part in parts)
    grids = grids_from_pool(parts, PAGE, np.array(into), np.array(pages), ALL)
    assert [len(grid.sources) for grid in grids] == [len(pages)] * 2
    do_grids(grids)
    other = make_device_pool(v_head_dim=v_head_dim, seed=1)
    copy_to_device(host, other, page_slots(into), pages)
    assert device_bytes(other, page_slots(pages)) == device_bytes(device, page_slots(pages))


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct", "page_first_kv_split"])
def test_neighbouring_pages_from_the_pool_are_a_grid_for_each_layer(layout: str) -> None:
    device = make_device_pool()
    host = make_host_pool(device, layout)
    pages, into = [3, 4, 5, 6, 8, 9, 10, 11, 1], [9, 10, 11, 12, 2, 3, 4, 20, 8]
    grids = grids_from_pool(parts_of(host, device), PAGE, np.array(into), np.array(pages), ALL)
    # Four pages are more than three layers. The next three are not; after them the host goes on
    # elsewhere.
    assert [(len(grid.sources), grid.runs) for grid in grids] == [(5, LAYERS), (LAYERS, 4)] * 2
    do_grids(grids)
    other = make_device_pool(seed=1)
    copy_to_device(host, other, page_slots(into), pages)
    assert device_bytes(other, page_slots(pages)) == device_bytes(device, page_slots(pages))


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_a_grid_from_the_pool_is_a_state_of_all_layers(layout: str) -> None:
    device, other = make_mamba_pool(), make_mamba_pool(seed=1)
    host = MambaPoolHost.make(device, page_num=8, layout=layout)
    states, into = torch.tensor([3, 1, 15]), torch.tensor([4, 7, 0])
    parts = parts_of(host, device)
    assert all(have_grids(part) for part in parts)
    grids = grids_from_pool(parts, 1, into.numpy(), states.numpy(), ALL)
    assert [(len(grid.sources), grid.runs) for grid in grids] == [(3, 3)] * 2
    do_grids(grids)
    load = host.begin_load(other, into, states, "direct")
    for layer in range(device.layer_num):
        load.issue(layer)
    assert device_bytes(other, states) == device_bytes(device, states)


@pytest.mark.parametrize("by_grids", [True, False])
def test_some_layers_of_states_come_back(by_grids: bool) -> None:
    device, other = make_mamba_pool(), make_mamba_pool(seed=1)
    host = MambaPoolHost.make(device, page_num=8, layout="page_first_direct")
    pages, slots = np.array([4, 5, 0]), np.array([3, 4, 15])
    do_grids(grids_from_pool(parts_of(host, device), 1, pages, slots, ALL))
    elsewhere = torch.tensor([slot for slot in range(16) if slot not in slots])
    untouched = device_bytes(other, elsewhere)
    for layers in (range(1), range(1, 3)):
        copies = parts_of(host, other), 1, pages, slots, layers
        if by_grids:
            do_grids([one.back() for one in grids_from_pool(*copies)])
        else:
            do(runs_from_pool(*copies).back())
    states = torch.from_numpy(slots)
    assert device_bytes(other, states) == device_bytes(device, states)
    assert device_bytes(other, elsewhere) == untouched


@pytest.mark.parametrize(("dim", "straight"), [(112, True), (3, False)])
def test_few_states_go_straight_between_the_pools_though_their_conv_states_are_short(
    monkeypatch: pytest.MonkeyPatch, dim: int, straight: bool
) -> None:
    device = make_mamba_pool(spec=mamba_spec(heads=8, dim=dim))
    host = MambaPoolHost.make(device, page_num=2, layout="page_first_direct")
    copier = CudaPageCopier(host._paired_with(device))
    temporal, conv = (part.rows.row_bytes for part in copier.parts)
    assert conv < 64 * KIB and (temporal > 64 * KIB) is straight
    assert copier.prefers_cpu_slots("direct") is straight
    assert copier.loads_straight(4, "direct") is straight
    assert not copier.loads_straight(5, "direct"), "two grids for each"
    copier._has_grids = False
    monkeypatch.setattr(host_copy_cuda, "_LONG_RUN_BYTES", 64 * KIB)
    assert copier.loads_straight(21, "direct") is straight, "six runs for each"
    assert not copier.loads_straight(22, "direct")


def test_grids_need_layers_that_are_equally_far_apart_and_not_too_far() -> None:
    device = make_device_pool()
    part, _ = parts_of(make_host_pool(device, "page_first_direct"), device)
    first, second, *_ = part.device_addresses
    assert part.device_layer_stride == second - first
    assert not have_grids(replace(part, device_addresses=(first, second, second + 16)))
    assert not have_grids(replace(part, device_addresses=(first, first + 2**31)))
    one_layer = replace(part, device_addresses=(first,))
    assert one_layer.device_layer_stride == 0
    assert have_grids(one_layer)


def test_runs_from_the_pool_need_a_page_of_a_layer_in_one_piece() -> None:
    device = make_device_pool()
    parts = parts_of(make_host_pool(device, "page_first"), device)
    with pytest.raises(AssertionError, match=r"is one run$"):
        runs_from_pool(parts, PAGE, np.array([1]), np.array([1]), ALL)
    rows = make_mla_pool()
    cut = parts_of(host_of(rows, "page_first_kv_split"), rows)
    with pytest.raises(AssertionError, match="one run on the device"):
        runs_from_pool(cut, PAGE, np.array([1]), np.array([1]), ALL)


def test_columns_of_rows_lie_a_whole_row_apart_on_the_device() -> None:
    device = make_mla_pool()
    whole, (latent, rope) = (parts_of(host_of(device, layout), device) for layout in LAYOUTS[-2:])
    assert [(one.rows.row_bytes, one.device_stride) for one in (*whole, latent, rope)] == [
        (24, 24), (20, 24), (4, 24),
    ]  # fmt: skip
    assert [whole[0].has_device_runs, latent.has_device_runs] == [True, False]
    first = device.kv_buffer[0].data_ptr()
    assert (latent.device_addresses[0], rope.device_addresses[0]) == (first, first + 20)


@pytest.mark.parametrize(("layout", "straight"), [(LAYOUTS[-2], True), (LAYOUTS[-1], False)])
def test_copy_engines_take_no_columns_straight_from_the_pool(layout: str, straight: bool) -> None:
    """Long pages of latent rows do go straight from the pool, where rows are whole."""
    device = MLATokenToKVPool(128, 64, torch.bfloat16, 1024, 1024, 1, "cpu")
    host = MLATokenToKVPoolHost.make(device, page_num=2, layout=layout)
    copier = CudaPageCopier(host._paired_with(device))
    assert copier.prefers_cpu_slots("direct") is straight
    assert copier.engine_use["direct"].backup


@pytest.mark.parametrize(
    ("layout", "page_size", "io_backend", "use"),
    [
        ("page_first_direct", 64, "direct", EngineUse(True, True)),
        ("page_first_direct", 1, "direct", EngineUse(True, True, load_of_one_layer=False)),
        ("page_first_direct", 32, "kernel", EngineUse(True, True, load_of_one_layer=False)),
        ("layer_first", 64, "kernel", EngineUse(True, False)),
        ("layer_first", 64, "direct", EngineUse(True, False)),
        ("layer_first", 32, "kernel", EngineUse(False, False)),
        ("page_first", 64, "kernel", EngineUse(False, True)),
        ("page_first", 4, "kernel", EngineUse(False, True, load_of_one_layer=False)),
        ("page_first", 2, "kernel", EngineUse(False, False, load_of_one_layer=False)),
    ],
)
def test_copy_engines_get_what_they_do_better(
    layout: str, page_size: int, io_backend: str, use: EngineUse
) -> None:
    row, layers = 2048, 36
    layer, page = page_size * row, layers * page_size * row
    page_tokens, page_stride, token_stride, layer_stride = {
        "layer_first": (1, row, row, 1 << 25),
        "page_first": (1, layers * row, layers * row, row),
        "page_first_direct": (page_size, page, row if page_size > 1 else page, layer),
    }[layout]
    rows = HostRows(row, page_tokens, page_stride, token_stride, layer_stride, alignment=16)
    part = PartRows(rows, 0, tuple(range(layers)), row)
    assert EngineUse.of([part, part], page_size, io_backend) == use
