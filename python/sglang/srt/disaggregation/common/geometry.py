"""Addresses of pages and states in a rank's pools, and the bytes to read for them from other ranks.

Ranks that split the heads of attention differently from their peers need ranges of heads. In a page
the bytes of a range are scattered, a piece in each token, so whole pages are read and the pieces
copied (`staging`). In a recurrent state they are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash

from sglang.srt.constants import MIB
from sglang.srt.disaggregation.control.protocol import (
    VERSION,
    KVLayout,
    PoolBuffer,
    PoolLayout,
    RowsLayout,
)
from sglang.srt.distributed.device_communicators.transfer_types import Block
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool, PagedDevicePool
from sglang.srt.mem_cache.device.request_pool import RequestPool
from sglang.srt.mem_cache.device.state_pool import StatePool
from sglang.srt.mem_cache.device.state_spec import ItemKind, StateBuffer, StateSpec

STAGING_BYTES: Final = 32 * MIB
"""Least bytes of a buffer that pages are read into."""
_WORDS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Dtypes of the words that copies of raw memory move, by their bytes."""


class StateSlots(NamedTuple):
    """Slots of one prompt in the pools of states of a rank. None: the model has no such pool.

    Attributes:
        prefix: Slot of the state of the whole prompt.
        request: Row of the request, for its state without snapshots.
    """

    prefix: int | None = None
    request: int | None = None

    def of(self, kind: ItemKind) -> int | None:
        """The slot in pools whose items are `kind`."""
        return self.request if kind is ItemKind.REQUEST else self.prefix


NO_STATES: Final = StateSlots()


class IncompatibleLayouts(ValueError):
    """The ranks of a prefill server lack something that this rank needs; the message names it."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank of a server. Plain numbers.

    The ranks of a server split the attention heads evenly, in rank order. A decode rank reads from
    each prefill rank that has some of the same heads. It polls all of them, even if several have
    the same bytes, because each prefill rank must know its readers, and when all have read.

    Attributes:
        num_ranks: Ranks of the server; a multiple of `attn_tp_size`.
        attn_tp_size: Number of ranks over which heads are split; see `RankGroup`.
    """

    rank: int = 0
    num_ranks: int = 1
    attn_tp_size: int = 1

    def partners(self, other: RankPlace) -> list[int]:
        """The ranks of the server of `other` that have heads in common with this rank, for any
        number of heads."""
        share, size = self.rank % self.attn_tp_size, self.attn_tp_size
        shares = [rank % other.attn_tp_size for rank in range(other.num_ranks)]
        return [
            rank
            for rank, there in enumerate(shares)
            if share * other.attn_tp_size < (there + 1) * size
            and there * size < (share + 1) * other.attn_tp_size
        ]


