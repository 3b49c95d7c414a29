"""Copies to L2 where it is a buffer: pages pass through it to L3, as many at once as have room.

A copy begins if its write to L3 can follow. Longer nodes are divided; what has no room yet waits in
L1, unlocked, and is lost if L1 evicts it first. Copies and writes hold at most half of the buffer:
readers need not wait for a store that takes nothing.

Threads: the scheduler's only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Final

from sglang.srt.mem_cache.l2.host_backup import HostBackup
from sglang.srt.mem_cache.tree.tree_node import TreeNode

if TYPE_CHECKING:
    from sglang.srt.mem_cache.l2.cache_controller import HiCacheController
    from sglang.srt.mem_cache.l3.storage_backup import StorageBackup
    from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree

_WRITE_SHARE: Final = 0.5
"""Share of the buffer's pages that copies and writes to L3 may hold."""


class BufferedBackup(HostBackup):
    """`HostBackup` of a buffer.

    Args:
        storage: Takes the pages on to L3.
    """

    POLICIES: ClassVar[tuple[str, ...]] = ("write_through", "write_through_selective")

    def __init__(
        self,
        tree: PrefixTree,
        controller: HiCacheController,
        *,
        write_policy: str,
        metrics: HiCacheMetrics,
        storage: StorageBackup,
    ) -> None:
        landed = storage.on_host_landed
        super().__init__(
            tree, controller, write_policy=write_policy, metrics=metrics, on_landed=landed
        )
        self._storage = storage
        storage.owed = self.owed.nodes  # Else the parts that L3 refuses would be copied forever.

    def is_saved(self, node: TreeNode) -> bool:
        return node.backuped or self._storage.has_stored(node)

    def back_up(self, path: list[TreeNode]) -> int:
        super().back_up(path)
        self.resume()
        return sum(len(node.key) for node in path if not self._is_on_its_way(node))

    def _write_path(self, path: list[TreeNode], is_due: Callable[[TreeNode], bool]) -> int:
        for nth, node in enumerate(path):
            if self._storage.has_stored(node):
                continue
            if not is_due(node):
                return nth
            if node.backuped:
                self._save_states(node)
            elif node.write_id is None:
                # Its copy begins with the next tick: now the caller has the path, and no split may
                # change it.
                self.owed.add(node)
        return len(path)

    def resume(self) -> None:
        self.owed.resume(self._first_due, self._begin_part, newest_first=False)

    def _first_due(self, node: TreeNode) -> TreeNode | None:
        first = super()._first_due(node)
        return first if first is not None and self._storage.may_take(first) else None

    def _begin_part(self, node: TreeNode) -> TreeNode | None:
        """See `OwedCopies.resume`."""
        room = len(node.key) if node.backuped else self._room()
        if not room or not self._has_room_for_states(node):
            return None
        part = node if len(node.key) <= room else self._tree.split(node, room)
        return part if self.write(part) else None

    def _room(self) -> int:
        """Tokens, whole pages, that copies may take now."""
        pool, page = self._tree.host.pool, self._tree.page_size
        held = sum(len(copy.host_indices) for copy in self.writing.values())
        share = max(page, int(_WRITE_SHARE * pool.size))
        left = share - held - self._storage.pending_tokens
        return max(0, min(left, pool.available_size())) // page * page

    def _has_room_for_states(self, node: TreeNode) -> bool:
        return all(
            not kind.of(node).is_on_device_only or kind.host.pool.available_size()
            for kind in self._tree.components
        )
