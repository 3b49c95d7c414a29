"""The first part of every L3 key: a digest of everything that determines a page's bytes."""

from __future__ import annotations

from typing import Final

import msgspec
import xxhash

FORMAT_VERSION: Final = 1
"""Increased when the bytes or the keys of objects change their meaning."""


class CacheNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """The properties that engines must have in common to share pages."""

    weights_identity: str
    """Digest of weights and configuration (model_loader/weights_identity.py)."""
    kv_dtype: str
    page_size: int
    page_byte_order: str
    """`HostKVCache.page_byte_order` of the primary pool: layouts with equal bytes share pages."""
    extra_pools: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Name, dtype and shape of each pool beside the KV pool; unset where there is none, so that it
    is no part of the digest."""
    format_version: int = FORMAT_VERSION

    def digest(self) -> str:
        """32 hex digits."""
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(self))
