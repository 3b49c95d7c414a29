"""Self checks: every page of a tier has exactly one owner, every node is well formed.

Called by tests and by an idle scheduler; O(pages + nodes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.mem_cache.tree.tree_node import TreeNode

PageArray: TypeAlias = npt.NDArray[np.int64]


class OwnershipAudit:
    """Counts the owners of each page of one pool.

    Args:
        size: Capacity in tokens, without a padding page.
        page_size: Tokens of a page.
        first_page: Number of padding pages before the first page that may be owned.
    """

    def __init__(self, tier: str, size: int, page_size: int, first_page: int = 0) -> None:
        self._tier = tier
        self._page_size = page_size
        self._first = first_page
        self._pages = size // page_size
        self._owned: list[tuple[str, PageArray]] = []

    def own(self, owner: str, slots: torch.Tensor | None) -> None:
        """Count `owner` for the pages of `slots` (int64 token slots, any number of them per
        page)."""
        if slots is not None and len(slots):
            pages = slots.cpu().numpy() // self._page_size
            starts = np.flatnonzero(np.diff(pages, prepend=-1))
            self._owned.append((owner, pages[starts]))

    def own_pages(self, owner: str, pages: torch.Tensor) -> None:
        """Count `owner` for `pages` (int64 page numbers, padding pages included)."""
        self._owned.append((owner, pages.cpu().numpy()))

    def check(self) -> None:
        """Assert that each page has one owner.

        Raises:
            AssertionError: Names a page without an owner, with two, or outside the pool.
        """
        named = [pages - self._first for _, pages in self._owned]
        pages = np.concatenate([np.empty(0, dtype=np.int64), *named])
        outside = pages[(pages < 0) | (pages >= self._pages)]
        assert not len(outside), f"{self._tier}: pages outside the pool are owned: {outside[:8]}"
        owners = np.bincount(pages, minlength=self._pages)
        twice = np.flatnonzero(owners > 1)
        assert not len(twice), self._accuse(int(twice[0]) + self._first)
        lost = np.flatnonzero(owners == 0)
        assert not len(lost), (
            f"{self._tier}: {len(lost)} of {self._pages} pages have no owner, "
            f"the first is {lost[0] + self._first}"
        )

    def _accuse(self, page: int) -> str:
        owners = [owner for owner, pages in self._owned for _ in range(int((pages == page).sum()))]
        return f"{self._tier}: page {page} is owned by {' and by '.join(owners)}"


def check_nodes(root: TreeNode, nodes: Sequence[TreeNode], page_size: int) -> None:
    """Assert the invariants of each node of a tree, and of its parent and children."""
    device_children = dict.fromkeys([root.id, *(node.id for node in nodes)], 0)
    host_children = dict(device_children)
    for node in nodes:
        parent = node.parent
        assert parent is not None, f"{node} has no parent"
        assert parent.children[node.key.child_key(page_size)] is node, f"{node}: wrong key"
        assert len(node.key) and len(node.key) % page_size == 0, f"{node}: not whole pages"
        assert node.value is not None or node.backuped, f"{node} is on no tier"
        for value in (node.value, node.host_value):
            assert value is None or len(value) == len(node.key), f"{node}: slots and tokens differ"
        if node.value is not None:
            assert parent is root or parent.value is not None, f"{node}: parent off the device"
        if parent is not root:
            assert parent.lock_ref >= node.lock_ref, f"{node} is locked more than its parent"
        device_children[parent.id] += node.value is not None
        host_children[parent.id] += node.backuped
    for node in [root, *nodes]:
        counted = (node.device_children, node.host_children)
        assert counted == (device_children[node.id], host_children[node.id]), (
            f"{node} counts {counted} children on device and host"
        )