@dataclass(frozen=True)
class PoolGeometry:
    """The pages and states of all pools of a server's rank.

    Attributes:
        pools: The pools, in the same order on servers of the same model.
        facts: Everything that determines the bytes of a head, for errors.
        tensors: Tensors of the pools; of paged pools one for each buffer, `[items, ...]`.
        num_heads: Heads of the whole model in each pool.
        kinds: Kind of the items of each pool.
    """

    pools: tuple[PoolLayout, ...]
    facts: dict[str, str]
    tensors: tuple[torch.Tensor, ...]
    num_heads: tuple[int, ...]
    kinds: tuple[ItemKind, ...]

    @classmethod
    def of(
        cls,
        pools: Sequence[BaseDevicePool],
        weights_identity: str,
        dtype: torch.dtype,
        transport: str = "mooncake",
    ) -> PoolGeometry:
        """The geometry of a model's pools. Requests own slots of one pool, and maybe a state.

        Args:
            dtype: Dtype in which the model computes; its pools may have another one.
            transport: Name of what moves the bytes.
        """
        layouts: list[PoolLayout] = []
        tensors: list[torch.Tensor] = []
        facts = {
            "weights": weights_identity,
            "dtype": str(dtype),
            "page size": str(pools[0].page_size),
            "transport": transport,
        }
        for pool in pools:
            spec, share = pool.spec, pool.spec.share
            addresses, _, page_bytes = pool.get_contiguous_buf_infos()
            num_heads = share.end - share.begin
            parts = [_parts(buffer, num_heads) for buffer in spec.buffers for _ in spec.layers]
            buffers = list(map(PoolBuffer, addresses, page_bytes, parts))
            is_state = spec.item is not ItemKind.TOKEN
            layouts.append(
                PoolLayout(spec.name, is_state, pool.page_size, share.begin, share.end, buffers)
            )
            if isinstance(pool, PagedDevicePool):
                tensors += [buffer for part in pool.parts for buffer in part]
            elif isinstance(pool, StatePool | RequestPool):
                tensors += pool.buffers
            facts[f"pool {spec.name}"] = _shapes(spec, num_heads, pool.dtype)
            facts[f"layers of pool {spec.name}"] = str(list(spec.layers))
            facts[f"heads of pool {spec.name}"] = str(share.total)
        heads = tuple(pool.spec.share.total for pool in pools)
        kinds = tuple(pool.spec.item for pool in pools)
        return cls(tuple(layouts), facts, tuple(tensors), heads, kinds)

    @property
    def addresses(self) -> list[int]:
        return [buffer.address for pool in self.pools for buffer in pool.buffers]

    @cached_property
    def _tensor_at(self) -> dict[int, torch.Tensor]:
        return {tensor.data_ptr(): tensor for tensor in self.tensors}

    @cached_property
    def digest(self) -> str:
        """Digest that is equal on two servers if they can exchange heads."""
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(sorted(self.facts.items())))

    def page_rows(self) -> dict[int, torch.Tensor]:
        """The buffers of pages by address, as words `[pages, words of a page]`."""
        return {
            buffer.address: _page_rows(self._tensor_at[buffer.address], buffer.page_bytes)
            for pool in self.pools
            if not pool.is_state
            for buffer in pool.buffers
        }

    def layout(
        self,
        instance_id: str,
        session_id: str,
        *,
        unit_bytes: int = 0,
        rows: RowsLayout | None = None,
    ) -> KVLayout:
        """Layout for servers that read."""
        return KVLayout(
            VERSION,
            instance_id,
            session_id,
            self.digest,
            self.facts,
            list(self.pools),
            unit_bytes,
            rows,
        )

    def incompatibility(self, layout: KVLayout) -> str | None:
        """Reason why `layout` cannot be read into these pools; None: its heads fit."""
        if layout.version != VERSION:
            return (
                f"it speaks version {layout.version} of the protocol, this server {VERSION}: start "
                "both servers with the same release"
            )
        if layout.digest == self.digest:
            theirs, own = (
                sum(len(p.buffers) for p in pools) for pools in (layout.pools, self.pools)
            )
            if theirs == own and len(layout.pools) == len(self.pools):
                return None
            return f"its pages differ: it has {theirs} buffers, this server {own}"
        names = sorted(self.facts.keys() | layout.facts.keys())
        unlike = [
            f"{name} {layout.facts.get(name, 'none')} there, {self.facts.get(name, 'none')} here"
            for name in names
            if layout.facts.get(name) != self.facts.get(name)
        ]
        return (
            f"its pages differ: {'; '.join(unlike)}; start both with the same model, --page-size, "
            "--dtype, --kv-cache-dtype and --speculative-algorithm"
        )

    def why_no_split(self, num_ranks: int) -> str | None:
        """Reason why no server of this model splits its heads over `num_ranks` ranks, or None."""
        for pool, total in zip(self.pools, self.num_heads, strict=True):
            if total % num_ranks and num_ranks % total:
                return (
                    f"the {total} heads of pool {pool.name} cannot be split over {num_ranks} ranks"
                )
        return None

    def slices(self, layouts: Sequence[KVLayout], draw: int) -> list[ShardSlice]:
        """The slices to read from the ranks of a prefill server: each head is read once.

        Args:
            layouts: Layouts of all ranks that have heads in common with this one; each fits
                (`incompatibility`).
            draw: Any number; it selects a rank if several have the same heads.

        Raises:
            IncompatibleLayouts: A head is on none of the ranks, or heads cannot be cut out.
        """
        slices = [ShardSlice([], [], []) for _ in layouts]
        for place, own in enumerate(self.pools):
            theirs = [layout.pools[place] for layout in layouts]
            for source, begin, end in _source_ranks(own, theirs, draw):
                shard_slice, their = slices[source], theirs[source]
                is_whole = (own.begin, own.end) == (their.begin, their.end) == (begin, end)
                if is_whole:
                    shard_slice.whole_pools.add(own.name)
                for mine, other in zip(own.buffers, their.buffers, strict=True):
                    if is_whole:
                        ranges = [(0, 0, mine.page_bytes)]
                    else:
                        ranges = _head_ranges((own, mine), (their, other), begin, end)
                    if own.is_state:
                        kind = self.kinds[place]
                        shard_slice.states.append(_States(kind, mine, other, ranges))
                        continue
                    tensor = self._tensor_at[mine.address]
                    items = mine.page_bytes // tensor[0].nbytes
                    if is_whole:
                        shard_slice.wholes.append(
                            WholeBuffer(other.address, mine.page_bytes, tensor)
                        )
                    else:
                        shard_slice.cuts.append(CutBuffer.of(tensor, items, other, ranges))
        return slices


