"""Groups of heads of host pools: the bytes of a rank that has just these heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rigs.caches.marks_pool import MarksPool, MarksPoolHost, page_marks
from rigs.caches.mla_pools import make_mla_pool
from rigs.stores.host_pools import PAGE, fill_with_random_bits, page_slots
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.device.state_pool import MambaPool, MambaSpec
from sglang.srt.mem_cache.host.head_group_pool import HeadGroupPool
from sglang.srt.mem_cache.host.host_layout import HostLayout
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.host.pool_kinds import (
    MambaPoolHost,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

HEADS, DIM, V_DIM, LAYERS, PAGES = 8, 4, 6, 3, 6
SOME = page_slots([4, 1, 2])


def kv_pools(layout: str, dtype: torch.dtype, num_groups: int) -> tuple[HostKVCache, list[Any]]:
    """A host pool of all heads with random bits, and pools of the heads of each group."""
    size = PAGES * PAGE

    def device_pool(heads: int) -> MHATokenToKVPool:
        return MHATokenToKVPool(size, PAGE, dtype, heads, DIM, LAYERS, "cpu", v_head_dim=V_DIM)

    def host_pool(pool: MHATokenToKVPool) -> HostKVCache:
        host = MHATokenToKVPoolHost.make(pool, page_num=PAGES, layout=layout)
        slots = page_slots(list(range(PAGES)))
        host.backup_from_device_all_layer(pool, slots, slots + PAGE, "direct")
        return host

    whole = device_pool(HEADS)
    fill_with_random_bits(whole, seed=1)
    own = HEADS // num_groups
    parts = []
    for group in range(num_groups):
        part = device_pool(own)
        heads = slice(group * own, (group + 1) * own)
        for mine, all_heads in zip(part.parts, whole.parts, strict=True):
            for to, source in zip(mine, all_heads, strict=True):
                to.copy_(source[:, heads])
        parts.append(host_pool(part))
    return host_pool(whole), parts


def gathered(pool: Any, slots: torch.Tensor) -> torch.Tensor:
    """Flat pages, as L3 has them, in rows with room for a trailer."""
    rows = torch.zeros((len(slots) // pool.page_size, pool.page_bytes + 32), dtype=torch.uint8)
    pool.gather_pages(slots, rows[:, :-32])
    return rows[:, :-32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_groups", [2, 4, 8])
@pytest.mark.parametrize("layout", list(HostLayout))
def test_a_group_has_the_bytes_of_a_rank_with_its_heads(
    layout: str, num_groups: int, dtype: torch.dtype
) -> None:
    whole, parts = kv_pools(layout, dtype, num_groups)
    groups = [HeadGroupPool(whole, index, num_groups) for index in range(num_groups)]
    for group, part in zip(groups, parts, strict=True):
        assert group.page_bytes == part.page_bytes
        assert torch.equal(gathered(group, SOME), gathered(part, SOME))
    kept = gathered(whole, page_slots(list(range(PAGES))))
    for buffer in whole.kv_buffer:
        buffer.view(torch.uint8).zero_()
    for group, part in zip(groups, parts, strict=True):
        group.scatter_pages(SOME, gathered(part, SOME))
    now = gathered(whole, page_slots(list(range(PAGES))))
    assert torch.equal(now[[4, 1, 2]], kept[[4, 1, 2]])
    assert not now[[0, 3, 5]].any(), "other pages are left alone"


def test_a_scattered_group_leaves_other_heads_alone() -> None:
    whole, parts = kv_pools("page_first_direct", torch.bfloat16, 2)
    before = gathered(whole, SOME)
    HeadGroupPool(whole, 0, 2).scatter_pages(SOME, torch.zeros_like(gathered(parts[0], SOME)))
    assert not gathered(HeadGroupPool(whole, 0, 2), SOME).any()
    assert torch.equal(gathered(HeadGroupPool(whole, 1, 2), SOME), gathered(parts[1], SOME))
    assert not torch.equal(gathered(whole, SOME), before)


KEY_HEADS, KEY_DIM, VALUE_HEADS, VALUE_DIM, KERNEL = 4, 3, 8, 2, 4


def state_pool(layout: str, key_heads: int) -> tuple[MambaPool, HostKVCache]:
    """A pool of states with `key_heads` key heads, and two value heads for each."""
    values = 2 * key_heads
    spec = MambaSpec.of_shapes(
        (0, 2),
        (values, KEY_DIM, VALUE_DIM),
        (2 * key_heads * KEY_DIM + values * VALUE_DIM, KERNEL - 1),
        ssm_dtype=torch.float32,
        conv_dtype=torch.bfloat16,
    )
    pool = MambaPool(spec, 4, "cpu")
    return pool, MambaPoolHost.make(pool, page_num=4, layout=layout)


@pytest.mark.parametrize("layout", MambaPoolHost.LAYOUTS)
def test_a_group_of_states_has_its_queries_keys_and_values(layout: str) -> None:
    """Heads split queries, keys and values, which follow each other in a rank's channels."""
    whole, whole_host = state_pool(layout, KEY_HEADS)
    generator = torch.Generator().manual_seed(0)
    whole.temporal.copy_(torch.rand(whole.temporal.shape, generator=generator))
    whole.conv.copy_(torch.rand(whole.conv.shape, generator=generator))
    slots = torch.tensor([2, 0])
    whole_host.backup_from_device_all_layer(whole, slots, slots + 1, "direct")
    keys, values = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
    q, k, v = torch.split(whole.conv, [keys, keys, values], dim=2)
    for index in range(2):
        part, part_host = state_pool(layout, KEY_HEADS // 2)
        part.temporal.copy_(whole.temporal.chunk(2, dim=2)[index])
        part.conv.copy_(torch.cat([one.chunk(2, dim=2)[index] for one in (q, k, v)], dim=2))
        part_host.backup_from_device_all_layer(part, slots, slots + 1, "direct")
        group = HeadGroupPool(whole_host, index, 2)
        assert torch.equal(gathered(group, slots), gathered(part_host, slots))


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    _, states = state_pool("layer_first", KEY_HEADS)
    with pytest.raises(ValueError, match=r"pool mamba: its buffer temporal \[8, 3, 2\] cannot be"):
        HeadGroupPool(states, 0, 16)
    odd = MambaSpec.of_shapes(
        (0,), (2, 2, 2), (5, 3), ssm_dtype=torch.float32, conv_dtype=torch.float32
    )
    unknown = MambaPoolHost.make(MambaPool(odd, 2, "cpu"), page_num=2, layout="layer_first")
    with pytest.raises(ValueError, match=r"its buffer conv \[5, 3\] .*; leave tp_lcm_size out"):
        HeadGroupPool(unknown, 0, 2)
    for layout in ("layer_first", "page_first_kv_split"):
        rows = MLATokenToKVPoolHost.make(make_mla_pool(), page_num=2, layout=layout)
        with pytest.raises(ValueError, match="pool kv: its buffer latent"):
            HeadGroupPool(rows, 0, 2)
    marks = MarksPool(page_marks(0), 16, PAGE)
    with pytest.raises(ValueError, match="pool indexer: its buffer mark"):
        HeadGroupPool(MarksPoolHost.make(marks, page_num=2, layout="layer_first"), 0, 2)


def test_no_transport_is_given_addresses_of_a_group() -> None:
    whole, _ = kv_pools("page_first_direct", torch.bfloat16, 2)
    group = HeadGroupPool(whole, 0, 2)
    assert not group.is_zero_copy and group.get_hybrid_pool_buffer() == []
    for ask in (group.get_page_buffer_meta, group.get_page_views):
        with pytest.raises(ValueError, match="copy it with gather_pages"):
            ask(SOME)
    with pytest.raises(ValueError, match="leave the pool"):
        group.check_pages(page_slots([PAGES]))
