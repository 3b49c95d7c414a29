"""Events of KV blocks that a prefix cache has got or lost, for routers that choose servers by them.

Encoded by msgspec, an event is a map with its `type`, and a batch a list. Events are plain data for
any thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

from sglang.srt.mem_cache.tree.radix_key import PageHash, hash_str_to_int64
from sglang.srt.messages.cache_key import KeyParts, split_extra_key

if TYPE_CHECKING:
    from sglang.srt.mem_cache.tree.tree_node import TreeNode

_MOST_NUMBERS: Final = 4_000_000
"""Most hashes and tokens in the events that wait, in about 160 MB. More of them show that nobody
takes them: the log then drops all, and says that all blocks are gone, which is safe."""
_MOST_STORED: Final = 1_000_000
"""Most blocks of L3 that are remembered, in about 100 MB. Beyond it, listeners are told that the
oldest are gone."""
_NO_KEY: Final = KeyParts()


class StorageMedium(StrEnum):
    """Tier of a block."""

    GPU = "GPU"
    """Device memory of any kind (L1)."""
    CPU = "CPU_PINNED"
    """Host memory (L2)."""
    DISK = "DISK"
    """L3 in the backend `file`."""
    EXTERNAL = "EXTERNAL"
    """L3 in another backend."""


class KVCacheEvent(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Something that happened to the blocks of a cache."""

    @property
    def num_numbers(self) -> int:
        """Hashes and tokens of the event, which take some 40 bytes each in memory. Ten characters
        of a text count as one more."""
        return 0


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
    cache_salt: str | None = None
    """Salt of the prompt."""
    session_id: str | None = None
    """Session of the request that brought the blocks to L1, or None if the request named none. Also
    None for other media."""
    lora_name: str | None = None
    """The prompt's `extra_key`: consumers keep blocks under different names apart."""

    @property
    def num_numbers(self) -> int:
        texts = (self.cache_salt, self.session_id, self.lora_name)
        num_chars = sum(len(text) for text in texts if text is not None)
        return len(self.block_hashes) + len(self.token_ids) + num_chars // 10


