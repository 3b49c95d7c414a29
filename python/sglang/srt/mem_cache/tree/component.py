"""What nodes may own beside pages of the anchor: hooks of the tree, which do nothing by default.

A component is given to one tree. The tree of a model without further kinds of state has none.

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
    """One kind of state that nodes own. Counts are tokens unless a name says otherwise."""

    def bind(self, tree: PrefixTree) -> None:
        """`tree`, which is empty, has this component from now on."""

    def reset(self) -> None:
        """The tree forgets every node. The caller clears the pools."""

    # ---- matching and inserting ------------------------------------------------------------

    def usable(self, path: Sequence[TreeNode], key_len: int) -> int:
        """How many nodes of `path`, root's child first, a match of a key of `key_len` may use."""
        return len(path)

    def complete_match(
        self, match: MatchResult, path: Sequence[TreeNode], params: MatchPrefixParams
    ) -> MatchResult:
        """`match` with what it says about this kind of state.

        Args:
            path: All that the tree has of the key, of which the match may use only a front.
            params: Parameters of the match.
        """
        return match

    def check_insert(self, params: InsertParams) -> None:
        """Raise ValueError where `params` lacks what this kind of state needs."""

    def insertable(self, req: CacheableRequest, length: int) -> int:
        """How many of the first `length` tokens of a request the tree may take over."""
        return length

    def take_from(self, req: CacheableRequest, end: TreeNode) -> None:
        """The tree has taken over the tokens of `req` up to `end`: take over what belongs there."""

    def release(self, req: CacheableRequest) -> None:
        """`req` has ended: free what it holds for the tree."""

    # ---- leaving ---------------------------------------------------------------------------

    def on_leave_device(self, node: TreeNode) -> None:
        """The pages of `node` leave the device: so does all that hangs on them."""

    def needs(self, node: TreeNode) -> bool:
        """Whether `node` can serve a request though nothing hangs below it."""
        return True

    # ---- books -----------------------------------------------------------------------------

    def check(self, nodes: Sequence[TreeNode], request_states: Iterable[torch.Tensor]) -> None:
        """Assert this component's invariants.

        Args:
            nodes: All of the tree but the root.
            request_states: Slots that requests own.
        """
