"""Which heads of a pool one object of L3 holds, and which of several ranks writes it.

Ranks of a server hold different heads of the same pages, or the same heads. An object has the name
of its heads and not of a rank, so that ranks with equal bytes share it; one of them writes it.

Pure data and functions, any thread; the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.mem_cache.device.state_spec import RankShare

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
