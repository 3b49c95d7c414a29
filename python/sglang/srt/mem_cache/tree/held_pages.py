"""Tells the server process which pages a DP group's tree has, so that it can choose groups by
prefix."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.tree.kv_events import StorageMedium
from sglang.srt.mem_cache.tree.radix_key import hash_str_to_int64
from sglang.srt.messages.io_struct import HeldPagesReport

if TYPE_CHECKING:
    from sglang.srt.mem_cache.tree.tree_node import TreeNode


class HeldPages:
    """Notes pages that come to the tree and that leave it; a page that moves from one tier to the
    other does neither. Unlike `KVEventLog`, it also notes those of prompts with a key.

    The scheduler's thread only. The notes are no more than the pages of both tiers.
    """

    def __init__(self, page_size: int, dp_rank: int) -> None:
        self._page_size = page_size
        self._dp_rank = dp_rank
        self._is_cleared = False
        self._changed: dict[int, bool] = {}
        """Pages since the last report, and whether the tree has them now."""

    def stored(self, node: TreeNode, medium: StorageMedium, session_id: str | None = None) -> None:
        """Note that `node`, which is in the tree, is on `medium` now."""
        if not self._is_beside(node, medium):
            self._note(node, is_held=True)

    def removed(self, node: TreeNode, medium: StorageMedium) -> None:
        """Note that `node` is about to leave `medium`."""
        if not self._is_beside(node, medium):
            self._note(node, is_held=False)

    def deleted(self, node: TreeNode) -> None:
        """Note that `node` is about to leave the tree."""
        if node.value is not None or node.host_value is not None:
            self._note(node, is_held=False)

    def forgotten(self, nodes: Iterable[TreeNode]) -> None:
        """Note that the tree is about to forget every node."""
        self._is_cleared = True
        self._changed.clear()

    def take(self) -> HeldPagesReport | None:
        """The changes since the last call; None: there are none."""
        if not self._changed and not self._is_cleared:
            return None
        report = HeldPagesReport(
            dp_rank=self._dp_rank,
            is_cleared=self._is_cleared,
            stored=array("q", [one for one, held in self._changed.items() if held]).tobytes(),
            removed=array("q", [one for one, held in self._changed.items() if not held]).tobytes(),
        )
        self._is_cleared, self._changed = False, {}
        return report

    @staticmethod
    def _is_beside(node: TreeNode, medium: StorageMedium) -> bool:
        """True if `node` is also on the other tier."""
        other = node.host_value if medium is StorageMedium.GPU else node.value
        return other is not None

    def _note(self, node: TreeNode, *, is_held: bool) -> None:
        for page in node.page_hashes(self._page_size):
            self._changed[hash_str_to_int64(page)] = is_held
