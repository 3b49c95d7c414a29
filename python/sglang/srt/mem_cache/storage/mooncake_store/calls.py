"""Calls of one Mooncake client: moving a batch, resolving ambiguous codes, probing.

Without a master each call takes seconds to fail, so the first failure decides for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.mem_cache.storage.mooncake_store.client import MooncakeClient
from sglang.srt.mem_cache.storage.mooncake_store.codes import (
    is_about_object,
    is_full,
    is_store_failure,
    is_transfer_failure,
)
from sglang.srt.mem_cache.storage.mooncake_store.page_batches import PageBatch
from sglang.srt.mem_cache.storage.types import StorageUnavailable


def move(client: MooncakeClient, batch: PageBatch, *, is_get: bool) -> list[int]:
    """Get or put a batch. Returns a code for each page.

    Raises StorageUnavailable if transfers may still be under way or the answer is malformed.
    """
    # Opening a session with a hanging node takes a minute for each key: get one key first.
    first = int(is_get and not client.has_read)
    codes = _move_pages(client, batch, 0, first, is_get=is_get) if first else []
    if any(is_store_failure(code) for code in codes):
        codes *= len(batch.keys)
    elif first < len(batch.keys):
        codes += _move_pages(client, batch, first, len(batch.keys), is_get=is_get)
        client.has_read = client.has_read or is_get
    if len(codes) != len(batch.keys):
        raise StorageUnavailable(f"Mooncake answered {len(codes)} codes to {len(batch.keys)}")
    return _mark_truncated(client, batch, codes) if is_get else codes


def _move_pages(
    client: MooncakeClient, batch: PageBatch, begin: int, end: int, *, is_get: bool
) -> list[int]:
    """Mooncake's codes for the pages `[begin, end)` of a batch."""
    with client.transferring() as store:
        call = store.batch_get_into_multi_buffers if is_get else store.batch_put_from_multi_buffers
        codes: list[int] = call(
            batch.keys[begin:end], batch.ptrs[begin:end], batch.sizes[begin:end]
        )
        return codes


def _mark_truncated(client: MooncakeClient, batch: PageBatch, codes: list[int]) -> list[int]:
    """Replace the codes of failed transfers by the object's size if the size is wrong.

    For an object that is smaller than the buffers, Mooncake returns the code of a failed transfer.
    A plain get would return the size, but supports only one buffer for each object.
    """
    marked = list(codes)
    for index, code in enumerate(codes):
        if not is_transfer_failure(code):
            continue
        with client.using() as store:
            size: int = store.get_size(batch.keys[index])
        if not is_about_object(size):
            break
        if size != sum(batch.sizes[index]):
            marked[index] = size
    return marked


def remove(client: MooncakeClient, keys: Sequence[str]) -> None:
    """Remove objects while the master answers. Raises StorageUnavailable for a lost client."""
    for key in keys:
        with client.using() as store:
            code: int = store.remove(key, True)
        if not is_about_object(code):
            return


def moves_bytes(client: MooncakeClient, key: str, *, full_is_fine: bool) -> bool:
    """Whether a client can put and get a few bytes. A broken one answers, but moves nothing.

    Args:
        key: A key of no other object; the object is removed again.
        full_is_fine: Whether a store without room for the object counts as working.

    Raises:
        StorageUnavailable: The client was given up, before or because of this call.
    """
    payload = b"probe"
    with client.transferring(pages=False) as store:
        code: int = store.put(key, payload)
    if is_full(code):
        with client.using() as store:
            return full_is_fine and bool(store.health_check() == 0)
    if code:
        return False
    with client.transferring(pages=False) as store:
        got: bytes = store.get(key)
    remove(client, [key])
    return got == payload
