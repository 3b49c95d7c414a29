"""Components of the tree: kinds of state that nodes own beside pages of the anchor.

A component belongs to one tree. The tree of a model without further kinds of state has none.

Threads: the scheduler's only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.tree.base_prefix_cache import (
        CacheableRequest,
        InsertParams,
        MatchPrefixParams,
        MatchResult,
    )
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree
    from sglang.srt.mem_cache.tree.tree_node import TreeNode


class TreeComponent:
    """One kind of state that nodes own. The hooks do nothing by default. Counts are tokens unless a
    name says otherwise."""

    def bind(self, tree: PrefixTree) -> None:
        """The component was added to `tree`, which is empty."""

    def reset(self) -> None:
        """The tree forgets all nodes. The caller clears the pools."""

    # ---- matching and inserting ------------------------------------------------------------

    def usable(self, path: Sequence[TreeNode], key_len: int) -> int:
        """Number of nodes at the front of `path` that a match of a key of `key_len` may use. `path`
        begins with the root's child."""
        return len(path)

    def complete_match(
        self, match: MatchResult, path: Sequence[TreeNode], params: MatchPrefixParams
    ) -> MatchResult:
        """`match` with the fields of this kind of state filled in.

        Args:
            path: All nodes of the key in the tree, of which the match may use only a front.
            params: Parameters of the match.
        """
        return match

    def check_insert(self, params: InsertParams) -> None:
        """Raise ValueError if `params` lacks a field that this kind of state needs."""

    def insertable(self, req: CacheableRequest, length: int) -> int:
        """Number of leading tokens of a request, at most `length`, that the tree may take over."""
        return length

    def take_from(self, req: CacheableRequest, end: TreeNode) -> None:
        """The tree has taken over the tokens of `req` up to `end`: take over its state there."""

    def release(self, req: CacheableRequest) -> None:
        """`req` has ended: free the slots that it holds for the tree."""

    # ---- leaving ---------------------------------------------------------------------------

    def on_leave_device(self, node: TreeNode) -> None:
        """The pages of `node` leave the device: take its state off the device too."""

    def needs(self, node: TreeNode) -> bool:
        """Whether `node` can serve a request if it has no children."""
        return True

    # ---- books -----------------------------------------------------------------------------

    def check(self, nodes: Sequence[TreeNode], request_states: Iterable[torch.Tensor]) -> None:
        """Assert this component's invariants.

        Args:
            nodes: All nodes of the tree but the root.
            request_states: Slots of states that requests own.
        """
