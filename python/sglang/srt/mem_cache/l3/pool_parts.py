"""The parts of pages: what each pool of a model moves for a run of pages, and what became of it.

Pure, any thread. Keys are page hashes here; `GuardedStore` puts the namespace before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.device.state_spec import PoolHitPolicy
from sglang.srt.mem_cache.storage.types import CacheOutcome
from sglang.srt.mem_cache.tree.radix_key import PageHash


def _as_given(transfers: list[PoolTransfer]) -> list[PoolTransfer]:
    return transfers


@dataclass(frozen=True, slots=True)
class StoredPools:
    """Which pools of a model beside the anchor are in L3."""

    queries: Sequence[PoolTransfer] = ()
    """Their names, and what a prefix needs of each."""
    resolve: Callable[[list[PoolTransfer]], list[PoolTransfer]] = _as_given
    """Adds the transfers of pools that share others' slots. Any thread."""


def parts_of_pages(
    transfers: Sequence[PoolTransfer],
    hashes: Sequence[PageHash],
    begin: int,
    end: int,
    *,
    last: int | None = None,
) -> list[PoolTransfer]:
    """What `transfers` has for the pages from `begin` to `end`; keys are their hashes.

    A pool of `ALL_PAGES` has a page for each of `hashes`. A pool of `TRAILING_PAGES` has states
    behind the pages that its `keys` name; without keys it has one, behind page `last`.

    Args:
        transfers: Of an operation on all of `hashes`, with host slots.
        hashes: One a page.
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
    """Behind which pages the states of a `TRAILING_PAGES` pool stand; see `parts_of_pages`."""
    if transfer.keys is not None:
        return transfer.keys
    return [hashes[(len(hashes) if last is None else last) - 1]]


def combined_outcomes(
    transfers: Sequence[PoolTransfer], outcomes: Sequence[Sequence[CacheOutcome]]
) -> list[CacheOutcome]:
    """What became of each page of the anchor: LANDED where all its parts have, otherwise what
    befell the first that has not.

    Args:
        transfers: The anchor's first.
        outcomes: For each transfer one a key.
    """
    pages = list(outcomes[0])
    if len(transfers) == 1:
        return pages
    place = {key: index for index, key in enumerate(transfers[0].keys or ())}
    for transfer, results in zip(transfers[1:], outcomes[1:], strict=True):
        for key, outcome in zip(transfer.keys or (), results, strict=True):
            index = place[key]
            pages[index] = outcome if pages[index] else pages[index]
    return pages


def usable_pages(
    landed: int, transfers: Sequence[PoolTransfer], hashes: Sequence[PageHash], last: int
) -> int:
    """Pages of the longest prefix that can be used, of the first `landed` with all their parts.

    With a pool of `TRAILING_PAGES` a prefix ends where it has a state.

    Args:
        landed: Pages.
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
