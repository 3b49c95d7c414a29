"""The 32 bytes that end every L3 object, and tell a flipped, torn or swapped one from a good one.

Bytes 0 to 15: xxh3-128 of the page's bytes, buffers in order (K, then V), or `NO_CHECKSUM`. Bytes
16 to 31: the first 16 bytes of sha256 of the full object key.

With `verify_checksum` off an engine neither writes nor reads checksums; it still writes and checks
the key, which costs nothing to speak of. Such a reader takes everybody's objects. One that verifies
takes an object without a checksum for a damaged one, since it could be: it is removed, computed
again and written with its checksum, after which both kinds of engine use it.

Any thread; hashing releases the GIL for all but tiny pages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final, TypeAlias

import xxhash

TRAILER_BYTES: Final = 32
NO_CHECKSUM: Final = b"no page checksum"
"""Stands where the checksum would be. A page that hashes to it is as likely as any forged hash."""
_HALF: Final = 16

Buffer: TypeAlias = bytes | bytearray | memoryview


def key_digest(object_key: str) -> bytes:
    """16 bytes that stand for the full key, so that one key's object never passes for another's."""
    return hashlib.sha256(object_key.encode("utf-8", "surrogatepass")).digest()[:_HALF]


def page_digest(buffers: Iterable[Buffer]) -> bytes:
    """xxh3-128 of the concatenation of `buffers`, which are contiguous. 16 bytes."""
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


def seal(buffers: Iterable[Buffer], object_key: str, *, with_checksum: bool = True) -> bytes:
    """The trailer of an object; without a checksum `buffers` are not read."""
    return (page_digest(buffers) if with_checksum else NO_CHECKSUM) + key_digest(object_key)


def is_intact(
    trailer: Buffer, buffers: Iterable[Buffer], object_key: str, *, verify_checksum: bool
) -> bool:
    """Whether `trailer` belongs to these bytes under this key."""
    if len(trailer) != TRAILER_BYTES or bytes(trailer[_HALF:]) != key_digest(object_key):
        return False
    return not verify_checksum or bytes(trailer[:_HALF]) == page_digest(buffers)