class BlockRemoved(KVCacheEvent, frozen=True, kw_only=True):
    """Blocks left a medium."""

    block_hashes: list[int]
    medium: str | None = None

    @property
    def num_numbers(self) -> int:
        return len(self.block_hashes)


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

    L3 keeps blocks that the tree has forgotten, so the log remembers which blocks of L3 listeners
    know.

    Blocks of prompts with an `extra_key` or a `cache_salt` are not told: consumers that do not know
    these would count them for prompts without. Nor is their removal.

    Threads: the scheduler's only.

    Args:
        announce_keyed: Tell them too, with their keys. Blocks remain untold whose key is not of
            `combine_extra_key`, or has an empty text, which consumers take for an absent one.

    Attributes:
        now: How often L3 was found to have the blocks of a node: a clock.
    """

    def __init__(self, page_size: int, *, announce_keyed: bool = False) -> None:
        self._page_size = page_size
        self._announce_keyed = announce_keyed
        self._events: list[KVCacheEvent] = []
        self._num_numbers = 0
        """`num_numbers` of all of them."""
        self.now = 0
        self._in_store: dict[int, int] = {}
        """Blocks that listeners believe to be in L3, the latest last, and when (`now`) L3 was last
        found to have them."""
        self._store = StorageMedium.EXTERNAL

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        events, self._events, self._num_numbers = self._events, [], 0
        return events

    # ---- L1 and L2 -------------------------------------------------------------------------

    def stored(self, node: TreeNode, medium: StorageMedium, session_id: str | None = None) -> None:
        """Note that `node`, which is in the tree, is on `medium` now; `session_id`: see
        `BlockStored`."""
        if (key := self._told_key(node)) is not None:
            blocks = self._blocks(node)
            self._note_stored(node, key, blocks, 0, len(blocks), medium, session_id)

    def removed(self, node: TreeNode, medium: StorageMedium) -> None:
        """Note that `node` is about to leave `medium`."""
        if self._told_key(node) is not None:
            self._note_removed(self._blocks(node), medium)

    def deleted(self, node: TreeNode) -> None:
        """Note that `node` is about to leave the tree, from the tiers that it is on."""
        if node.value is not None:
            self.removed(node, StorageMedium.GPU)
        if node.host_value is not None:
            self.removed(node, StorageMedium.CPU)

    def forgotten(self, nodes: Iterable[TreeNode]) -> None:
        """Note that the tree is about to forget every node; `nodes` are all of them."""
        if not self._in_store:
            self._events, self._num_numbers = [AllBlocksCleared()], 0
            return
        # `AllBlocksCleared` would be about L3 too.
        device: list[int] = []
        host: list[int] = []
        for node in nodes:
            if self._told_key(node) is None:
                continue
            blocks = self._blocks(node)
            device += blocks if node.value is not None else ()
            host += blocks if node.host_value is not None else ()
        self._note_removed(device, StorageMedium.GPU)
        self._note_removed(host, StorageMedium.CPU)

    # ---- L3 --------------------------------------------------------------------------------

    def in_store(self, node: TreeNode, medium: StorageMedium) -> None:
        """Note that L3, which is `medium`, was found to have the blocks of `node`."""
        self.now += 1
        if (key := self._told_key(node)) is None:
            return
        self._store = medium
        blocks = self._blocks(node)
        is_new = [self._in_store.pop(block, None) is None for block in blocks]
        self._in_store.update(dict.fromkeys(blocks, self.now))
        begin = 0
        for new, run in itertools.groupby(is_new):
            end = begin + len(list(run))
            if new:
                self._note_stored(node, key, blocks, begin, end, medium)
            begin = end
        too_many = len(self._in_store) - _MOST_STORED
        if too_many > 0:
            self._lose(list(itertools.islice(self._in_store, too_many)))

    def not_in_store(self, page: PageHash, asked_at: int) -> None:
        """Note that L3 was found not to have `page`, or to have it damaged.

        Args:
            asked_at: `now` when L3 was asked. A page that it got since then stays known.
        """
        block = hash_str_to_int64(page)
        if self._in_store.get(block, asked_at + 1) <= asked_at:
            self._lose([block])

    def store_is_gone(self) -> None:
        """Note that L3 was cleared or detached."""
        self._lose(list(self._in_store))

    # ----------------------------------------------------------------------------------------

    def _lose(self, blocks: list[int]) -> None:
        for block in blocks:
            del self._in_store[block]
        self._note_removed(blocks, self._store)

    def _told_key(self, node: TreeNode) -> KeyParts | None:
        """The key under which listeners are told of the blocks of `node`; None: they are not."""
        if node.key.extra_key is None:
            return _NO_KEY
        if not self._announce_keyed:
            return None
        key = split_extra_key(node.key.extra_key)
        return None if key is None or "" in key else key

    def _note_stored(
        self,
        node: TreeNode,
        key: KeyParts,
        blocks: list[int],
        begin: int,
        end: int,
        medium: StorageMedium,
        session_id: str | None = None,
    ) -> None:
        above = node.parent.get_last_hash_value() if node.parent is not None else None
        parent = None if above is None else hash_str_to_int64(above)
        page = self._page_size
        self._note(
            BlockStored(
                block_hashes=blocks[begin:end],
                parent_block_hash=blocks[begin - 1] if begin else parent,
                token_ids=node.key[begin * page : end * page].token_ids.tolist(),
                block_size=page,
                lora_id=None,
                medium=medium,
                cache_salt=key.cache_salt,
                session_id=session_id,
                lora_name=key.extra_key,
            )
        )

    def _note_removed(self, blocks: list[int], medium: StorageMedium) -> None:
        if blocks:
            self._note(BlockRemoved(block_hashes=blocks, medium=medium))

    def _note(self, event: KVCacheEvent) -> None:
        if self._num_numbers + event.num_numbers > _MOST_NUMBERS and self._events:
            self._in_store.clear()
            self._events, self._num_numbers = [AllBlocksCleared()], 0
        self._events.append(event)
        self._num_numbers += event.num_numbers

    def _blocks(self, node: TreeNode) -> list[int]:
        """Numbers of the blocks of `node`, which is in the tree."""
        return [hash_str_to_int64(page) for page in node.page_hashes(self._page_size)]
