"""The table of devices, I/O backends and layouts, and the byte order of pages."""

from __future__ import annotations

import pytest

from sglang.srt.mem_cache.host_layout import HostLayout, page_byte_order, resolve_layout_and_io
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    ("device", "io", "layout", "has_storage", "expected"),
    [
        ("cpu", "auto", "auto", True, ("direct", "page_first_direct")),
        ("cpu", "auto", "auto", False, ("direct", "layer_first")),
        ("cpu", "direct", "page_first", False, ("direct", "page_first")),
        ("cpu", "auto", "page_first_kv_split", True, ("direct", "page_first_kv_split")),
        ("cuda:1", "auto", "auto", True, ("kernel", "page_first")),
        ("cuda", "auto", "auto", False, ("kernel", "layer_first")),
        ("cuda", "direct", "auto", True, ("direct", "page_first_direct")),
        ("cuda", "auto", "page_first_direct", False, ("direct", "page_first_direct")),
        ("npu", "auto", "auto", True, ("kernel_ascend", "page_first_kv_split")),
        ("npu", "auto", "page_first_direct", False, ("kernel_ascend", "page_first_direct")),
    ],
)
def test_what_works(
    device: str, io: str, layout: str, has_storage: bool, expected: tuple[str, str]
) -> None:
    assert resolve_layout_and_io(device, io, layout, has_storage) == expected


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
    ],
)
def test_what_cannot_work_names_what_can(device: str, io: str, layout: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_layout_and_io(device, io, layout, True)


def test_only_page_first_is_token_major() -> None:
    token_major = {layout for layout in HostLayout if page_byte_order(layout) == "token_major"}
    assert token_major == {HostLayout.PAGE_FIRST}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
