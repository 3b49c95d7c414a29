"""Lists of plain copies: what they move, merge and refuse. Carried out by memmove here."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from sglang.srt.mem_cache.copy_runs import CopyRuns, page_runs
from sglang.srt.mem_cache.host_rows import PartRows, part_rows
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.mha_host_pool import MHATokenToKVPoolHost
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.host_pools import (
    PAGE,
    copy_to_device,
    device_bytes,
    make_device_pool,
    make_host_pool,
    page_slots,
)

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

LAYERS = 3
RUN_LAYOUTS = ["layer_first", "page_first_direct", "page_first_kv_split"]


def parts_of(host: MHATokenToKVPoolHost, device: MHATokenToKVPool) -> list[PartRows]:
    return [
        part_rows([host._layer_pages(part, layer) for layer in range(LAYERS)], buffers)
        for part, buffers in ((host.k_buffer, device.k_buffer), (host.v_buffer, device.v_buffer))
    ]


def do(runs: CopyRuns) -> None:
    for to, source, size in zip(
        runs.destinations.tolist(), runs.sources.tolist(), runs.sizes.tolist(), strict=True
    ):
        ctypes.memmove(to, source, size)


@pytest.mark.parametrize("layout", RUN_LAYOUTS)
@pytest.mark.parametrize("v_head_dim", [None, 6])
@pytest.mark.parametrize("pages", [[3, 1, 15, 8], [5, 6, 7], [9]])
def test_runs_move_what_the_layout_says(
    layout: str, v_head_dim: int | None, pages: list[int]
) -> None:
    device = make_device_pool(v_head_dim=v_head_dim)
    host = make_host_pool(device, layout)
    into = [4, 9, 2, 6][: len(pages)]
    do(
        page_runs(
            parts_of(host, device),
            np.array(into),
            np.array(pages),
            PAGE,
            range(LAYERS),
            to_host=True,
        )
    )
    # The CPU's own copy reads the pool by its layout.
    other = make_device_pool(v_head_dim=v_head_dim, seed=1)
    copy_to_device(host, other, page_slots(into), pages)
    wanted = page_slots(pages)
    assert device_bytes(other, wanted) == device_bytes(device, wanted)

    third = make_device_pool(v_head_dim=v_head_dim, seed=2)
    untouched = device_bytes(third, page_slots([0, 2]))
    for layer in range(LAYERS):
        do(
            page_runs(
                parts_of(host, third),
                np.array(into),
                np.array(pages),
                PAGE,
                range(layer, layer + 1),
                to_host=False,
            )
        )
    assert device_bytes(third, wanted) == device_bytes(device, wanted)
    assert device_bytes(third, page_slots([0, 2])) == untouched


def test_pages_that_adjoin_on_both_sides_are_one_copy() -> None:
    device = make_device_pool()
    row = 2 * 4 * 2  # heads, dim, bf16
    layer_first = parts_of(make_host_pool(device, "layer_first"), device)
    host, dev = np.array([5, 6, 7, 1, 2, 9]), np.array([2, 3, 4, 5, 7, 8])
    runs = page_runs(layer_first[:1], host, dev, PAGE, range(1), to_host=True)
    assert runs.sizes.tolist() == [3 * PAGE * row, PAGE * row, PAGE * row, PAGE * row]
    paged = parts_of(make_host_pool(device, "page_first_direct"), device)
    assert len(page_runs(paged[:1], host, dev, PAGE, range(1), to_host=True)) == 6


def test_nothing_is_no_copy() -> None:
    device = make_device_pool()
    parts = parts_of(make_host_pool(device, "layer_first"), device)
    none = np.array([], dtype=np.int64)
    assert len(page_runs(parts, none, none, PAGE, range(LAYERS), to_host=True)) == 0


def test_pages_without_runs_are_left_to_the_kernel() -> None:
    device = make_device_pool()
    parts = parts_of(make_host_pool(device, "page_first"), device)
    with pytest.raises(ValueError, match="--hicache-io-backend kernel"):
        page_runs(parts, np.array([1]), np.array([1]), PAGE, range(1), to_host=True)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
