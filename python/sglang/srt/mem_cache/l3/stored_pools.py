"""How the pages of a model's pools map to objects in L3. Pure, any thread.

A page has a part in each pool that has a page for it; a state follows one page of a prefix.

Ranks of a server hold different heads of the same pages, or the same heads. An object has the name
of its heads and not of a rank, so that ranks with equal bytes share it; one of them writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import xxhash

from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer, SidecarPoolSpec
from sglang.srt.mem_cache.device.state_spec import PoolHitPolicy, PoolName, RankShare
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    _resolve_shared_pool_transfers,
)
from sglang.srt.mem_cache.storage.types import CacheOutcome
from sglang.srt.mem_cache.tree.radix_key import PageHash

_SETTING = "extra config tp_lcm_size"


class StoredObject(NamedTuple):
    """One of the objects that a page of a pool is stored as."""

    pool: str
    """Name of the pool in the backend: the pool's own for the first object, the name with the heads
    for further ones."""
    name: str
    """Last part of the object's key: `{pool}`, or `{pool}/h{first}-{last}.{total}` if the object
    does not hold all heads."""


@dataclass(frozen=True, slots=True)
class PoolShards:
    """How a rank's pages of one pool are stored."""

    objects: tuple[StoredObject, ...]
    """Objects that a page consists of, in the order of heads; at least one."""
    num_writers: int = 1
    """Ranks that hold the same bytes as this one, itself included."""
    writer: int = 0
    """Index of this rank among them, from 0."""

    @classmethod
    def of(
        cls, pool: str, share: RankShare, ranks: RankGroup, tp_lcm_size: int | None = None
    ) -> PoolShards:
        """The objects of a pool whose heads are split over `ranks`.

        Args:
            share: The heads that this rank has.
            tp_lcm_size: An object holds the heads that one of this many ranks would have; None:
                those of this rank.

        Raises:
            ValueError: The heads are not split evenly, or `tp_lcm_size` cannot work; see
                `check_tp_lcm_size`.
        """
        num_heads = share.end - share.begin
        tp_size, tp_rank = ranks.attn_tp_size, ranks.attn_tp_rank
        replicas, rest = divmod(tp_size * num_heads, share.total)
        if rest or not replicas or share.begin != tp_rank // replicas * num_heads:
            raise ValueError(
                f"pool {pool}: rank {tp_rank} of {tp_size} has heads {share.begin} to "
                f"{share.end - 1} of {share.total}, which is no even split; L3 needs one"
            )
        size = num_heads
        if tp_lcm_size is not None:
            check_tp_lcm_size(tp_lcm_size, pool, share.total, tp_size)
            size = max(1, share.total // tp_lcm_size)
        names = [pool]
        if size != share.total:
            begins = range(share.begin, share.end, size)
            names = [f"{pool}/h{begin}-{begin + size - 1}.{share.total}" for begin in begins]
        return cls(
            tuple(map(StoredObject, [pool, *names[1:]], names)),
            num_writers=replicas * ranks.attn_cp_size,
            writer=ranks.attn_cp_rank * replicas + tp_rank % replicas,
        )

    @property
    def is_split(self) -> bool:
        """True if a page is several objects."""
        return len(self.objects) > 1

    @property
    def holds_all_heads(self) -> bool:
        """True if a page is one object on all ranks."""
        return self.objects[0].name == self.objects[0].pool

    def writes(self, object_key: str) -> bool:
        """True if this rank writes an object that it holds. Exactly one of the ranks that hold an
        object writes it; each rank writes about equally many."""
        if self.num_writers == 1:
            return True
        return xxhash.xxh3_64_intdigest(object_key.encode()) % self.num_writers == self.writer


def check_tp_lcm_size(tp_lcm_size: int, pool: str, total_heads: int, tp_size: int) -> None:
    """Raise ValueError, with the remedy, where heads cannot be stored as of `tp_lcm_size` ranks.

    Args:
        tp_lcm_size: A common multiple of the sizes of all servers that share the store.
        total_heads: Heads of the model in this pool.
        tp_size: Ranks over which this server splits heads.
    """
    if tp_lcm_size < 1 or tp_lcm_size % tp_size:
        raise ValueError(
            f"{_SETTING}: {tp_lcm_size} is no multiple of the {tp_size} ranks that split the heads "
            "of this server; give a common multiple of the sizes of all servers that share the "
            "store"
        )
    if total_heads == 1:
        return
    if total_heads % tp_lcm_size and tp_lcm_size % total_heads:
        raise ValueError(
            f"{_SETTING}: {tp_lcm_size} ranks cannot split the {total_heads} heads of pool {pool} "
            f"evenly; give a divisor or a multiple of {total_heads}"
        )


class StoredPools:
    """Turns transfers of pools into transfers of objects.

    Args:
        namespace: First part of every key.
        queries: The pools beside the primary one, and what a prefix needs of each.
        auxiliary_pools: The pools without slots of their own, whose pages are stored as well.
        shards: How pages of a pool are divided into objects, by pool. A page of a pool that is not
            here is one object, and this rank writes all.

    Attributes:
        shards: As given.
        questions: One transfer for each object of a page except the primary pool's first: what a
            backend is asked about beside that.
    """

    def __init__(
        self,
        namespace: str = "",
        queries: Sequence[PoolTransfer] = (),
        auxiliary_pools: Sequence[SidecarPoolSpec] = (),
        shards: Mapping[str, PoolShards] | None = None,
    ) -> None:
        self._namespace = namespace
        self._auxiliary_pools = auxiliary_pools
        self.shards = shards or {}
        self._object_names = {
            stored.pool: (one, stored.name)
            for one in self.shards.values()
            if one.num_writers > 1
            for stored in one.objects
        }
        """Shards and last part of the key, by pool as the backend knows it. Pools that
        this rank writes whole are left out."""
        self._is_split = any(one.is_split for one in self.shards.values())
        self.questions = self._by_object([PoolTransfer(PoolName.KV), *queries])[1:]

    def keys(self, hashes: Sequence[str]) -> list[str]:
        """The keys of pages, without pool and shard."""
        return [f"{self._namespace}/{page}" for page in hashes]

    def objects(
        self,
        transfers: Sequence[PoolTransfer],
        hashes: Sequence[PageHash],
        begin: int = 0,
        end: int | None = None,
        *,
        last: int | None = None,
    ) -> list[PoolTransfer]:
        """One transfer for each object of the pages from `begin` to `end`, with the keys of the
        store. The primary pool's comes first; each pool's first object has its name.

        A pool of `ALL_PAGES` has a page for each of `hashes`. A pool of `TRAILING_PAGES` has states
        after the pages that its `keys` name; without keys it has one, after page `last`.

        Args:
            transfers: Transfers of an operation on all of `hashes`, with host slots.
            hashes: One for each page.
            begin: First page.
            end: Page after the last; by default all.
            last: Pages that are going to be moved; by default all.
        """
        chosen = list(hashes[begin:end])
        parts = []
        for transfer in transfers:
            slots = transfer.host_indices
            assert slots is not None, f"pool transfer {transfer.name} has no host slots"
            if transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
                slots = slots.view(len(hashes), -1)[begin:end].reshape(-1)
                pages: list[str] = [*chosen]
            else:
                before = _state_hashes(transfer, hashes, last)
                states = [index for index, page in enumerate(before) if page in chosen]
                slots = slots.view(len(before), -1)[states].reshape(-1)
                pages = [before[index] for index in states]
            if pages:
                keys, policy = self.keys(pages), transfer.hit_policy
                parts.append(PoolTransfer(transfer.name, slots, keys=keys, hit_policy=policy))
        if self._auxiliary_pools:
            parts = _resolve_shared_pool_transfers(parts, self._auxiliary_pools)
        return self._by_object(parts) if self._is_split else parts

    def _by_object(self, transfers: Sequence[PoolTransfer]) -> list[PoolTransfer]:
        """`transfers`, and the transfers of further objects of the same pages."""
        found: list[PoolTransfer] = []
        for transfer in transfers:
            found.append(transfer)
            if (shards := self.shards.get(transfer.name)) is not None:
                found += [replace(transfer, name=one.pool) for one in shards.objects[1:]]
        return found

    def to_write(self, objects: list[PoolTransfer]) -> list[PoolTransfer]:
        """The part of `objects` that this rank writes. Exactly one of the ranks that hold the same
        bytes writes a key."""
        if not self._object_names:
            return objects
        own = []
        for one in objects:
            keys, slots = one.keys or [], one.host_indices
            assert slots is not None, f"pool transfer {one.name} has no host slots"
            if one.name in self._object_names:
                shards, name = self._object_names[one.name]
                chosen = [index for index, key in enumerate(keys) if shards.writes(f"{key}/{name}")]
                keys = [keys[index] for index in chosen]
                slots = slots.view(len(one.keys or ()), -1)[chosen].reshape(-1)
            if keys:
                own.append(replace(one, keys=keys, host_indices=slots))
        return own


def _state_hashes(
    transfer: PoolTransfer, hashes: Sequence[PageHash], last: int | None
) -> Sequence[str]:
    """Hashes of the pages that the states of a `TRAILING_PAGES` pool follow; see `objects`."""
    if transfer.keys is not None:
        return transfer.keys
    return [hashes[(len(hashes) if last is None else last) - 1]]


def num_keys(transfers: Sequence[PoolTransfer]) -> int:
    """Keys of all `transfers`."""
    return sum(len(one.keys or ()) for one in transfers)


def combined_outcomes(
    keys: Sequence[str],
    transfers: Sequence[PoolTransfer],
    outcomes: Sequence[Sequence[CacheOutcome]],
) -> list[CacheOutcome]:
    """Outcome of each page of the primary pool: LANDED if all its parts have landed, otherwise the
    outcome of the first part that has not.

    Args:
        transfers: Transfers that the store was asked for, the primary pool's first. Other parts
            count as landed.
        outcomes: For each transfer, one for each key.
    """
    pages = dict.fromkeys(keys, CacheOutcome.LANDED)
    for transfer, results in zip(transfers, outcomes, strict=True):
        for key, outcome in zip(transfer.keys or (), results, strict=True):
            if pages[key]:
                pages[key] = outcome
    return [pages[key] for key in keys]


def usable_pages(
    landed: int, transfers: Sequence[PoolTransfer], hashes: Sequence[PageHash], last: int
) -> int:
    """Pages of the longest usable prefix among the first `landed`, which have all their parts.

    A prefix ends where it has a state, if there is a pool of `TRAILING_PAGES`. For the arguments
    see `StoredPools.objects`.
    """
    common = set[str](hashes[:landed])
    trailing = [t for t in transfers if t.hit_policy is PoolHitPolicy.TRAILING_PAGES]
    if not trailing:
        return landed
    for transfer in trailing:
        common &= set(_state_hashes(transfer, hashes, last))
    return max((index + 1 for index in range(landed) if hashes[index] in common), default=0)
