"""A listener to the events of a cache, and what it should know."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rigs.caches.cache_rig import CacheRig
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.srt.mem_cache.utils import hash_str_to_int64
from sglang.srt.messages.cache_key import combine_extra_key


class Listener:
    """Blocks that a tier of a cache has, as its events tell."""

    def __init__(self, medium: str = "GPU") -> None:
        self.medium = medium
        self.tokens: dict[int, tuple[int, ...]] = {}
        """Tokens of blocks, by hash."""
        self.parents: dict[int, int | None] = {}
        self.keys: dict[int, str | None] = {}
        """Keys of blocks, as `combine_extra_key` makes them."""

    def hear(self, events: list[KVCacheEvent]) -> None:
        """Take events. Raises AssertionError or KeyError where they contradict earlier ones."""
        for event in events:
            if isinstance(event, BlockStored | BlockRemoved) and event.medium != self.medium:
                continue
            if isinstance(event, BlockStored):
                parent, size = event.parent_block_hash, event.block_size
                assert event.lora_id is None
                if self.medium == "GPU":  # Copies to other tiers may end in any order.
                    assert parent is None or parent in self.tokens, "parents come first"
                for index, block in enumerate(event.block_hashes):
                    assert block not in self.tokens, "stored twice"
                    self.tokens[block] = tuple(event.token_ids[index * size : (index + 1) * size])
                    self.parents[block] = parent
                    self.keys[block] = combine_extra_key(event.lora_name, event.cache_salt)
                    parent = block
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    del self.tokens[block], self.parents[block], self.keys[block]
            else:
                assert isinstance(event, AllBlocksCleared)
                self.tokens.clear()
                self.parents.clear()
                self.keys.clear()


class TierListeners:
    """A listener for each tier of a rig, whose L3 is of the backend `file`, if it has one."""

    def __init__(self, rig: CacheRig) -> None:
        self._rig = rig
        self.device, self.host, self.store = map(Listener, ("GPU", "CPU_PINNED", "DISK"))

    def hear(self) -> None:
        """Take the events since the last call, and assert that they tell what L1 and L2 have."""
        events = self._rig.tree.take_events()
        for listener in (self.device, self.host, self.store):
            listener.hear(events)
        nodes = list(self._rig.tree.nodes())
        assert self.device.keys == self._keys(one for one in nodes if not one.evicted)
        assert self.host.keys == self._keys(one for one in nodes if one.backuped)

    def _keys(self, nodes: Iterable[TreeNode]) -> dict[int, str | None]:
        """The blocks of those `nodes` of which events tell, with their keys."""
        size, keyed = self._rig.page_size, self._rig.announce_keyed
        return {
            hash_str_to_int64(page): node.key.extra_key
            for node in nodes
            if keyed or node.key.extra_key is None
            for page in node.page_hashes(size)
        }


def block_of(file: Path) -> int:
    """The block to which an object of the backend `file` belongs."""
    return hash_str_to_int64(file.name)


def blocks_on_disk(folder: str | Path) -> set[int]:
    """Blocks whose pages the backend `file` has in `folder`, without regard to states."""
    return {block_of(file) for file in Path(folder).glob("*/??/*%2Fkv")}
