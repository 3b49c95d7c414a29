"""Where the pages and states of a rank's pools are, and which bytes to read for them of another's.

Ranks that split the heads of attention otherwise than their peers read runs of heads. In a page
these are strips, one for each token; a recurrent state has all of a run together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from sglang.srt.disaggregation.common.protocol import VERSION, Offer, PoolBuffer, PoolOffer
from sglang.srt.distributed.device_communicators.transfer_types import Block
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
from sglang.srt.mem_cache.device.state_spec import ItemKind, StateBuffer, StateSpec

_Numbers = npt.NDArray[np.int64]


class CannotServe(ValueError):
    """Ranks of a prefill server do not have what this one needs; the message says what."""


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """The pages and states of all pools of a server's rank.

    Attributes:
        pools: In the same order on servers of the same model.
        sizes: Bytes of each buffer, pool by pool.
        facts: All that determines the bytes of a head, for errors.
    """

    pools: tuple[PoolOffer, ...]
    sizes: tuple[int, ...]
    facts: dict[str, str]

    @classmethod
    def of(cls, pools: Sequence[BaseDevicePool], weights_identity: str) -> PoolGeometry:
        """Of the pools of a model whose requests own slots of one of them, and maybe a state."""
        offers: list[PoolOffer] = []
        sizes: list[int] = []
        facts = {"weights": weights_identity, "page size": str(pools[0].page_size)}
        for pool in pools:
            spec, share = pool.spec, pool.spec.share
            addresses, lengths, page_bytes = pool.get_contiguous_buf_infos()
            num_heads = share.end - share.begin
            parts = [_parts(buffer, num_heads) for buffer in spec.buffers for _ in spec.layers]
            buffers = list(map(PoolBuffer, addresses, page_bytes, parts))
            is_state = spec.item is ItemKind.STATE
            offers.append(
                PoolOffer(spec.name, is_state, pool.page_size, share.begin, share.end, buffers)
            )
            sizes += lengths
            facts[f"pool {spec.name}"] = _shapes(spec, num_heads, pool.dtype)
            facts[f"layers of pool {spec.name}"] = str(list(spec.layers))
            facts[f"heads of pool {spec.name}"] = str(share.total)
        return cls(tuple(offers), tuple(sizes), facts)

    @property
    def addresses(self) -> list[int]:
        """Of each buffer, pool by pool."""
        return [buffer.address for pool in self.pools for buffer in pool.buffers]

    @property
    def digest(self) -> str:
        """Equal where heads of two servers can be exchanged."""
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(sorted(self.facts.items())))

    def offer(self, instance_id: str, session_id: str) -> Offer:
        """What is told to those who want to read."""
        return Offer(VERSION, instance_id, session_id, self.digest, self.facts, list(self.pools))

    def why_not(self, offer: Offer) -> str | None:
        """Why nothing of `offer` can be read into these pools; None: its heads can."""
        if offer.version != VERSION:
            return f"it speaks version {offer.version} of the protocol, this server {VERSION}"
        if offer.layout == self.digest:
            theirs, own = (
                sum(len(p.buffers) for p in pools) for pools in (offer.pools, self.pools)
            )
            if theirs == own and len(offer.pools) == len(self.pools):
                return None
            return f"its pages differ: it has {theirs} buffers, this server {own}"
        names = sorted(self.facts.keys() | offer.layout_facts.keys())
        unlike = [
            f"{name} {offer.layout_facts.get(name, 'none')} there, {self.facts.get(name, 'none')} "
            "here"
            for name in names
            if offer.layout_facts.get(name) != self.facts.get(name)
        ]
        return "its pages differ: " + "; ".join(unlike)

    def portions(self, offers: Sequence[Offer], draw: int) -> list[Portion]:
        """What to read of each rank of a prefill server, so that all heads are read once.

        Args:
            offers: Of all ranks that have heads in common with this one; each fits (`why_not`).
            draw: Any number. Where several ranks have the same heads, it says who gives them.

        Raises:
            CannotServe: A head is nobody's, or heads cannot be cut out.
        """
        portions = [Portion([]) for _ in offers]
        for place, own in enumerate(self.pools):
            theirs = [offer.pools[place] for offer in offers]
            for giver, begin, end in _givers(own, theirs, draw):
                portions[giver].cuts.append(_cut(own, theirs[giver], begin, end))
        return portions


@dataclass(frozen=True, slots=True)
class _Strip:
    """A run of heads in a buffer of both sides."""

    local: int
    """Address of it in the first item of page 0; of a state, in slot 0."""
    remote: int
    length: int
    """Bytes of it in an item."""
    local_page: int
    """Bytes from a page to the next."""
    remote_page: int
    local_item: int
    """Bytes from an item of a page to the next."""
    remote_item: int
    items: int
    """Of a page. One where both sides have pages of nothing else: then they are not cut."""


@dataclass(frozen=True, slots=True)
class _Cut:
    is_state: bool
    strips: list[_Strip]


@dataclass(frozen=True, slots=True)
class Portion:
    """What this rank reads of one rank of a prefill server; nothing, where others give it all."""

    cuts: list[_Cut]

    def page_blocks(self, theirs: Sequence[int], own: Sequence[int]) -> list[Block]:
        """What to read for pages `theirs` to get them as pages `own`.

        Whole pages that follow one another on both sides are one block of each buffer. Of pages
        that are cut, each token is a block of each buffer.
        """
        return list(self._blocks(theirs, own, is_state=False))

    def state_blocks(self, theirs: int, own: int) -> list[Block]:
        """The same for recurrent states, by their slots."""
        return list(self._blocks([theirs], [own], is_state=True))

    def _blocks(
        self, theirs: Sequence[int], own: Sequence[int], *, is_state: bool
    ) -> Iterator[Block]:
        there, here = np.asarray(theirs, dtype=np.int64), np.asarray(own, dtype=np.int64)
        assert len(there) == len(here)
        strips = [strip for cut in self.cuts if cut.is_state is is_state for strip in cut.strips]
        if not strips or not len(there):
            return
        breaks = np.flatnonzero((np.diff(there) != 1) | (np.diff(here) != 1)) + 1
        begins = np.concatenate([[0], breaks])
        lengths = np.diff(np.concatenate([begins, [len(there)]]))
        for strip in strips:
            if strip.items == 1 and strip.length == strip.local_page == strip.remote_page:
                locals_, remotes = _at(strip, here[begins], there[begins])
                counts = (lengths * strip.length).tolist()
                yield from map(Block, locals_, remotes, counts)
            else:
                locals_, remotes = _at(strip, here, there)
                yield from map(Block, locals_, remotes, [strip.length] * len(locals_))


def _at(strip: _Strip, here: _Numbers, there: _Numbers) -> tuple[list[int], list[int]]:
    """Addresses of a strip in all items of these pages."""
    items = np.arange(strip.items, dtype=np.int64)
    local = strip.local + here[:, None] * strip.local_page + items * strip.local_item
    remote = strip.remote + there[:, None] * strip.remote_page + items * strip.remote_item
    return local.ravel().tolist(), remote.ravel().tolist()


def _parts(buffer: StateBuffer, num_heads: int) -> list[int]:
    """Bytes of the runs of an item that each are split evenly by heads; [] where none are."""
    parts = buffer.head_parts
    if not parts or any(length % num_heads for length in parts):
        return []
    row_bytes = buffer.num_bytes // buffer.shape[0]
    return [length * row_bytes for length in parts]


def _shapes(spec: StateSpec, num_heads: int, dtype: object) -> str:
    """Of a head in each buffer; of the whole item where heads cannot be cut out."""
    shapes = []
    for buffer in spec.buffers:
        shape = list(buffer.shape)
        if _parts(buffer, num_heads):
            shape[0] //= num_heads
        shapes.append(f"{buffer.name}{shape}")
        if buffer.dtype != spec.dtype:
            shapes[-1] += f" {buffer.dtype}"
    return f"{' '.join(shapes)} {dtype}"


def _givers(
    own: PoolOffer, theirs: Sequence[PoolOffer], draw: int
) -> Iterator[tuple[int, int, int]]:
    """Who gives which heads `[begin, end)`, in order."""
    begin = own.begin
    while begin < own.end:
        holders = [i for i, one in enumerate(theirs) if one.begin <= begin < one.end]
        if not holders:
            raise CannotServe(f"none of its ranks has head {begin} of pool {own.name}")
        giver = holders[draw % len(holders)]
        end = min(own.end, theirs[giver].end)
        yield giver, begin, end
        begin = end


def _cut(own: PoolOffer, their: PoolOffer, begin: int, end: int) -> _Cut:
    """Heads `[begin, end)` in all buffers of a pool."""
    is_whole = (own.begin, own.end) == (their.begin, their.end) == (begin, end)
    strips: list[_Strip] = []
    for mine, other in zip(own.buffers, their.buffers, strict=True):
        if is_whole:
            local, remote, size = mine.address, other.address, mine.page_bytes
            strips.append(_Strip(local, remote, size, size, size, 0, 0, 1))
            continue
        if not mine.head_parts or len(mine.head_parts) != len(other.head_parts):
            raise CannotServe(
                f"pool {own.name} has heads {their.begin} to {their.end} there, {own.begin} to "
                f"{own.end} here, and fewer cannot be cut out of it: use the same --tp-size"
            )
        at, their_at = 0, 0
        for part, their_part in zip(mine.head_parts, other.head_parts, strict=True):
            head = part // (own.end - own.begin)
            strips.append(
                _Strip(
                    local=mine.address + at + (begin - own.begin) * head,
                    remote=other.address + their_at + (begin - their.begin) * head,
                    length=(end - begin) * head,
                    local_page=mine.page_bytes,
                    remote_page=other.page_bytes,
                    local_item=mine.page_bytes // own.page_size,
                    remote_item=other.page_bytes // their.page_size,
                    items=own.page_size,
                )
            )
            at, their_at = at + part, their_at + their_part
    return _Cut(own.is_state, strips)
