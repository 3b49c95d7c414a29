"""A mirror of a cache's tiers, which knows of them by KV events alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rigs.caches.event_listener import Listener, blocks_on_disk
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.tree.kv_events import KVCacheEvent
from sglang.srt.mem_cache.tree.radix_key import hash_str_to_int64
from sglang.srt.mem_cache.tree.tree_node import TreeNode


class Mirror:
    """Hears all events of a scheduler. Blocks of prompts with an extra key may be kept from it."""

    def __init__(self) -> None:
        self.device, self.host, self.store = map(Listener, ("GPU", "CPU_PINNED", "DISK"))
        self._listeners: Final = (self.device, self.host, self.store)

    def hear(self, events: Sequence[KVCacheEvent]) -> None:
        """`publish_events` of the scheduler."""
        for listener in self._listeners:
            listener.hear(list(events))

    def compare(self, tree: RadixCache) -> None:
        """Assert that L1 and L2 have the blocks that the mirror has, with the same tokens."""
        nodes = list(tree.nodes())
        for name, listener, shown in (
            ("L1", self.device, [node for node in nodes if node.value is not None]),
            ("L2", self.host, [node for node in nodes if node.host_value is not None]),
        ):
            blocks = {block for node in shown for block in _blocks_of(node, tree.page_size)}
            plain = {
                block: tokens
                for node in shown
                if node.key.extra_key is None
                for block, tokens in _blocks_of(node, tree.page_size).items()
            }
            heard = listener.tokens
            assert heard.keys() <= blocks, f"{name}: the mirror has blocks that are gone"
            known = {block: heard.get(block) for block in plain}
            assert known == plain, f"{name}: the mirror lacks blocks, or has others"

    def compare_store(self, folder: Path) -> None:
        """Assert that L3, the backend `file`, which loses nothing, has what the mirror knows."""
        assert self.store.tokens.keys() <= blocks_on_disk(folder), "L3 lacks blocks"


def _blocks_of(node: TreeNode, page_size: int) -> dict[int, tuple[int, ...]]:
    """The blocks of a node, with their tokens."""
    tokens = node.key.token_ids.tolist()
    pages = node.page_hashes(page_size)
    return {
        hash_str_to_int64(page): tuple(tokens[at * page_size : (at + 1) * page_size])
        for at, page in enumerate(pages)
    }
