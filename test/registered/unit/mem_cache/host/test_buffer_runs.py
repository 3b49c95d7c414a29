"""Copies between pages of the host and a buffer: what they move and merge. Carried out by memmove
here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch

from rigs.caches.plain_copies import (
    KINDS,
    LAYERS,
    LAYOUTS,
    ROW,
    do,
    do_grids,
    host_of,
    parts_of,
)
from rigs.stores.host_pools import (
    PAGE,
    copy_to_device,
    device_bytes,
    make_device_pool,
    make_host_pool,
    page_slots,
)
from sglang.srt.mem_cache.device.base_device_pool import PagedDevicePool
from sglang.srt.mem_cache.host import buffer_runs
from sglang.srt.mem_cache.host.buffer_runs import PageRuns
from sglang.srt.mem_cache.host.copy_runs import HostRows, PartRows
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")


def move_rows(
    runs: PageRuns,
    parts: list[PartRows],
    buffer: int,
    pages: list[int],
    layers: range,
    *,
    to_buffer: bool,
) -> None:
    """Move rows between a buffer and a device pool one by one, as the kernel does."""
    for part, rows, offset in zip(parts, runs.buffer_rows, runs.offsets, strict=True):
        move_part(part, rows, buffer + offset, pages, layers, to_buffer=to_buffer)


def move_part(
    part: PartRows,
    rows: HostRows,
    buffer: int,
    pages: list[int],
    layers: range,
    *,
    to_buffer: bool,
) -> None:
    for place in range(len(pages) * PAGE):
        page, token = divmod(place, rows.page_tokens)
        slot = pages[place // PAGE] * PAGE + place % PAGE
        for layer in layers:
            at = buffer + page * rows.page_stride + token * rows.token_stride
            at += (layer - layers.start) * rows.layer_stride
            on_device = part.device_addresses[layer] + slot * part.device_stride
            to, source = (at, on_device) if to_buffer else (on_device, at)
            ctypes.memmove(to, source, rows.row_bytes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("pages", [[3, 1, 15, 8], [5, 6, 7], [9], [2, 3, 9, 10]])
@pytest.mark.parametrize(("layers_at_once", "held"), [(1, 1), (2, 2), (3, 3), (1, 3), (2, 3)])
@pytest.mark.parametrize("grid_pages", [2, 32])
def test_runs_move_what_the_layout_says(
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    make: Callable[..., PagedDevicePool],
    pages: list[int],
    layers_at_once: int,
    held: int,
    grid_pages: int,
) -> None:
    monkeypatch.setattr(buffer_runs, "_GRID_PAGES", grid_pages)
    if layout == "page_first":
        layers_at_once = held = LAYERS
    device = make()
    host = host_of(device, layout)
    into = [4, 9, 2, 6][: len(pages)]
    buffer = torch.zeros(1 << 16, dtype=torch.uint8)
    start, parts = buffer.data_ptr(), parts_of(host, device)
    runs = PageRuns(parts, PAGE, LAYERS, 7)
    assert runs.num_bytes <= len(buffer)
    move_rows(runs, parts, start, into, range(LAYERS), to_buffer=True)
    found = runs.runs(np.array(pages), LAYERS)
    assert found is not None
    do(found.to_host(start))
    # The CPU's own copy reads the pool by its layout.
    other = make(seed=1)
    copy_to_device(host, other, page_slots(pages), into)
    wanted = page_slots(into)
    assert device_bytes(other, wanted) == device_bytes(device, wanted)

    third = make(seed=2)
    untouched = device_bytes(third, page_slots([0, 3]))
    parts = parts_of(host, third)
    runs = PageRuns(parts, PAGE, held, 7)
    for first in range(0, LAYERS, layers_at_once):
        layers = range(first, min(first + layers_at_once, LAYERS))
        buffer.fill_(0)
        grids, is_left = runs.grids(np.array(pages), len(layers))
        do_grids([grid.to_buffer(start, first) for grid in grids])
        found = runs.runs(np.array(pages), len(layers), is_left)
        if found is not None:
            do(found.to_buffer(start, first))
        move_rows(runs, parts, start, into, layers, to_buffer=False)
    assert device_bytes(third, wanted) == device_bytes(device, wanted)
    assert device_bytes(third, page_slots([0, 3])) == untouched


def test_pages_that_adjoin_on_both_sides_are_one_copy() -> None:
    device = make_device_pool()
    pages = np.array([5, 6, 7, 1, 2, 9])
    page, layer = LAYERS * PAGE * ROW, PAGE * ROW

    def sizes(layout: str, layers: int, at_once: int) -> list[int]:
        part = parts_of(make_host_pool(device, layout), device)[0]
        found = PageRuns([part], PAGE, at_once, 8).runs(pages, layers)
        assert found is not None
        sizes: list[int] = found.to_buffer(0, 0).sizes.tolist()
        return sizes

    assert sizes("page_first", LAYERS, LAYERS) == [3 * page, 2 * page, page]
    assert sizes("page_first_direct", LAYERS, LAYERS) == [3 * page, 2 * page, page]
    assert sizes("page_first_direct", 2, 2) == [2 * layer] * 6
    assert sizes("page_first_direct", 1, 2) == [layer] * 6
    assert sizes("layer_first", 2, 2) == [3 * layer, 2 * layer, layer] * 2


def test_neighbouring_pages_of_some_layers_are_one_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_runs, "_GRID_PAGES", 3)
    device = make_device_pool()
    pages = np.array([5, 6, 7, 8, 1, 2, 9, 3, 4, 5])

    def grids(layout: str, layers: int) -> tuple[list[int], list[bool] | None]:
        part = parts_of(make_host_pool(device, layout), device)[0]
        found, is_left = PageRuns([part], PAGE, LAYERS, 10).grids(pages, layers)
        return [grid.runs for grid in found], None if is_left is None else is_left.tolist()

    left = [False] * 4 + [True] * 3 + [False] * 3
    assert grids("page_first_direct", 2) == ([4, 3], left)
    assert grids("page_first_direct", LAYERS) == ([], None), "whole pages are one run"
    assert grids("layer_first", 2) == ([], None), "each layer is one run"
    far = parts_of(make_host_pool(device, "page_first_direct"), device)[0].rows
    monkeypatch.setattr(buffer_runs, "MAX_STRIDE", far.page_stride - 1)
    assert grids("page_first_direct", 2) == ([], None), "pages are too far apart"


def test_pages_that_are_in_grids_cost_no_list_of_runs() -> None:
    device = make_device_pool()
    part = parts_of(make_host_pool(device, "page_first_direct"), device)[0]
    runs = PageRuns([part], PAGE, 2, 8)
    assert runs.runs(np.arange(8), 2, np.zeros(8, dtype=np.bool_)) is None


def test_token_major_pages_are_not_divided() -> None:
    device = make_device_pool()
    part = parts_of(make_host_pool(device, "page_first"), device)[0]
    with pytest.raises(ValueError, match="copy engines do not move"):
        PageRuns([part], PAGE, LAYERS - 1, 8)


def test_nothing_is_no_copy() -> None:
    device = make_device_pool()
    none = np.array([], dtype=np.int64)
    for layout in LAYOUTS:
        parts = parts_of(make_host_pool(device, layout), device)
        assert PageRuns(parts, PAGE, LAYERS, 8).runs(none, LAYERS) is None
