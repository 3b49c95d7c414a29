"""Combines the hits of several pools into one usable prefix. Pure, any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.device.state_spec import PoolHitPolicy
from sglang.srt.mem_cache.storage.types import PoolTransferResult


def leading_run(present: Sequence[bool]) -> int:
    """The number of leading true values in `present`."""
    for index, one in enumerate(present):
        if not one:
            return index
    return len(present)


def combine_hits(
    keys: Sequence[str],
    pool_transfers: Sequence[PoolTransfer] | None,
    exists: Callable[[str, Sequence[str]], Sequence[bool]],
    primary: str,
) -> PoolTransferResult:
    """Find the longest prefix that the primary pool and every extra pool can serve.

    Args:
        keys: Keys of consecutive pages, one for each page.
        pool_transfers: Extra pools. A transfer with its own keys has objects only for those.
        exists: Queries the store: `(pool, keys) -> one bool for each key`. Called once per pool.
        primary: Name of the pool whose pages form the prefix.
    """
    primary_pages = leading_run(exists(primary, keys))
    result = PoolTransferResult(kv_hit_pages=primary_pages)
    boundaries = set(range(primary_pages + 1))
    for transfer in pool_transfers or ():
        own = _boundaries(keys[:primary_pages], transfer, exists)
        result.update_extra_pool_hit_pages({transfer.name: max(own)})
        boundaries &= own
    result.update_kv_hit_pages(max(boundaries))
    return result


def _boundaries(
    keys: Sequence[str],
    transfer: PoolTransfer,
    exists: Callable[[str, Sequence[str]], Sequence[bool]],
) -> set[int]:
    """Prefix lengths in pages, including 0, at which this pool alone would allow a hit."""
    own = set(keys if transfer.keys is None else transfer.keys)
    asked = [(index + 1, key) for index, key in enumerate(keys) if key in own]
    if not asked:
        return {0}
    present = exists(transfer.name, [key for _, key in asked])
    if transfer.hit_policy is PoolHitPolicy.TRAILING_PAGES:
        return {0} | {length for (length, _), there in zip(asked, present, strict=True) if there}
    have = {key for (_, key), there in zip(asked, present, strict=True) if there}
    return set(range(leading_run([key in have for key in keys]) + 1))
