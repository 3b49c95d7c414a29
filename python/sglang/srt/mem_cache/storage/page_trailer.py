"""The trailer of every L3 object: 32 bytes that reveal a flipped, torn or swapped object.

Bytes 0 to 15: xxh3-128 of the page's bytes, buffers in order (K, then V), or `NO_CHECKSUM`. Bytes
16 to 31: the first 16 bytes of sha256 of the full object key.

An engine with `verify_checksum` off neither writes nor reads checksums. It still writes and checks
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

from sglang.srt.mem_cache.host.page_checksums import NO_CHECKSUM

TRAILER_BYTES: Final = 32
_HALF: Final = 16

Buffer: TypeAlias = bytes | bytearray | memoryview


def seal(
    buffers: Iterable[Buffer],
    object_key: str,
    *,
    with_checksum: bool = True,
    checksum: bytes | None = None,
) -> bytes:
    """The trailer of an object whose bytes are the concatenated `buffers`, each contiguous.

    `buffers` are read only if the trailer gets a checksum that is not known.

    Args:
        checksum: The 16 bytes that the checksum ought to be, if they are known. If the buffers have
            other bytes by now, readers find the object damaged.
    """
    if not with_checksum:
        checksum = NO_CHECKSUM
    elif checksum is None:
        digest = xxhash.xxh3_128()
        for buffer in buffers:
            digest.update(buffer)
        checksum = digest.digest()
    # The full key, so that the object of another key is detected.
    return checksum + hashlib.sha256(object_key.encode("utf-8", "surrogatepass")).digest()[:_HALF]


def is_intact(
    trailer: Buffer, buffers: Iterable[Buffer], object_key: str, *, verify_checksum: bool
) -> bool:
    """True if `trailer` belongs to these bytes under this key."""
    expected = seal(buffers, object_key, with_checksum=verify_checksum)
    begin = 0 if verify_checksum else _HALF
    return len(trailer) == TRAILER_BYTES and bytes(trailer[begin:]) == expected[begin:]


def checksum_of(trailer: Buffer, *, verify_checksum: bool) -> bytes | None:
    """The checksum of an intact object; None: it was not verified."""
    return bytes(trailer[:_HALF]) if verify_checksum else None
