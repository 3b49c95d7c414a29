"""MambaPoolHost: a page is one state; copies, flat pages, and what a store registers."""

from __future__ import annotations

import pytest
import torch

from rigs.caches.mamba_pools import STATE_DTYPES, make_mamba_pool, mamba_spec
from rigs.stores.host_pools import (
    copy_to_device,
    copy_to_host,
    device_bytes,
    fill_with_random_bits,
)
from sglang.srt.mem_cache.device.state_pool import MambaPool, MambaSpec
from sglang.srt.mem_cache.host.pool_kinds import MambaPoolHost
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

SPEC = MambaSpec.of_shapes(
    (0, 2), (2, 3, 4), (5, 3), ssm_dtype=torch.float32, conv_dtype=torch.bfloat16
)
TEMPORAL, CONV = 2 * 2 * 3 * 4 * 4, 2 * 5 * 3 * 2
"""Bytes of a state: of both layers."""
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def filled(size: int = 4) -> MambaPool:
    return make_mamba_pool(spec=SPEC, size=size)


def host_of(pool: MambaPool, layout: str) -> MambaPoolHost:
    return MambaPoolHost.make(pool, page_num=5, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtypes", STATE_DTYPES)
def test_states_go_to_the_host_and_come_back(
    dtypes: tuple[torch.dtype, torch.dtype], layout: str
) -> None:
    pool = make_mamba_pool(spec=mamba_spec(dtypes), size=4)
    host = host_of(pool, layout)
    host.alloc(2)
    slots = copy_to_host(pool, host, [1, 4])
    kept = device_bytes(pool, torch.tensor([1, 4]))
    fill_with_random_bits(pool, seed=1)
    others = torch.tensor([0, 1, 3])
    untouched = device_bytes(pool, others)
    copy_to_device(host, pool, slots, [4, 2])
    assert device_bytes(pool, torch.tensor([4, 2])) == kept
    assert device_bytes(pool, others) == untouched


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtypes", STATE_DTYPES)
def test_a_layer_comes_back_without_the_others(
    dtypes: tuple[torch.dtype, torch.dtype], layout: str
) -> None:
    pool = make_mamba_pool(spec=mamba_spec(dtypes), size=4)
    host = host_of(pool, layout)
    slots = copy_to_host(pool, host, [3])
    kept = [buffer.view(torch.uint8).clone() for buffer in pool.buffers]
    fill_with_random_bits(pool, seed=1)
    before = [buffer.view(torch.uint8).clone() for buffer in pool.buffers]
    host.load_to_device_per_layer(pool, slots, torch.tensor([2]), 1, "direct")
    for buffer, old, other in zip(pool.buffers, kept, before, strict=True):
        other[1, 2] = old[1, 3]
        assert torch.equal(buffer.view(torch.uint8), other)


def test_a_state_has_the_same_bytes_in_every_layout() -> None:
    pool = filled()
    pages = []
    for layout in LAYOUTS:
        host = host_of(pool, layout)
        host.backup_from_device_all_layer(pool, torch.tensor([2]), torch.tensor([3]), "direct")
        pages.append(host.get_data_page(2))
        host.set_from_flat_data_page(4, pages[-1])
        assert torch.equal(host.get_data_page(4), pages[-1])
    assert all(torch.equal(page, pages[0]) for page in pages)
    raw = torch.cat([pool.temporal[:, 3].reshape(-1).view(torch.uint8),
                     pool.conv[:, 3].reshape(-1).view(torch.uint8)])  # fmt: skip
    assert torch.equal(pages[0].view(-1), raw), "temporal of all layers, then conv"


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_a_store_gets_both_buffers_temporal_first(layout: str) -> None:
    host = host_of(filled(), layout)
    temporal, conv = host.get_hybrid_pool_buffer()
    assert (temporal.shape, conv.shape) == ((5, 2, 2, 3, 4), (5, 2, 5, 3))
    assert (host.page_size, host.page_bytes, host.size) == (1, TEMPORAL + CONV, 5)
    assert host.get_ksize_per_token() == TEMPORAL
    ptrs, sizes = host.get_page_buffer_meta(torch.tensor([3, 1]))
    assert sizes == [TEMPORAL, CONV] * 2
    assert ptrs == [
        buffer.data_ptr() + page * size
        for page in (3, 1)
        for buffer, size in ((temporal, TEMPORAL), (conv, CONV))
    ]
    with pytest.raises(ValueError, match="leave the pool"):
        host.get_page_buffer_meta(torch.tensor([5]))


def test_layouts_that_make_no_sense_are_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"page_first_kv_split is not for MambaPoolHost; use .*layer_first, p"
    ):
        host_of(filled(), "page_first_kv_split")
    with pytest.raises(ValueError, match="scatters"):
        host_of(filled(), "layer_first").get_page_buffer_meta(torch.tensor([0]))


def test_its_size_is_of_itself_alone() -> None:
    pool = filled(4)
    assert MambaPoolHost(pool, 2.5, 0.0).size == 10
    in_gb = 7 * (TEMPORAL + CONV) / 1e9
    assert MambaPoolHost(pool, 2.5, in_gb).size == 7
    with pytest.raises(ValueError, match=f"one page takes {TEMPORAL + CONV}"):
        MambaPoolHost(pool, 0.1, 0.0)


@pytest.mark.parametrize(
    ("temporal", "conv", "dtypes"),
    [
        ((2, 3, 2), (5, 3), (torch.float64, torch.float16)),
        ((2, 3, 4), (5, 3), (torch.float32, torch.float16)),
        ((2, 4, 3), (5, 3), (torch.float32, torch.bfloat16)),
        ((2, 3, 4), (3, 5), (torch.float32, torch.bfloat16)),
    ],
    ids=["both dtypes", "the dtype of conv", "the shape of temporal", "the shape of conv"],
)
def test_engines_with_other_states_in_as_many_bytes_share_nothing(
    temporal: tuple[int, int, int], conv: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    other = MambaSpec.of_shapes((0, 2), temporal, conv, ssm_dtype=dtypes[0], conv_dtype=dtypes[1])
    pools = [host_of(MambaPool(spec, 1, "cpu"), "page_first") for spec in (SPEC, other)]
    assert pools[0].page_bytes == pools[1].page_bytes
    assert pools[0].page_format != pools[1].page_format
