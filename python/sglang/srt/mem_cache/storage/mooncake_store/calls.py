"""Calls on one Mooncake client: moving a batch, asking what a code left open, trying it out.

Without a master each call takes seconds to fail: the first that does decides for the others.
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
    """Get or put a batch; a code a page.

    Raises StorageUnavailable where transfers were left under way, or an answer is no answer.
    """
    # A hung node takes a minute a key to open a session with: ask it for one key first.
    first = int(is_get and not client.has_read)
    codes = _move_pages(client, batch, 0, first, is_get=is_get) if first else []
    if any(is_store_failure(code) for code in codes):
        codes *= len(batch.keys)
    elif first < len(batch.keys):
        codes += _move_pages(client, batch, first, len(batch.keys), is_get=is_get)
        client.has_read = client.has_read or is_get
    if len(codes) != len(batch.keys):
        raise StorageUnavailable(f"Mooncake answered {len(codes)} codes to {len(batch.keys)}")
    return _tell_truncated(client, batch, codes) if is_get else codes


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


def _tell_truncated(client: MooncakeClient, batch: PageBatch, codes: list[int]) -> list[int]:
    """Give failed transfers their object's size as a code, where that is not the one asked for.

    Mooncake answers a get into more bytes than the object has with the code of a broken
    transfer. (A plain get answers with the size, but takes one buffer an object.)
    """
    told = list(codes)
    for index, code in enumerate(codes):
        if not is_transfer_failure(code):
            continue
        with client.using() as store:
            size: int = store.get_size(batch.keys[index])
        if not is_about_object(size):
            break
        if size != sum(batch.sizes[index]):
            told[index] = size
    return told


def remove(client: MooncakeClient, keys: Sequence[str]) -> None:
    """Remove objects as far as the master answers. Raises StorageUnavailable for a lost client."""
    for key in keys:
        with client.using() as store:
            code: int = store.remove(key, True)
        if not is_about_object(code):
            return


def moves_bytes(client: MooncakeClient, key: str, *, full_is_fine: bool) -> bool:
    """Put and get a few bytes: a broken client still answers questions, but moves nothing.

    Args:
        key: Of no other object; it is removed again.
        full_is_fine: A store that has no room for it works.

    Raises:
        StorageUnavailable: The client was given up, before or because of this.
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
