"""The trailer of every L3 object: 32 bytes that reveal a flipped, torn or swapped object.

Bytes 0 to 15: xxh3-128 of the page's bytes, buffers in order (K, then V), or `NO_CHECKSUM`. Bytes
16 to 31: the first 16 bytes of sha256 of the full object key.

With `verify_checksum` off, an engine neither writes nor reads checksums. It still writes and checks
the key, at almost no cost, and it accepts the objects of all engines. An engine that verifies
treats an object without a checksum as damaged, since it could be: it removes the object, computes
the page again and writes it with a checksum. Engines of both kinds then use that object.

Any thread; hashing releases the GIL for all but tiny pages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final, TypeAlias

import xxhash

TRAILER_BYTES: Final = 32
NO_CHECKSUM: Final = b"no page checksum"
"""Replaces the checksum. A page with this hash is as unlikely as with any other given hash."""
_HALF: Final = 16

Buffer: TypeAlias = bytes | bytearray | memoryview


def key_digest(object_key: str) -> bytes:
    """16 bytes that identify the full key, so that the object of another key is detected."""
    return hashlib.sha256(object_key.encode("utf-8", "surrogatepass")).digest()[:_HALF]


def page_digest(buffers: Iterable[Buffer]) -> bytes:
    """xxh3-128 of the concatenated `buffers`, each of them contiguous. 16 bytes."""
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


def seal(buffers: Iterable[Buffer], object_key: str, *, with_checksum: bool = True) -> bytes:
    """The trailer of an object. Without a checksum, `buffers` are not read."""
    return (page_digest(buffers) if with_checksum else NO_CHECKSUM) + key_digest(object_key)


def is_intact(
    trailer: Buffer, buffers: Iterable[Buffer], object_key: str, *, verify_checksum: bool
) -> bool:
    """Whether `trailer` belongs to these bytes under this key."""
    if len(trailer) != TRAILER_BYTES or bytes(trailer[_HALF:]) != key_digest(object_key):
        return False
    return not verify_checksum or bytes(trailer[:_HALF]) == page_digest(buffers)
