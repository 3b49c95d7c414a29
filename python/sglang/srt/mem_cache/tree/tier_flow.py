"""Interface of flows: a flow moves pages between two tiers in one direction.

A prefix cache is a tree and its flows. The cache notifies the flows of changes of its nodes. Once a
tick each busy flow adds its observations to the tick sync, and acts on the agreement of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.tree.pool_tier import PoolTier
    from sglang.srt.mem_cache.tree.tick_sync import Progress
    from sglang.srt.mem_cache.tree.tree_node import TreeNode


class TierFlow:
    """One flow. By default every method has no effect. Scheduler thread only."""

    def on_insert(self, path: list[TreeNode]) -> None:
        """The nodes of `path`, root's child first, were put on the device or used again."""

    def on_host_landed(self, nodes: list[TreeNode]) -> None:
        """The pages of `nodes`, parents first, have reached the host."""

    def on_scheduled(self, rid: str) -> None:
        """Request `rid` has locked its prefix and waits no more."""

    def on_aborted(self, rid: str) -> None:
        """Request `rid` will not run."""

    def begin_tick(self) -> None:
        """Start the operations that were queued since the last tick."""

    def report(self, progress: Progress) -> None:
        """Add this rank's observations to its tick sync."""

    def act_on(self, agreed: Progress) -> None:
        """Act on the agreement of the ranks."""

    def busy(self) -> dict[str, int]:
        """Operations under way by kind, without zeros; equal on all ranks. A flow with none takes
        no part in a tick."""
        return {}

    def reset(self) -> None:
        """Forget all requests and nodes. No operation may be under way."""

    def shutdown(self) -> None:
        """End threads and other resources."""

    def owned_slots(self) -> Iterator[tuple[PoolTier, str, torch.Tensor]]:
        """Slots that operations own and no node has: the tier, the owner, and int64 slots."""
        return iter(())

    def check(self) -> None:
        """Assert the flow's own invariants."""
