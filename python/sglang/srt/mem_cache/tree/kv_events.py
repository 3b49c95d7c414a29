"""Events of KV blocks that a prefix cache has got or lost, for routers that choose servers by them.

Encoded by msgspec, an event is a map with its `type`, and a batch a list. Plain data, any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec


class StorageMedium(StrEnum):
    """Tier of a block."""

    GPU = "GPU"
    """Device memory of any kind (L1)."""
    CPU = "CPU_PINNED"
    """Host memory (L2)."""
    DISK = "DISK"
    EXTERNAL = "EXTERNAL"


class KVCacheEvent(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Something that happened to the blocks of a cache."""


class BlockStored(KVCacheEvent, frozen=True, kw_only=True):
    """Blocks that follow each other came to a medium."""

    block_hashes: list[int]
    """int64 of each block's hash; see `hash_str_to_int64`."""
    parent_block_hash: int | None
    """Hash of the block before the first; None: a prompt begins here."""
    token_ids: list[int]
    """Tokens of all blocks."""
    block_size: int
    """Tokens of a block, a page."""
    lora_id: int | None
    """Always None."""
    medium: str | None = None


class BlockRemoved(KVCacheEvent, frozen=True, kw_only=True):
    """Blocks left a medium."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(KVCacheEvent, frozen=True):
    """The cache is empty on every medium."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """Events of one publication."""

    ts: float
    """Seconds since the epoch."""
    events: Sequence[KVCacheEvent]
    attn_dp_rank: int | None = None


class KVEventBatch(EventBatch, frozen=True):
    """A batch of the events above, as it is decoded."""

    events: Sequence[BlockStored | BlockRemoved | AllBlocksCleared]
