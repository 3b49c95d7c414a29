"""Events of KV blocks that a prefix cache has got or lost, for routers that choose servers by them.

Encoded by msgspec, an event is a map with its `type`, and a batch a list. Events are plain data for
any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

from sglang.srt.mem_cache.tree.radix_key import PageHash, hash_str_to_int64

if TYPE_CHECKING:
    from sglang.srt.mem_cache.tree.tree_node import TreeNode

_MAX_EVENTS: Final = 100_000
"""With more events, it is clear that nobody takes them. The log then drops them and says that all
blocks are gone, which is safe."""


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


class KVEventLog:
    """Notes each node that comes to a tier or leaves it, in the order of the tree's changes.

    Threads: the scheduler's only.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._events: list[KVCacheEvent] = []

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def stored(self, node: TreeNode, medium: StorageMedium) -> None:
        """Note that `node`, which is in the tree, is on `medium` now."""
        hashes = node.page_hashes(self._page_size)
        parent = node.parent.get_last_hash_value() if node.parent is not None else None
        self._note(
            BlockStored(
                block_hashes=_numbers(hashes),
                parent_block_hash=None if parent is None else hash_str_to_int64(parent),
                token_ids=node.key.token_ids.tolist(),
                block_size=self._page_size,
                lora_id=None,
                medium=medium,
            )
        )

    def removed(self, node: TreeNode, medium: StorageMedium) -> None:
        """Note that `node` is about to leave `medium`."""
        hashes = _numbers(node.page_hashes(self._page_size))
        self._note(BlockRemoved(block_hashes=hashes, medium=medium))

    def cleared(self) -> None:
        """Note that the tree forgets every node."""
        self._events = [AllBlocksCleared()]

    def _note(self, event: KVCacheEvent) -> None:
        if len(self._events) >= _MAX_EVENTS:
            self.cleared()
        self._events.append(event)


def _numbers(hashes: Sequence[PageHash]) -> list[int]:
    return list(map(hash_str_to_int64, hashes))
