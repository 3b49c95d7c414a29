"""Components of the tree: kinds of state that nodes have beside pages of the primary pool.

A component belongs to one tree. The tree of a model without further kinds of state has none.

Threads: the scheduler's only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
    from sglang.srt.mem_cache.device.state_pool import StatePool
    from sglang.srt.mem_cache.tree.base_prefix_cache import (
        CacheableRequest,
        InsertParams,
        MatchPrefixParams,
        MatchResult,
    )
    from sglang.srt.mem_cache.tree.pool_tier import DeviceTier, HostTier, SlotPool
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree
    from sglang.srt.mem_cache.tree.state_metrics import StateMetrics
    from sglang.srt.mem_cache.tree.tree_node import StateSlots, StateWeights, TreeNode


class TreeComponent(ABC):
    """One kind of state that nodes have beside pages. Counts are tokens unless a name says
    otherwise.

    Attributes:
        pool: The pool on the device whose slots nodes have.
        alignment: Prefixes that can be used are multiples of so many tokens.
        metrics: Metrics of the slots in all tiers.
        weights: Weights of the slots in the digest of the tree.
        device: The slots on the device (L1), once the component is bound.
        host: The slots on the host (L2), if there is one.
    """

    pool: StatePool
    alignment: int
    metrics: StateMetrics
    weights: StateWeights
    device: DeviceTier
    host: HostTier

    @abstractmethod
    def bind(self, tree: PrefixTree, index: int) -> None:
        """Join `tree`, which is empty. The slots of a node will be `node.states[index]`."""

    @abstractmethod
    def add_host(self, pool: SlotPool) -> None:
        """Let nodes have slots of `pool` on the host too."""

    @abstractmethod
    def of(self, node: TreeNode) -> StateSlots:
        """Slots of this kind that `node` has."""

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
            path: All nodes of the key in the tree; the match may use only a front of them.
            params: Parameters of the match.
        """
        return match

    def check_insert(self, params: InsertParams) -> None:
        """Raise ValueError if `params` lacks a field that this kind of state needs."""

    def on_insert(self, end: TreeNode, params: InsertParams) -> bool:
        """Take over the slots of an insertion for its last node, `end`. True: the tree had slots
        there, and the caller still owns those of `params`."""
        return False

    def insertable(self, req: CacheableRequest, length: int) -> int:
        """Number of leading tokens of a request, at most `length`, that the tree may take over."""
        return length

    def take_from(self, req: CacheableRequest, end: TreeNode) -> None:
        """Take over the state of `req` at `end`. The tree has taken over the tokens up to there."""

    def release(self, req: CacheableRequest) -> None:
        """Free the slots that `req`, which has ended, holds for the tree."""

    def can_end(self, node: TreeNode) -> bool:
        """True if a prefix that ends with `node`, whose pages are there, can be used."""
        return True

    @abstractmethod
    def transfer(
        self,
        host: torch.Tensor | None = None,
        device: torch.Tensor | None = None,
        keys: list[str] | None = None,
    ) -> PoolTransfer:
        """Transfer between tiers of slots of this kind; pools that share them are transferred too.

        Args:
            host: Slots in L2, int64 on the CPU.
            device: Slots in L1, int64 on the CPU.
            keys: Hash of the last page before each slot; None: the last page of the operation.
        """
