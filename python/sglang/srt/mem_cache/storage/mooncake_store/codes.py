"""The meaning of Mooncake's return codes for one page, as observed with 0.3.13.post1."""

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
    """Whether the store failed, not just this page: no master, or no bytes moved."""
    return code in (_TRANSFER_FAILED, _NO_MASTER)


def is_transfer_failure(code: int) -> bool:
    """Whether no bytes moved: a broken client, a dead node or a truncated object."""
    return code == _TRANSFER_FAILED


def is_about_object(code: int) -> bool:
    """Whether the code answers a query about an object, rather than reporting a failed query."""
    return code >= 0 or code in (_NOT_READY, _NOT_FOUND, _UNDER_LEASE)


def is_full(code: int) -> bool:
    """Whether a put found no room. Evictions may make room later."""
    return code == _NO_ROOM


def get_outcome(code: int, size: int) -> CacheOutcome:
    """Outcome of a get of `size` bytes. After LANDED, the trailer must still be checked.

    An object of another size is damaged.
    """
    if code == size:
        return CacheOutcome.LANDED
    if code >= 0 or code == _BUFFER_TOO_SMALL:
        return CacheOutcome.DAMAGED
    if code in (_NOT_READY, _NOT_FOUND, _LEASE_EXPIRED):
        return CacheOutcome.MISS
    return CacheOutcome.FAILED


def set_outcome(code: int) -> CacheOutcome:
    """Outcome of a put. A key that already exists counts as written."""
    return CacheOutcome.LANDED if code in (0, _EXISTS) else CacheOutcome.FAILED