_HeadRange = tuple[int, int, int]
"""Contiguous bytes of an item: offset on this rank, offset on the other rank, length."""


@dataclass(frozen=True, slots=True)
class WholeBuffer:
    """A buffer of another rank whose pages have the same bytes as this rank's.

    Attributes:
        address: Address of the other rank's buffer.
        page_bytes: Bytes of a page, on both sides.
        own: This rank's buffer, `[items, ...]`.
    """

    address: int
    page_bytes: int
    own: torch.Tensor

    def unpack(self, pages: torch.Tensor, own: torch.Tensor) -> None:
        """See `CutBuffer.unpack`."""
        rows = _page_rows(self.own, self.page_bytes)
        rows.index_copy_(0, own, pages.view(rows.dtype).view(len(own), -1))


@dataclass(frozen=True, slots=True)
class CutBuffer:
    """A buffer of a rank with other heads; this rank needs a part of its pages.

    Attributes:
        address: Address of the other rank's buffer.
        page_bytes: Bytes of a page on the other rank.
        own: This rank's buffer as words `[pages, page_items, words of an item]`.
        ranges: Head ranges in words of an item.
    """

    address: int
    page_bytes: int
    own: torch.Tensor
    ranges: list[_HeadRange]

    @classmethod
    def of(
        cls, tensor: torch.Tensor, page_items: int, other: PoolBuffer, ranges: list[_HeadRange]
    ) -> CutBuffer:
        """Args:
        tensor: This rank's buffer, `[items, ...]`.
        ranges: Head ranges in bytes.
        """
        raw = tensor.view(-1, page_items, tensor[0].numel()).view(torch.uint8)
        numbers = [raw.shape[2], other.page_bytes // page_items, *(n for s in ranges for n in s)]
        size = next(size for size in _WORDS if not any(number % size for number in numbers))
        in_words = [(own // size, their // size, length // size) for own, their, length in ranges]
        return cls(other.address, other.page_bytes, raw.view(_WORDS[size]), in_words)

    def unpack(self, pages: torch.Tensor, own: torch.Tensor) -> None:
        """Copy the head ranges that this rank needs from read pages to its own pages.

        Args:
            pages: uint8 `[n * page_bytes]` on the device: pages of the other rank.
            own: int64 `[n]` on the device: this rank's pages.
        """
        theirs = pages.view(self.own.dtype).view(len(own), self.own.shape[1], -1)
        for here, there, length in self.ranges:
            target = self.own[:, :, here : here + length]
            target.index_copy_(0, own, theirs[:, :, there : there + length])


@dataclass(frozen=True, slots=True)
class _States:
    kind: ItemKind
    mine: PoolBuffer
    other: PoolBuffer
    ranges: list[_HeadRange]


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """The part that this rank reads from one rank of a prefill server; empty if other ranks give
    all.

    Attributes:
        wholes: Buffers of pages with the same heads on both sides.
        cuts: Buffers of pages with other heads.
        whole_pools: Pools of pages and of states with the same heads on both sides.
    """

    wholes: list[WholeBuffer]
    states: list[_States]
    cuts: list[CutBuffer]
    whole_pools: set[str] = field(default_factory=set)

    @property
    def buffers(self) -> list[WholeBuffer | CutBuffer]:
        """All buffers of pages."""
        return [*self.wholes, *self.cuts]

    @property
    def page_bytes(self) -> int:
        """Bytes that are read for a page."""
        return sum(buffer.page_bytes for buffer in self.buffers)

    def num_blocks(self, theirs: Sequence[int], own: Sequence[int]) -> int:
        """Number of blocks to read pages `theirs` from pool to pool."""
        both, there = (len(_begins(pages)) for pages in ((theirs, own), (theirs,)))
        return both * len(self.wholes) + there * len(self.cuts)

    def page_blocks(self, theirs: Sequence[int], own: Sequence[int]) -> list[Block]:
        """Blocks that read pages `theirs` into pages `own`, except for `cuts`.

        Pages that follow one another on both sides are one block of each buffer.
        """
        assert len(theirs) == len(own)
        begins = _begins((theirs, own))
        lengths = np.diff(np.append(begins, len(theirs))).tolist()
        runs = [
            (own[begin], theirs[begin], length)
            for begin, length in zip(begins.tolist(), lengths, strict=True)
        ]
        return [
            Block(
                one.own.data_ptr() + page * one.page_bytes,
                one.address + remote * one.page_bytes,
                count * one.page_bytes,
            )
            for one in self.wholes
            for page, remote, count in runs
        ]

    def state_blocks(self, theirs: StateSlots, own: StateSlots) -> list[Block]:
        """Blocks that read the states in slots `theirs` into slots `own`, which have the same
        kinds."""
        blocks: list[Block] = []
        for one in self.states:
            source, target = theirs.of(one.kind), own.of(one.kind)
            if source is None or target is None:
                continue
            mine = one.mine.address + target * one.mine.page_bytes
            other = one.other.address + source * one.other.page_bytes
            blocks += [Block(mine + here, other + there, size) for here, there, size in one.ranges]
        return blocks


def _page_rows(tensor: torch.Tensor, page_bytes: int) -> torch.Tensor:
    """A buffer as the widest words `[pages, words of a page]`."""
    offset = tensor.storage_offset() * tensor.element_size()
    size = next(size for size in _WORDS if not (page_bytes % size or offset % size))
    return tensor.view(-1).view(torch.uint8).view(_WORDS[size]).view(-1, page_bytes // size)


def _begins(lists: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Index of the first page of each run that is consecutive in all lists. The lists are equally
    long."""
    if not lists[0]:
        return np.empty(0, dtype=np.int64)
    breaks = [np.diff(np.asarray(pages, dtype=np.int64)) != 1 for pages in lists]
    return np.append(0, np.flatnonzero(np.logical_or.reduce(breaks)) + 1)


def _parts(buffer: StateBuffer, num_heads: int) -> list[int]:
    """Bytes of the runs of an item that each are split evenly by heads; [] if it cannot be
    split."""
    parts = buffer.head_parts
    if not parts or any(length % num_heads for length in parts):
        return []
    row_bytes = buffer.num_bytes // buffer.shape[0]
    return [length * row_bytes for length in parts]


def _shapes(spec: StateSpec, num_heads: int, dtype: object) -> str:
    """Shapes of a head in each buffer; shapes of the whole item if heads cannot be cut out."""
    shapes = []
    for buffer in spec.buffers:
        shape = list(buffer.shape)
        if _parts(buffer, num_heads):
            shape[0] //= num_heads
        shapes.append(f"{buffer.name}{shape}")
        if buffer.dtype != spec.dtype:
            shapes[-1] += f" {buffer.dtype}"
    if spec.stride > 1:
        shapes.append(f"for {spec.stride} tokens")
    if spec.item is ItemKind.REQUEST:
        shapes.append("for a request")
    return f"{' '.join(shapes)} {dtype}"


def _source_ranks(
    own: PoolLayout, theirs: Sequence[PoolLayout], draw: int
) -> Iterator[tuple[int, int, int]]:
    """Runs of heads `[begin, end)` of this rank, each with the index of the rank that gives it."""
    begin = own.begin
    while begin < own.end:
        holders = [i for i, one in enumerate(theirs) if one.begin <= begin < one.end]
        if not holders:
            raise IncompatibleLayouts(f"none of its ranks has head {begin} of pool {own.name}")
        source = holders[draw % len(holders)]
        end = min(own.end, theirs[source].end)
        yield source, begin, end
        begin = end


def _head_ranges(
    own: tuple[PoolLayout, PoolBuffer], their: tuple[PoolLayout, PoolBuffer], begin: int, end: int
) -> list[_HeadRange]:
    """Bytes of heads `[begin, end)` in an item of a buffer. Raises IncompatibleLayouts if the heads
    cannot be cut out."""
    (here, mine), (there, other) = own, their
    if not mine.head_parts or len(mine.head_parts) != len(other.head_parts):
        raise IncompatibleLayouts(
            f"pool {here.name} has heads {there.begin} to {there.end} there, {here.begin} to "
            f"{here.end} here, and fewer cannot be cut out of it: use the same --tp-size"
        )
    if other.page_bytes > STAGING_BYTES:
        raise IncompatibleLayouts(
            f"a page of pool {here.name} has {other.page_bytes} bytes of a layer there, which are "
            f"too many to be cut ({STAGING_BYTES}): use the same --tp-size, or smaller pages"
        )
    ranges: list[_HeadRange] = []
    at, their_at = 0, 0
    for part, their_part in zip(mine.head_parts, other.head_parts, strict=True):
        head = part // (here.end - here.begin)
        own_begin = at + (begin - here.begin) * head
        ranges.append((own_begin, their_at + (begin - there.begin) * head, (end - begin) * head))
        at, their_at = at + part, their_at + their_part
    return ranges
