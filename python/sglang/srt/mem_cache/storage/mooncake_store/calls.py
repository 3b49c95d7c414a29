"""Calls of one Mooncake client, and the codes that Mooncake 0.3.13.post1 returns for an object.

Without a master each call takes seconds to fail, so the first failure decides for the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from sglang.srt.mem_cache.storage.mooncake_store.client import MooncakeClient
from sglang.srt.mem_cache.storage.mooncake_store.page_batches import PageBatch
from sglang.srt.mem_cache.storage.types import CacheOutcome, StorageUnavailable

NO_ROOM: Final = -200
"""A put found no room. Evictions may make room later."""
_BUFFER_TOO_SMALL: Final = -600
_NOT_READY: Final = -703
_NOT_FOUND: Final = -704
_EXISTS: Final = -705
_UNDER_LEASE: Final = -706
_LEASE_EXPIRED: Final = -707
_TRANSFER_FAILED: Final = -800
"""No bytes moved: a broken client, a dead node or a truncated object."""
_NO_MASTER: Final = -900
STORE_FAILURES: Final = (_TRANSFER_FAILED, _NO_MASTER)
"""The store failed, not just this object."""
_ABOUT_OBJECT: Final = (_NOT_READY, _NOT_FOUND, _UNDER_LEASE)
"""Negative codes that answer a query about an object; other ones report a failed query."""
_NOT_THERE: Final = (_NOT_READY, _NOT_FOUND, _LEASE_EXPIRED)


def get_outcome(code: int, size: int) -> CacheOutcome:
    """Outcome of a get of `size` bytes. After LANDED, the trailer must still be checked.

    An object of another size is damaged.
    """
    if code == size:
        return CacheOutcome.LANDED
    if code >= 0 or code == _BUFFER_TOO_SMALL:
        return CacheOutcome.DAMAGED
    return CacheOutcome.MISS if code in _NOT_THERE else CacheOutcome.FAILED


def set_outcome(code: int) -> CacheOutcome:
    """Outcome of a put. A key that already exists counts as written."""
    return CacheOutcome.LANDED if code in (0, _EXISTS) else CacheOutcome.FAILED


def move(client: MooncakeClient, batch: PageBatch, *, is_get: bool) -> list[int]:
    """Get or put a batch. Returns a code for each page.

    Raises StorageUnavailable if transfers may still be under way or the answer is malformed.
    """
    count = len(batch.keys)
    # Opening a session with a hanging node takes a minute for each key: get one key first.
    bounds = [0, 1, count] if is_get and not client.has_read and count > 1 else [0, count]
    codes: list[int] = []
    for begin, end in itertools.pairwise(bounds):
        pages = slice(begin, end)
        with client.transferring() as store:
            call = (
                store.batch_get_into_multi_buffers if is_get else store.batch_put_from_multi_buffers
            )
            codes += call(batch.keys[pages], batch.ptrs[pages], batch.sizes[pages])
        if end < count and any(code in STORE_FAILURES for code in codes):
            return _mark_truncated(client, batch, [codes[0]] * count)
    if len(codes) != count:
        raise StorageUnavailable(f"Mooncake answered {len(codes)} codes to {count}")
    if not is_get:
        return codes
    client.has_read = client.has_read or count > 1
    return _mark_truncated(client, batch, codes)


def _mark_truncated(client: MooncakeClient, batch: PageBatch, codes: list[int]) -> list[int]:
    """Replace the codes of failed transfers by the object's size if the size is wrong.

    For an object that is smaller than the buffers, Mooncake returns the code of a failed transfer.
    A plain get would return the size, but supports only one buffer for each object.
    """
    marked = list(codes)
    for index, code in enumerate(codes):
        if code != _TRANSFER_FAILED:
            continue
        with client.using() as store:
            size: int = store.get_size(batch.keys[index])
        if size < 0 and size not in _ABOUT_OBJECT:
            break
        if size != sum(batch.sizes[index]):
            marked[index] = size
    return marked


def remove(client: MooncakeClient, keys: Sequence[str]) -> None:
    """Remove objects while the master answers. Raises StorageUnavailable for a lost client."""
    for key in keys:
        with client.using() as store:
            code: int = store.remove(key, True)
        if code < 0 and code not in _ABOUT_OBJECT:
            return


def moves_bytes(client: MooncakeClient, key: str, *, full_is_fine: bool) -> bool:
    """True if a client can put and get a few bytes. A broken one answers, but moves nothing.

    Args:
        key: A key of no other object; the object is removed again.
        full_is_fine: True if a store without room for the object counts as working.

    Raises:
        StorageUnavailable: The client was given up, before or because of this call.
    """
    payload = b"probe"
    with client.transferring(pages=False) as store:
        code: int = store.put(key, payload)
    if code == NO_ROOM:
        with client.using() as store:
            return full_is_fine and bool(store.health_check() == 0)
    if code:
        return False
    with client.transferring(pages=False) as store:
        got: bytes = store.get(key)
    remove(client, [key])
    return got == payload
