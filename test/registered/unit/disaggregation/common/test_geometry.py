"""Bytes that are read for a page of another server, and reasons why none can be."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rigs.caches.marks_pool import MarksPool, page_marks, prefix_marks
from sglang.srt.disaggregation.common.geometry import (
    IncompatibleLayouts,
    PoolGeometry,
    RankPlace,
    ShardSlice,
    StateSlots,
)
from sglang.srt.disaggregation.common.staging import rounds
from sglang.srt.disaggregation.control.protocol import KVLayout
from sglang.srt.distributed.device_communicators.transfer_types import Block
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool, PagedDevicePool
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.device.nsa_pool import NSATokenToKVPool
from sglang.srt.mem_cache.device.pool_registry import make_pools
from sglang.srt.mem_cache.device.row_pool import RowPool, RowSpec
from sglang.srt.mem_cache.device.state_pool import MambaPool, MambaSpec
from sglang.srt.mem_cache.device.state_spec import (
    ItemKind,
    KVSpec,
    PoolHitPolicy,
    PoolName,
    RankShare,
    RankSplit,
    StateBuffer,
    StateSpec,
)
from sglang.test.ci.ci_register import register_cpu_ci

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


def geometry_of(
    *pools: Any,
    weights: str = "w",
    dtype: torch.dtype = torch.float32,
    transport: str = "mooncake",
) -> PoolGeometry:
    return PoolGeometry.of(pools, weights, dtype, transport)


def layout_of(geometry: PoolGeometry, **changes: Any) -> KVLayout:
    return msgspec.structs.replace(geometry.layout("instance", "session"), **changes)


def move(blocks: Iterable[Block]) -> None:
    for block in blocks:
        ctypes.memmove(block.local, block.remote, block.length)


def test_pages_that_follow_each_other_on_both_sides_are_one_block_of_each_buffer() -> None:
    here, there = geometry_of(make_pool()), geometry_of(make_pool())
    page = here.pools[0].buffers[0].page_bytes
    assert (len(here.addresses), page) == (4, 4 * 2 * 3 * 4)
    (shard_slice,) = here.slices([layout_of(there)], 0)
    blocks = shard_slice.page_blocks([3, 4, 5, 9, 10, 2], [1, 2, 3, 4, 6, 7])
    assert not shard_slice.page_blocks([], [])
    runs = [(1, 3, 3), (4, 9, 1), (6, 10, 1), (7, 2, 1)]
    assert blocks == [
        Block(mine + own * page, other + their * page, count * page)
        for mine, other in zip(here.addresses, there.addresses, strict=True)
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
    (shard_slice,) = geometry_of(sink).slices([layout_of(geometry_of(source))], 0)
    move(shard_slice.page_blocks(theirs, own))
    for part, want in zip(sink.parts, wanted.parts, strict=True):
        for a, b in zip(part, want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("heads", "num_ranks", "can_be"),
    [(2, 1, True), (2, 2, True), (2, 4, True), (2, 3, False), (8, 6, False), (1, 7, True)],
)
def test_heads_are_split_evenly_or_kept_whole(heads: int, num_ranks: int, can_be: bool) -> None:
    why = geometry_of(make_pool(head_num=heads)).why_no_split(num_ranks)
    assert (why is None) is can_be
    if why is not None:
        assert why == f"the {heads} heads of pool kv cannot be split over {num_ranks} ranks"


def test_servers_of_one_layout_fit_whatever_their_size() -> None:
    here, there = geometry_of(make_pool()), geometry_of(make_pool(size=400))
    assert here.incompatibility(layout_of(there)) is None
    assert here.digest == there.digest


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"page_size": 2}, "page size 2 there, 4 here"),
        ({"computes": torch.bfloat16}, "dtype torch.bfloat16 there, torch.float32 here"),
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
    weights, computes = changes.pop("weights", "w"), changes.pop("computes", torch.float32)
    there = geometry_of(make_pool(**changes), weights=weights, dtype=computes)
    why = geometry_of(make_pool()).incompatibility(layout_of(there))
    assert why is not None and named in why
    assert why.startswith("its pages differ: ")


def test_servers_with_another_transport_are_refused_by_name() -> None:
    there = layout_of(geometry_of(make_pool(), transport="nixl"))
    why = geometry_of(make_pool()).incompatibility(there)
    assert why is not None and "transport nixl there, mooncake here" in why


def test_fp8_is_not_taken_for_bytes() -> None:
    """Though both are stored as bytes, and a page has as many."""
    fp8 = geometry_of(make_pool(dtype=torch.float8_e4m3fn))
    other = geometry_of(make_pool(dtype=torch.float8_e5m2))
    assert fp8.pools[0].buffers[0].page_bytes == other.pools[0].buffers[0].page_bytes
    why = fp8.incompatibility(layout_of(other))
    assert why is not None and "float8_e5m2 there" in why


def test_latent_rows_in_another_dtype_are_named() -> None:
    pools = [
        NSATokenToKVPool(8, 4, 512, dtype, 64, 1, "cpu", 128)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    ]
    there, here = (geometry_of(pool, pool.index_pool) for pool in pools)
    why = here.incompatibility(layout_of(there))
    assert why is not None and "--kv-cache-dtype" in why
    assert "latent[1, 576] torch.bfloat16 there, latent[1, 656] torch.float8_e4m3fn here" in why
    assert "index_k[128] torch.bfloat16 there, index_k[132] torch.float8_e4m3fn here" in why


def test_a_further_pool_is_named() -> None:
    pool = make_pool(page_size=1)
    both = geometry_of(pool, PagedDevicePool(page_marks(0, 1), pool.size, 1, "cpu"))
    alone = geometry_of(pool)
    for here, there, named in ((alone, both, "none here"), (both, alone, "none there")):
        why = here.incompatibility(layout_of(there))
        assert why is not None and named in why


def test_other_protocols_and_lists_are_refused() -> None:
    here = geometry_of(make_pool())
    why = here.incompatibility(layout_of(here, version=1))
    assert why == (
        "it speaks version 1 of the protocol, this server 8: start both servers with the same "
        "release"
    )
    # A digest that fits and a list that does not.
    why = here.incompatibility(layout_of(here, pools=[]))
    assert why == "its pages differ: it has 0 buffers, this server 4"


# ---- ranks that split heads --------------------------------------------------------------------

HEADS, PAGE = 4, 2
STATE_HEADS = 8
"""Value heads of linear attention, in groups of two with a key head."""


def heads_of(rank: int, ranks: int, total: int = HEADS) -> RankShare:
    """Heads of a rank as models split them; with more ranks than heads several share a head."""
    if ranks > total:
        return RankShare(
            RankSplit.REPLICATED, rank * total // ranks, rank * total // ranks + 1, total
        )
    each = total // ranks
    return RankShare(RankSplit.HEADS, rank * each, (rank + 1) * each, total)


class Rank:
    """Keys, values and states of a rank. Their bytes say which head, page, layer and buffer it is,
    or nothing."""

    def __init__(self, place: RankPlace, *, is_filled: bool) -> None:
        rank, ranks = place.rank % place.attn_tp_size, place.attn_tp_size
        kv, states = heads_of(rank, ranks), heads_of(rank, ranks, STATE_HEADS)
        num = kv.end - kv.begin
        self.place = place
        of_kv = KVSpec.of_heads((0, 1), num, 3, torch.float32, v_head_dim=2, share=kv)
        self.kv = MHATokenToKVPool.from_spec(of_kv, 8 * PAGE, PAGE, "cpu")
        values = states.end - states.begin
        keys = values // 2
        spec = MambaSpec.of_shapes(
            (1, 3),
            (values, 2, 3),
            (2 * keys * 2 + values * 3, 3),
            ssm_dtype=torch.float32,
            conv_dtype=torch.float32,
            share=states,
        )
        self.states = MambaPool(spec, 6, "cpu")
        if is_filled:
            self._fill(kv, states, keys)
        self.geometry = PoolGeometry.of([self.kv, self.states], "w", torch.float32)

    def _fill(self, kv: RankShare, states: RankShare, keys: int) -> None:
        for part, buffers in enumerate(self.kv.parts):
            for layer, buffer in enumerate(buffers):
                slots = torch.arange(len(buffer)).reshape(-1, 1, 1)
                heads = torch.arange(kv.begin, kv.end).reshape(1, -1, 1)
                dims = torch.arange(buffer.shape[2])
                buffer.copy_(part * 1e5 + layer * 1e4 + slots * 100 + heads * 10 + dims)
        slots = torch.arange(7)
        for layer in range(2):
            for head in range(states.begin, states.end):
                values = layer * 1e4 + slots * 100 + head * 10.0
                self.states.temporal[layer, :, head - states.begin] = values.reshape(-1, 1, 1)
                for i in range(3):
                    row = 2 * keys * 2 + (head - states.begin) * 3 + i
                    self.states.conv[layer, :, row] = (values + 3e5 + i).reshape(-1, 1)
            for key in range(keys):
                for run in range(2):
                    for i in range(2):
                        name = layer * 1e4 + slots * 100 + (states.begin // 2 + key) * 10.0
                        row = run * keys * 2 + key * 2 + i
                        self.states.conv[layer, :, row] = (name + 5e5 + run * 1e6 + i).reshape(
                            -1, 1
                        )

    def tensors(self) -> list[torch.Tensor]:
        return [*self.kv.k_buffer, *self.kv.v_buffer, self.states.temporal, self.states.conv]


def read_cuts(
    shard_slice: ShardSlice, theirs: Sequence[int], own: Sequence[int], *, capacity: int
) -> None:
    """Read the cut buffers of `shard_slice` through a staging buffer of `capacity` bytes."""
    memory = torch.full((capacity,), 7, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 8 :]
    index = torch.tensor(own)
    sizes = [cut.page_bytes for cut in shard_slice.cuts]
    for pieces in rounds(sizes, len(own), len(memory)):
        for piece in pieces:
            address = shard_slice.cuts[piece.place].address
            move(list(piece.blocks(memory.data_ptr(), address, theirs)))
        for piece in pieces:
            cut = shard_slice.cuts[piece.place]
            cut.unpack(piece.span(memory), index[piece.begin : piece.end])


def cut_bytes(shard_slice: ShardSlice) -> int:
    """Bytes of a page that are copied."""
    return sum(
        length * cut.own.shape[1] * cut.own.element_size()
        for cut in shard_slice.cuts
        for _, _, length in cut.ranges
    )


def copied(source: Rank, sink: Rank, theirs: Sequence[int], own: Sequence[int]) -> Rank:
    """`sink` with pages and the state (slot 3 to 5) of a rank with the same heads."""
    for buffers in zip((*source.kv.k_buffer, *source.kv.v_buffer),
                       (*sink.kv.k_buffer, *sink.kv.v_buffer), strict=True):  # fmt: skip
        there, here = (buffer.view(-1, PAGE, *buffer.shape[1:]) for buffer in buffers)
        here[list(own)] = there[list(theirs)]
    sink.states.temporal[:, 5] = source.states.temporal[:, 3]
    sink.states.conv[:, 5] = source.states.conv[:, 3]
    return sink


SIZES = [(1, 1), (2, 2), (2, 1), (1, 2), (4, 2), (2, 4)]


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize(("prefill", "decode"), SIZES)
def test_every_rank_gets_its_heads_whoever_has_them(
    prefill: int, decode: int, cp_size: int
) -> None:
    places = [RankPlace(rank, prefill * cp_size, prefill) for rank in range(prefill * cp_size)]
    sources = [Rank(place, is_filled=True) for place in places]
    layouts = [layout_of(one.geometry) for one in sources]
    theirs, own = [2, 3, 7, 1], [1, 2, 3, 8]
    givers: set[int] = set()
    for place in (RankPlace(rank, decode, decode) for rank in range(decode)):
        for draw in range(3):
            sink = Rank(place, is_filled=False)
            peers = place.partners(places[0])
            known = [layouts[peer] for peer in peers]
            assert all(sink.geometry.incompatibility(layout) is None for layout in known)
            num_bytes = 0
            for peer, shard_slice in zip(peers, sink.geometry.slices(known, draw), strict=True):
                blocks = [
                    *shard_slice.page_blocks(theirs, own),
                    *shard_slice.state_blocks(StateSlots(3), StateSlots(5)),
                ]
                move(blocks)
                num_bytes += sum(block.length for block in blocks)
                num_bytes += 4 * cut_bytes(shard_slice)
                read_cuts(shard_slice, theirs, own, capacity=300)
                if blocks:
                    givers.add(peer)
            want = copied(Rank(place, is_filled=True), Rank(place, is_filled=False), theirs, own)
            for got, wanted in zip(sink.tensors(), want.tensors(), strict=True):
                assert torch.equal(got, wanted)
            page_bytes = sum(buffer.page_bytes for buffer in sink.geometry.pools[0].buffers)
            assert num_bytes == 4 * page_bytes + sink.states.spec.num_bytes, "nothing twice"
    assert givers == set(range(prefill * cp_size)), "those who have the same share the work"


def test_what_the_other_rank_has_beside_is_left_alone() -> None:
    """Its heads of a page, and of a state."""
    source, sink = Rank(RankPlace(0, 2, 2), is_filled=True), Rank(RankPlace(), is_filled=False)
    other = Rank(RankPlace(1, 2, 2), is_filled=True)
    layouts = [layout_of(source.geometry), layout_of(other.geometry)]
    shard_slice, _ = sink.geometry.slices(layouts, 0)
    assert not shard_slice.page_blocks([1, 2], [4, 5])
    read_cuts(shard_slice, [1, 2], [4, 5], capacity=1000)
    move(shard_slice.state_blocks(StateSlots(1), StateSlots(1)))
    assert len(shard_slice.state_blocks(StateSlots(1), StateSlots(1))) == 2 * (1 + 3), (
        "a layer: temporal, and conv's runs"
    )
    for buffer in (*sink.kv.k_buffer, *sink.kv.v_buffer):
        pages = buffer.view(-1, PAGE, *buffer.shape[1:])
        assert pages[4:6, :, :2].all() or buffer is sink.kv.k_buffer[0]
        assert not pages[4:6, :, 2:].any() and not pages[:4].any() and not pages[6:].any()
    assert not sink.states.temporal[:, 1, 4:].any() and sink.states.temporal[:, 1, 1:4].all()


def test_a_head_that_nobody_has_is_named() -> None:
    source, sink = Rank(RankPlace(0, 2, 2), is_filled=True), Rank(RankPlace(), is_filled=False)
    with pytest.raises(IncompatibleLayouts, match="none of its ranks has head 2 of pool kv"):
        sink.geometry.slices([layout_of(source.geometry)], 0)


def test_heads_that_cannot_be_cut_out_are_refused_by_name() -> None:
    def marks(begin: int, end: int) -> PoolGeometry:
        share = RankShare(RankSplit.HEADS, begin, end, 2)
        return geometry_of(MarksPool(dataclasses.replace(prefix_marks(0), share=share), 4, 1))

    whole, half, rest = marks(0, 2), marks(0, 1), marks(1, 2)
    (shard_slice,) = whole.slices([layout_of(marks(0, 2))], 0)
    assert len(shard_slice.state_blocks(StateSlots(1), StateSlots(2))) == 1
    with pytest.raises(
        IncompatibleLayouts, match=r"pool mamba has heads 0 to 1 there, 0 to 2 here, .*tp"
    ):
        whole.slices([layout_of(half), layout_of(rest)], 0)


def test_models_of_other_heads_do_not_fit() -> None:
    here, there = geometry_of(make_pool(head_num=2)), geometry_of(make_pool(head_num=4))
    why = here.incompatibility(layout_of(there))
    assert why is not None and "heads of pool kv 4 there, 2 here" in why


@pytest.mark.parametrize(("prefill", "decode"), SIZES)
def test_items_of_several_tokens_and_states_of_requests_move(prefill: int, decode: int) -> None:
    """Heads of an item are cut out like those of a token; a row moves as a whole."""

    def pools_of(rank: int, ranks: int, *, is_filled: bool) -> dict[PoolName, BaseDevicePool]:
        share = heads_of(rank, ranks)
        count = share.end - share.begin
        kv = KVSpec.of_heads((0, 1), count, 3, torch.bfloat16, share=share)
        rows = RowSpec.of(
            (1,), 5, torch.float32, stride=4, name=PoolName.C128, indices_from_pool=PoolName.KV
        )
        ring = StateSpec(
            name=PoolName.SWA,
            layers=(0,),
            buffers=(StateBuffer("ring", (2,), torch.float32),),
            item=ItemKind.STATE,
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )
        own = StateSpec(
            name=PoolName.OPEN_GROUP,
            layers=(0, 1),
            buffers=(StateBuffer("group", (3,), torch.int16),),
            item=ItemKind.REQUEST,
        )
        specs = (dataclasses.replace(kv, stride=2), rows, ring, own)
        made = make_pools(specs, PAGES * 4, 4, "cpu", num_states=9, num_requests=9)
        for number, pool in enumerate(made.values() if is_filled else ()):
            for part in pool.parts:
                for layer in part:
                    items = torch.arange(len(layer)).view(-1, *[1] * (layer.dim() - 1))
                    layer.copy_(number * 100 + items.expand_as(layer))
                    if layer.dim() == 3:
                        heads = torch.arange(share.begin, share.end)[None, :, None]
                        layer += 25 * heads.to(layer.dtype)
        return made

    sources = [pools_of(rank, prefill, is_filled=True) for rank in range(prefill)]
    layouts = [layout_of(geometry_of(*one.values())) for one in sources]
    for rank in range(decode):
        mine = pools_of(rank, decode, is_filled=False)
        wanted = pools_of(rank, decode, is_filled=True)
        geometry = geometry_of(*mine.values())
        peers = RankPlace(rank, decode, decode).partners(RankPlace(0, prefill, prefill))
        known = [layouts[peer] for peer in peers]
        assert all(geometry.incompatibility(layout) is None for layout in known)
        for shard_slice in geometry.slices(known, rank):
            move(shard_slice.page_blocks([2, 3, 7], [4, 5, 1]))
            move(shard_slice.state_blocks(StateSlots(3, 6), StateSlots(5, 2)))
            read_cuts(shard_slice, [2, 3, 7], [4, 5, 1], capacity=300)
        moved = {4: 2, 5: 3, 1: 7}
        for name, pool in mine.items():
            pages = {PoolName.SWA: {5: 3}, PoolName.OPEN_GROUP: {2: 6}}.get(name, moved)
            size = pool.page_items
            for part, want in zip(pool.parts, wanted[name].parts, strict=True):
                for got, full in zip(part, want, strict=True):
                    expected = torch.zeros_like(full)
                    for own, their in pages.items():
                        expected[own * size : (own + 1) * size] = full[
                            their * size : (their + 1) * size
                        ]
                    assert torch.equal(got, expected), name


def test_another_stride_is_named() -> None:
    def rows(stride: int) -> PoolGeometry:
        return geometry_of(
            RowPool.from_spec(RowSpec.of((0,), 5, torch.float32, stride=stride), 8, 4, "cpu")
        )

    why = rows(2).incompatibility(layout_of(rows(4)))
    assert (
        why is not None and "pool kv rows[5] for 4 tokens torch.float32 there, rows[5] for 2" in why
    )
