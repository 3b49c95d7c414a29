"""The table of devices, I/O backends and layouts, and the byte order of pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang.srt.constants import KIB
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.host.host_layout import HostLayout, page_byte_order, resolve_layout_and_io
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    ("device", "io", "layout", "has_storage", "page_kib", "expected"),
    [
        ("cpu", "auto", "auto", True, 64, ("direct", "page_first_direct")),
        ("cpu", "auto", "auto", False, 1024, ("direct", "layer_first")),
        ("cpu", "direct", "page_first", False, 64, ("direct", "page_first")),
        ("cpu", "auto", "page_first_kv_split", True, 64, ("direct", "page_first_kv_split")),
        ("cuda:1", "auto", "auto", True, 256, ("direct", "page_first_direct")),
        ("cuda", "auto", "auto", False, 4608, ("direct", "page_first_direct")),
        ("cuda", "auto", "auto", True, 255, ("kernel", "page_first")),
        ("cuda", "auto", "auto", False, 72, ("kernel", "layer_first")),
        ("cuda", "kernel", "auto", True, 4608, ("kernel", "page_first")),
        ("cuda", "kernel", "auto", False, 4608, ("kernel", "layer_first")),
        ("cuda", "direct", "auto", True, 72, ("direct", "page_first_direct")),
        ("cuda", "direct", "auto", False, 72, ("direct", "page_first_direct")),
        ("cuda", "auto", "layer_first", True, 4608, ("kernel", "layer_first")),
        ("cuda", "auto", "page_first", False, 4608, ("kernel", "page_first")),
        ("cuda", "auto", "page_first_direct", False, 72, ("direct", "page_first_direct")),
        ("npu", "auto", "auto", True, 64, ("kernel_ascend", "page_first_kv_split")),
        ("npu", "auto", "page_first_direct", False, 64, ("kernel_ascend", "page_first_direct")),
    ],
)
def test_layouts_and_io_backends_that_fit_are_accepted(
    device: str,
    io: str,
    layout: str,
    has_storage: bool,
    page_kib: int,
    expected: tuple[str, str],
) -> None:
    assert resolve_layout_and_io(device, io, layout, has_storage, page_kib << 10) == expected


@pytest.mark.parametrize("has_storage", [False, True])
def test_shorter_pages_go_by_copy_engines_beside_recurrent_states(has_storage: bool) -> None:
    def chosen(page_kib: int, has_states: bool) -> str:
        io, _ = resolve_layout_and_io(
            "cuda", "auto", "auto", has_storage, page_kib << 10, has_states=has_states
        )
        return io

    assert [chosen(192, states) for states in (False, True)] == ["kernel", "direct"]
    assert chosen(191, True) == "kernel"


@pytest.mark.parametrize(
    ("device", "io", "layout", "message"),
    [
        ("cpu", "kernel", "auto", "hicache-io-backend kernel.*on cpu use direct with layer_first"),
        ("cuda", "kernel", "page_first_direct", "hicache-mem-layout.*kernel with layer_first"),
        ("cuda", "direct", "page_first", "direct with layer_first[|]page_first_direct"),
        ("npu", "auto", "layer_first", "kernel_ascend with"),
        ("tpu", "auto", "auto", "--device tpu.*cpu, cuda, npu"),
        ("cpu", "dirct", "auto", "unknown backend 'dirct'.*direct"),
        ("cpu", "auto", "pagefirst", "unknown layout 'pagefirst'.*page_first"),
        ("cpu", "auto", "page_first_kv_spilt", r"did you mean page_first_kv_split\?$"),
    ],
)
def test_what_cannot_work_names_what_can(device: str, io: str, layout: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_layout_and_io(device, io, layout, True, 1 << 20)


def test_auto_takes_a_layout_that_every_kind_of_state_has() -> None:
    known = [one for one in HostLayout if one is not HostLayout.PAGE_FIRST_KV_SPLIT]

    def chosen(device: str, layout: str) -> str:
        return resolve_layout_and_io(device, "auto", layout, True, 64, known=known)[1]

    assert chosen("npu", "auto") == "page_first_direct"
    assert chosen("cpu", "auto") == "page_first_direct"
    assert chosen("npu", "page_first_kv_split") == "page_first_kv_split", "as it was named"


def chosen_for_qwen3_8b(tp_size: int, page_size: int, **args: Any) -> tuple[str, str]:
    """The choice of `auto` on CUDA with an L3, for the pages of one of `tp_size` ranks."""
    pool = MHATokenToKVPool(page_size, page_size, torch.bfloat16, 8 // tp_size, 128, 36, "cpu")
    page_bytes = MHATokenToKVPoolHost.shortest_part_bytes(pool) * page_size
    assert page_bytes == 72 * KIB * page_size // tp_size
    return resolve_layout_and_io("cuda", "auto", "auto", True, page_bytes, **args)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("has_states", [False, True])
def test_servers_of_all_sizes_that_share_a_store_have_one_byte_order(
    page_size: int, has_states: bool
) -> None:
    pairs = [
        chosen_for_qwen3_8b(tp_size, page_size, has_states=has_states, is_shared_by_sizes=True)
        for tp_size in (1, 2, 4, 8)
    ]
    assert {page_byte_order(layout) for _, layout in pairs} == {"layer_major"}


def test_each_size_that_shares_a_store_keeps_its_fastest_copies() -> None:
    alone, shared = (
        [chosen_for_qwen3_8b(tp_size, 16, is_shared_by_sizes=is_shared) for tp_size in (1, 4, 8)]
        for is_shared in (False, True)
    )
    engines = ("direct", "page_first_direct")
    assert alone == [engines, engines, ("kernel", "page_first")]
    assert shared == [engines, engines, ("kernel", "layer_first")]


@pytest.mark.parametrize("page_kib", [72, 4608])
def test_named_settings_stay_in_a_shared_store(page_kib: int) -> None:
    def chosen(io: str, layout: str) -> tuple[str, str]:
        return resolve_layout_and_io(
            "cuda", io, layout, True, page_kib * KIB, is_shared_by_sizes=True
        )

    assert chosen("kernel", "auto") == ("kernel", "layer_first")
    assert chosen("direct", "auto") == ("direct", "page_first_direct")
    assert chosen("auto", "page_first") == ("kernel", "page_first")


def test_only_page_first_is_token_major() -> None:
    token_major = {layout for layout in HostLayout if page_byte_order(layout) == "token_major"}
    assert token_major == {HostLayout.PAGE_FIRST}
