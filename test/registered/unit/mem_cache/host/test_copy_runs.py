"""Lists of plain copies: what they move and merge. Carried out by memmove here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from rigs.caches.mamba_pools import make_mamba_pool, mamba_spec
from rigs.caches.mla_pools import make_mla_pool
from rigs.call_counts import CallCounts
from rigs.stores.host_pools import (
    PAGE,
    copy_to_device,
    device_bytes,
    make_device_pool,
    make_host_pool,
    page_slots,
)
from sglang.srt.constants import KIB
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool, PagedDevicePool
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.device.mla_pool import MLATokenToKVPool
from sglang.srt.mem_cache.host import copy_runs
from sglang.srt.mem_cache.host.copy_runs import (
    CopyGrids,
    CopyRuns,
    HostRows,
    PageRuns,
    PartRows,
    grids_from_pool,
    have_grids,
    join_runs,
    part_rows,
    runs_from_pool,
)
from sglang.srt.mem_cache.host.host_copy_cuda import CudaPageCopier, EngineUse
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.host.pool_kinds import MambaPoolHost, MLATokenToKVPoolHost
from sglang.srt.mem_cache.host.staged_copy import StagedLoadTuning
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

LAYERS = 3
ROW = 2 * 4 * 2  # heads, dim, bf16
LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_first_kv_split"]


def unlike_heads(seed: int = 0) -> PagedDevicePool:
    return make_device_pool(v_head_dim=6, seed=seed)


KINDS = [make_device_pool, unlike_heads, make_mla_pool]


def host_of(device: PagedDevicePool, layout: str) -> HostKVCache:
    if isinstance(device, MLATokenToKVPool):
        return MLATokenToKVPoolHost.make(device, page_num=32, layout=layout)
    assert isinstance(device, MHATokenToKVPool)
    return make_host_pool(device, layout)


def parts_of(host: HostKVCache, device: BaseDevicePool) -> list[PartRows]:
    pools = host._paired_with(device)
    return [part_rows(*part) for part in zip(pools.host, pools.device, strict=True)]


def do(runs: CopyRuns) -> None:
    for to, source, size in zip(
        runs.destinations.tolist(), runs.sources.tolist(), runs.sizes.tolist(), strict=True
    ):
        ctypes.memmove(to, source, size)


def do_grids(grids: list[CopyGrids]) -> None:
    for grid in grids:
        for source, to in zip(grid.sources.tolist(), grid.destinations.tolist(), strict=True):
            for run in range(grid.runs):
                begin = source + run * grid.source_stride
                ctypes.memmove(to + run * grid.destination_stride, begin, grid.run_bytes)


def move_rows(
    runs: PageRuns, part: PartRows, buffer: int, pages: list[int], layers: range, *, to_buffer: bool
) -> None:
    """Move rows between a buffer and a device pool one by one, as the kernel does."""
    rows = runs.buffer_rows
    for place in range(len(pages) * PAGE):
        page, token = divmod(place, rows.page_tokens)
        slot = pages[place // PAGE] * PAGE + place % PAGE
        for layer in layers:
            at = buffer + page * rows.page_stride + token * rows.token_stride
            at += (layer - layers.start) * rows.layer_stride
            on_device = part.device_addresses[layer] + slot * part.device_stride
            to, source = (at, on_device) if to_buffer else (on_device, at)
            ctypes.memmove(to, source, rows.row_bytes)


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct", "page_first_kv_split"])
@pytest.mark.parametrize("v_head_dim", [None, 6])
def test_runs_from_the_pool_are_a_page_of_a_layer_each(layout: str, v_head_dim: int | None) -> None:
    device = make_device_pool(v_head_dim=v_head_dim)
    host = make_host_pool(device, layout)
    pages, into = [3, 1, 15, 8], [4, 9, 2, 6]
    runs = runs_from_pool(parts_of(host, device), PAGE, np.array(into), np.array(pages))
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
    grids = grids_from_pool(parts, PAGE, np.array(into), np.array(pages))
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
    grids = grids_from_pool(parts_of(host, device), PAGE, np.array(into), np.array(pages))
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
    grids = grids_from_pool(parts, 1, into.numpy(), states.numpy())
    assert [(len(grid.sources), grid.runs) for grid in grids] == [(3, 3)] * 2
    do_grids(grids)
    load = host.begin_load(other, into, states, "direct")
    for layer in range(device.layer_num):
        load.issue(layer)
    assert device_bytes(other, states) == device_bytes(device, states)


@pytest.mark.parametrize(("dim", "straight"), [(112, True), (3, False)])
def test_states_go_straight_from_the_pool_though_their_conv_states_are_short(
    dim: int, straight: bool
) -> None:
    device = make_mamba_pool(spec=mamba_spec(heads=8, dim=dim))
    host = MambaPoolHost.make(device, page_num=2, layout="page_first_direct")
    copier = CudaPageCopier(host._paired_with(device))
    temporal, conv = (part.rows.row_bytes for part in copier.parts)
    assert conv < 64 * KIB and (temporal > 64 * KIB) is straight
    assert copier.prefers_cpu_slots("direct") is straight


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
        runs_from_pool(parts, PAGE, np.array([1]), np.array([1]))
    rows = make_mla_pool()
    cut = parts_of(host_of(rows, "page_first_kv_split"), rows)
    with pytest.raises(AssertionError, match="one run on the device"):
        runs_from_pool(cut, PAGE, np.array([1]), np.array([1]))


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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("pages", [[3, 1, 15, 8], [5, 6, 7], [9], [2, 3, 9, 10]])
@pytest.mark.parametrize("layers_at_once", [1, 2, 3])
@pytest.mark.parametrize("grid_pages", [2, 32])
def test_runs_move_what_the_layout_says(
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    make: Callable[..., PagedDevicePool],
    pages: list[int],
    layers_at_once: int,
    grid_pages: int,
) -> None:
    monkeypatch.setattr(copy_runs, "_GRID_PAGES", grid_pages)
    if layout == "page_first":
        layers_at_once = LAYERS
    device = make()
    host = host_of(device, layout)
    into = [4, 9, 2, 6][: len(pages)]
    buffer = torch.zeros(1 << 16, dtype=torch.uint8)
    offset, start = 64, buffer.data_ptr() + 64
    for part in parts_of(host, device):
        runs = PageRuns(part, PAGE, LAYERS, 7)
        assert offset + 7 * runs.page_bytes <= len(buffer)
        move_rows(runs, part, start, into, range(LAYERS), to_buffer=True)
        do(runs.runs(np.array(pages), LAYERS, offset).to_host(buffer.data_ptr()))
    # The CPU's own copy reads the pool by its layout.
    other = make(seed=1)
    copy_to_device(host, other, page_slots(pages), into)
    wanted = page_slots(into)
    assert device_bytes(other, wanted) == device_bytes(device, wanted)

    third = make(seed=2)
    untouched = device_bytes(third, page_slots([0, 3]))
    for part in parts_of(host, third):
        runs = PageRuns(part, PAGE, layers_at_once, 7)
        for first in range(0, LAYERS, layers_at_once):
            layers = range(first, min(first + layers_at_once, LAYERS))
            buffer.fill_(0)
            grids, is_left = runs.grids(np.array(pages), len(layers), offset)
            do_grids([grid.to_buffer(buffer.data_ptr(), first) for grid in grids])
            found = runs.runs(np.array(pages), len(layers), offset, is_left)
            do(found.to_buffer(buffer.data_ptr(), first))
            move_rows(runs, part, start, into, layers, to_buffer=False)
    assert device_bytes(third, wanted) == device_bytes(device, wanted)
    assert device_bytes(third, page_slots([0, 3])) == untouched


def test_pages_that_adjoin_on_both_sides_are_one_copy() -> None:
    device = make_device_pool()
    pages = np.array([5, 6, 7, 1, 2, 9])
    page, layer = LAYERS * PAGE * ROW, PAGE * ROW

    def sizes(layout: str, layers: int, at_once: int) -> list[int]:
        part = parts_of(make_host_pool(device, layout), device)[0]
        found: list[int] = PageRuns(part, PAGE, at_once, 8).runs(pages, layers, 0).sizes.tolist()
        return found

    assert sizes("page_first", LAYERS, LAYERS) == [3 * page, 2 * page, page]
    assert sizes("page_first_direct", LAYERS, LAYERS) == [3 * page, 2 * page, page]
    assert sizes("page_first_direct", 2, 2) == [2 * layer] * 6
    assert sizes("page_first_direct", 1, 2) == [layer] * 6
    assert sizes("layer_first", 2, 2) == [3 * layer, 2 * layer, layer] * 2


def test_neighbouring_pages_of_some_layers_are_one_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_runs, "_GRID_PAGES", 3)
    device = make_device_pool()
    pages = np.array([5, 6, 7, 8, 1, 2, 9, 3, 4, 5])

    def grids(layout: str, layers: int) -> tuple[list[int], list[bool] | None]:
        part = parts_of(make_host_pool(device, layout), device)[0]
        found, is_left = PageRuns(part, PAGE, LAYERS, 10).grids(pages, layers, 0)
        return [grid.runs for grid in found], None if is_left is None else is_left.tolist()

    left = [False] * 4 + [True] * 3 + [False] * 3
    assert grids("page_first_direct", 2) == ([4, 3], left)
    assert grids("page_first_direct", LAYERS) == ([], None), "whole pages are one run"
    assert grids("layer_first", 2) == ([], None), "each layer is one run"
    far = parts_of(make_host_pool(device, "page_first_direct"), device)[0].rows
    monkeypatch.setattr(copy_runs, "MAX_STRIDE", far.page_stride - 1)
    assert grids("page_first_direct", 2) == ([], None), "pages are too far apart"


def test_pages_that_are_in_grids_cost_no_list_of_runs() -> None:
    device = make_device_pool()
    part = parts_of(make_host_pool(device, "page_first_direct"), device)[0]
    runs, pages = PageRuns(part, PAGE, 2, 8), np.arange(8)
    is_left = np.zeros(8, dtype=np.bool_)
    with CallCounts() as calls:
        found = runs.runs(pages, 2, 0, is_left)
    assert len(found.to_buffer(0, 0)) == 0
    assert calls.total < 10


def test_token_major_pages_are_not_divided() -> None:
    device = make_device_pool()
    part = parts_of(make_host_pool(device, "page_first"), device)[0]
    with pytest.raises(ValueError, match="copy engines do not move"):
        PageRuns(part, PAGE, LAYERS - 1, 8)


def test_nothing_is_no_copy() -> None:
    device = make_device_pool()
    none = np.array([], dtype=np.int64)
    for layout in LAYOUTS:
        parts = parts_of(make_host_pool(device, layout), device)
        runs = [PageRuns(part, PAGE, LAYERS, 8).runs(none, LAYERS, 0) for part in parts]
        assert len(join_runs(runs).to_buffer(0, 0)) == 0


def test_a_load_takes_as_few_layers_at_once_as_make_long_runs() -> None:
    device = make_device_pool()

    def at_once(layout: str, run_bytes: int) -> int:
        part = parts_of(make_host_pool(device, layout), device)[0]
        return StagedLoadTuning(run_bytes).layers_at_once(part, PAGE, fits=True)

    layer = PAGE * ROW
    assert [at_once("page_first_direct", n * layer) for n in (1, 2, 3, 9)] == [1, 2, 3, 3]
    assert at_once("layer_first", layer + 1) == 2
    assert at_once("page_first", 1) == LAYERS


def test_a_load_takes_several_layers_of_a_state_at_once() -> None:
    mebibyte = 1 << 20
    rows = HostRows(2 * mebibyte, 1, 46 * mebibyte, 46 * mebibyte, 2 * mebibyte, 16)
    part = PartRows(rows, 0, tuple(range(0, 46 * mebibyte, 2 * mebibyte)), 2 * mebibyte)
    assert StagedLoadTuning().layers_at_once(part, 1, fits=False) == 8
    assert StagedLoadTuning().layers_at_once(part, 1, fits=True) == 23


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
