"""What Mooncake's return codes mean for one page. Measured with 0.3.13.post1."""

from __future__ import annotations

from typing import Final

from sglang.srt.mem_cache.storage.types import CacheOutcome

_NO_ROOM: Final = -200
_BUFFER_TOO_SMALL: Final = -600
_NOT_READY: Final = -703
_NOT_FOUND: Final = -704
_EXISTS: Final = -705
_UNDER_LEASE: Final = -706
_LEASE_EXPIRED: Final = -707
_TRANSFER_FAILED: Final = -800
_NO_MASTER: Final = -900


def is_store_failure(code: int) -> bool:
    """Whether the store, rather than this page, failed: no master, or nothing was moved."""
    return code in (_TRANSFER_FAILED, _NO_MASTER)


def is_transfer_failure(code: int) -> bool:
    """Whether bytes did not move: a broken client, a dead node, or a truncated object."""
    return code == _TRANSFER_FAILED


def is_about_object(code: int) -> bool:
    """Whether a question about one object was answered, rather than that nobody can tell."""
    return code >= 0 or code in (_NOT_READY, _NOT_FOUND, _UNDER_LEASE)


def is_full(code: int) -> bool:
    """Whether a put found no room; eviction may make some."""
    return code == _NO_ROOM


def get_outcome(code: int, size: int) -> CacheOutcome:
    """Outcome of a get of `size` bytes; LANDED still has to pass its trailer.

    An object of another size than asked for is damaged, whichever way.
    """
    if code == size:
        return CacheOutcome.LANDED
    if code >= 0 or code == _BUFFER_TOO_SMALL:
        return CacheOutcome.DAMAGED
    if code in (_NOT_READY, _NOT_FOUND, _LEASE_EXPIRED):
        return CacheOutcome.MISS
    return CacheOutcome.FAILED


def set_outcome(code: int) -> CacheOutcome:
    """Outcome of a put. A key that exists already counts as written."""
    return CacheOutcome.LANDED if code in (0, _EXISTS) else CacheOutcome.FAILED
