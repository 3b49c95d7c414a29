"""The parts of pages: what each pool of a model moves for a run of pages, and what became of it.

Pure, any thread. The keys of parts are page hashes; those of objects begin with the namespace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.device.state_spec import PoolHitPolicy, PoolName
from sglang.srt.mem_cache.storage.pool_shards import PoolShards
from sglang.srt.mem_cache.storage.types import CacheOutcome
from sglang.srt.mem_cache.tree.radix_key import PageHash


def _as_given(transfers: list[PoolTransfer]) -> list[PoolTransfer]:
    return transfers


@dataclass(frozen=True, slots=True)
class StoredPools:
    """How the pages of a model's pools map to objects in L3."""

    namespace: str = ""
    """First part of every key."""
    queries: Sequence[PoolTransfer] = ()
    """The pools beside the anchor, and what a prefix needs of each."""
    resolve: Callable[[list[PoolTransfer]], list[PoolTransfer]] = _as_given
    """Adds the transfers of pools that share others' slots. Any thread."""
    shards: Mapping[str, PoolShards] = field(default_factory=dict)
    """How pages of a pool are divided into objects, by pool. A page of a pool that is not here is
    one object, and this rank writes all."""

    def questions(self) -> list[PoolTransfer]:
        """What a backend is asked about beside the anchor: one transfer for each further object."""
        return self._objects_of([PoolTransfer(PoolName.KV), *self.queries])[1:]

    def keys(self, hashes: Sequence[str]) -> list[str]:
        """The keys of pages, without pool and shard."""
        return [f"{self.namespace}/{page}" for page in hashes]

    def objects(self, parts: Sequence[PoolTransfer]) -> list[PoolTransfer]:
        """One transfer for each object of the pages of `parts`, with the keys of the store; each
        pool's first object has its name. The anchor's first."""
        keyed = [
            PoolTransfer(
                part.name,
                part.host_indices,
                keys=self.keys(part.keys or ()),
                hit_policy=part.hit_policy,
            )
            for part in parts
        ]
        return self._objects_of(self.resolve(keyed))

    def share_to_write(self, parts: Sequence[PoolTransfer]) -> float:
        """How much of `parts` this rank writes, from 0 to 1; the rest is for other ranks.

        Args:
            parts: As `parts_of_pages` gives them.
        """
        if all(shards.num_writers == 1 for shards in self.shards.values()):
            return 1.0
        transfers = self.objects(parts)
        own = [self.to_write(one) for one in transfers]
        asked, total = (sum(len(one.keys or ()) for one in some) for some in (own, transfers))
        return asked / max(1, total)

    def to_write(self, transfer: PoolTransfer) -> PoolTransfer:
        """The part of a transfer that this rank writes. Of the ranks that hold the same bytes
        exactly one writes a key."""
        keys, slots = transfer.keys or [], transfer.host_indices
        shards, name = self._find(transfer.name)
        if shards is None or shards.num_writers == 1 or not keys:
            return transfer
        own = [index for index, key in enumerate(keys) if shards.writes(f"{key}/{name}")]
        assert slots is not None, f"pool transfer {transfer.name} has no host slots"
        return replace(
            transfer,
            keys=[keys[index] for index in own],
            host_indices=slots.view(len(keys), -1)[own].reshape(-1),
        )

    def _find(self, pool: str) -> tuple[PoolShards | None, str]:
        """The shards and the object name of a pool as the backend knows it."""
        for shards in self.shards.values():
            for one in shards.objects:
                if one.pool == pool:
                    return shards, one.name
        return None, pool

    def _objects_of(self, transfers: Sequence[PoolTransfer]) -> list[PoolTransfer]:
        found: list[PoolTransfer] = []
        for transfer in transfers:
            found.append(transfer)
            shards = self.shards.get(transfer.name)
            if shards is not None:
                found += [replace(transfer, name=one.pool) for one in shards.objects[1:]]
        return found


def parts_of_pages(
    transfers: Sequence[PoolTransfer],
    hashes: Sequence[PageHash],
    begin: int,
    end: int,
    *,
    last: int | None = None,
) -> list[PoolTransfer]:
    """The parts of `transfers` for the pages from `begin` to `end`; keys are their hashes.

    A pool of `ALL_PAGES` has a page for each of `hashes`. A pool of `TRAILING_PAGES` has states
    after the pages that its `keys` name; without keys it has one, after page `last`.

    Args:
        transfers: Transfers of an operation on all of `hashes`, with host slots.
        hashes: One for each page.
        begin: First page.
        end: Page after the last.
        last: Pages that are going to be moved; by default all.
    """
    chosen = list(hashes[begin:end])
    parts = []
    for transfer in transfers:
        slots = transfer.host_indices
        assert slots is not None, f"pool transfer {transfer.name} has no host slots"
        if transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
            page = len(slots) // len(hashes)
            keys: list[str] = [*chosen]
            slots = slots[begin * page : end * page]
        else:
            behind = state_keys(transfer, hashes, last)
            states = [index for index, key in enumerate(behind) if key in chosen]
            keys = [behind[index] for index in states]
            slots = slots.view(len(behind), -1)[states].reshape(-1)
        if keys:
            parts.append(
                PoolTransfer(transfer.name, slots, keys=keys, hit_policy=transfer.hit_policy)
            )
    return parts


def state_keys(
    transfer: PoolTransfer, hashes: Sequence[PageHash], last: int | None = None
) -> list[str]:
    """Hashes of the pages that the states of a `TRAILING_PAGES` pool follow; see
    `parts_of_pages`."""
    if transfer.keys is not None:
        return transfer.keys
    return [hashes[(len(hashes) if last is None else last) - 1]]


def combined_outcomes(
    keys: Sequence[str],
    transfers: Sequence[PoolTransfer],
    outcomes: Sequence[Sequence[CacheOutcome]],
) -> list[CacheOutcome]:
    """Outcome of each page of the anchor: LANDED if all its parts have landed, otherwise the
    outcome of the first part that has not.

    Args:
        keys: Keys of the pages.
        transfers: What the store was asked for, the anchor's first. Parts that it was not asked for
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

    With a pool of `TRAILING_PAGES` a prefix ends where it has a state.

    Args:
        landed: Pages that have landed, from the first on.
        transfers: As `parts_of_pages`.
        hashes: As `parts_of_pages`.
        last: As `parts_of_pages`.
    """
    usable = landed
    trailing = [t for t in transfers if t.hit_policy is PoolHitPolicy.TRAILING_PAGES]
    if trailing:
        common = set[str](hashes[:landed])
        for transfer in trailing:
            common &= set(state_keys(transfer, hashes, last))
        usable = max((index + 1 for index in range(landed) if hashes[index] in common), default=0)
    return usable
