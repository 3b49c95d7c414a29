"""Which bytes are read for a page of another server, and why it cannot be."""

from __future__ import annotations

import ctypes
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.common.geometry import PoolGeometry
from sglang.srt.disaggregation.common.protocol import Offer
from sglang.srt.distributed.device_communicators.transfer_types import Block
from sglang.srt.mem_cache.device.base_device_pool import PagedDevicePool
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.marks_pool import MarksPool, page_marks, prefix_marks

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

PAGES = 12


def make_pool(page_size: int = 4, **changes: Any) -> MHATokenToKVPool:
    """Two layers of two heads."""
    args: dict[str, Any] = {
        "size": PAGES * page_size,
        "dtype": torch.float32,
        "head_num": 2,
        "head_dim": 3,
        "layer_num": 2,
        **changes,
    }
    return MHATokenToKVPool(page_size=page_size, device="cpu", **args)


def geometry_of(*pools: Any, weights: str = "w") -> PoolGeometry:
    return PoolGeometry.of(pools, weights)


def offer_of(geometry: PoolGeometry, **changes: Any) -> Offer:
    return msgspec.structs.replace(geometry.offer("instance", "session"), **changes)


def test_pages_that_follow_each_other_on_both_sides_are_one_block_of_each_buffer() -> None:
    here, there = geometry_of(make_pool()), geometry_of(make_pool())
    page = here.buffers[0].page_bytes
    assert (len(here.buffers), page) == (4, 4 * 2 * 3 * 4)
    blocks = here.blocks(offer_of(there), [3, 4, 5, 9, 10, 2], [1, 2, 3, 4, 6, 7])
    runs = [(1, 3, 3), (4, 9, 1), (6, 10, 1), (7, 2, 1)]
    assert blocks == [
        Block(mine.address + own * page, other.address + their * page, count * page)
        for mine, other in zip(here.buffers, there.buffers, strict=True)
        for own, their, count in runs
    ]


pages = st.lists(st.integers(1, PAGES), unique=True, min_size=1)


@given(pages, pages)
def test_blocks_move_what_copies_page_by_page_do(theirs: list[int], own: list[int]) -> None:
    count = min(len(theirs), len(own))
    theirs, own = theirs[:count], own[:count]
    source, sink, wanted = make_pool(), make_pool(), make_pool()
    generator = torch.Generator().manual_seed(1)
    for part in source.parts:
        for buffer in part:
            buffer.copy_(torch.rand(buffer.shape, generator=generator))
    slots = torch.arange(4)
    for part_from, part_to in zip(source.parts, wanted.parts, strict=True):
        for a, b in zip(part_from, part_to, strict=True):
            for their, mine in zip(theirs, own, strict=True):
                b[mine * 4 + slots] = a[their * 4 + slots]
    blocks = geometry_of(sink).blocks(offer_of(geometry_of(source)), theirs, own)
    for block in blocks:
        ctypes.memmove(block.local, block.remote, block.length)
    for part, want in zip(sink.parts, wanted.parts, strict=True):
        for a, b in zip(part, want, strict=True):
            assert torch.equal(a, b)


def test_servers_of_one_layout_fit_whatever_their_size() -> None:
    here, there = geometry_of(make_pool()), geometry_of(make_pool(size=400))
    assert here.why_not(offer_of(there)) is None
    assert here.sizes[0] != there.sizes[0]
    assert here.digest == there.digest


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"page_size": 2}, "page size 2 there, 4 here"),
        ({"dtype": torch.float16}, "torch.float16 there"),
        ({"dtype": torch.bfloat16}, "torch.bfloat16 there"),
        ({"head_num": 1}, "pool kv"),
        ({"head_dim": 5}, "pool kv"),
        ({"layer_num": 3}, "layers of pool kv [0, 1, 2] there, [0, 1] here"),
        ({"start_layer": 2}, "layers of pool kv [2, 3] there, [0, 1] here"),
        ({"weights": "v"}, "weights v there, w here"),
    ],
)
def test_each_difference_is_named(changes: dict[str, Any], named: str) -> None:
    weights = changes.pop("weights", "w")
    there = geometry_of(make_pool(**changes), weights=weights)
    why = geometry_of(make_pool()).why_not(offer_of(there))
    assert why is not None and named in why
    assert why.startswith("its pages differ: ")


def test_fp8_is_not_taken_for_bytes() -> None:
    """Though both are stored as bytes, and a page has as many."""
    fp8 = geometry_of(make_pool(dtype=torch.float8_e4m3fn))
    other = geometry_of(make_pool(dtype=torch.float8_e5m2))
    assert fp8.buffers[0].page_bytes == other.buffers[0].page_bytes
    why = fp8.why_not(offer_of(other))
    assert why is not None and "float8_e5m2 there" in why


def test_a_further_pool_is_named() -> None:
    pool = make_pool(page_size=1)
    both = geometry_of(pool, PagedDevicePool(page_marks(0, 1), pool.size, 1, "cpu"))
    alone = geometry_of(pool)
    for here, there, named in ((alone, both, "none here"), (both, alone, "none there")):
        why = here.why_not(offer_of(there))
        assert why is not None and named in why


def test_other_protocols_and_lists_are_refused() -> None:
    here = geometry_of(make_pool())
    why = here.why_not(offer_of(here, version=2))
    assert why == "it speaks version 2 of the protocol, this server 1"
    # A digest that fits and a list that does not.
    why = here.why_not(offer_of(here, buffers=offer_of(here).buffers[:1]))
    assert why == "its pages differ: it has 1 buffers, this server 4"


def test_recurrent_states_are_refused_with_the_remedy() -> None:
    with pytest.raises(
        ValueError, match=r"--disaggregation-mode: pool mamba .* leave the flag out"
    ):
        geometry_of(make_pool(), MarksPool(prefix_marks(0), 4, 1))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
