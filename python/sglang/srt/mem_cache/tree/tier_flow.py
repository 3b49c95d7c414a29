"""Pages on their way between two tiers, in one direction: what every such flow is asked.

A prefix cache is a tree and the flows that it is given. The tree tells them what happens to its
nodes; once a tick each adds what it has seen to the ballot, and acts on what the ranks agree on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.tree.ballot import Progress
    from sglang.srt.mem_cache.tree.tree_node import TreeNode


class TierFlow:
    """One flow. Every verb does nothing unless the flow overrides it. Scheduler thread only."""

    def on_insert(self, path: list[TreeNode]) -> None:
        """`path`, root's child first, has been put on the device, or was used again."""

    def on_host_landed(self, nodes: list[TreeNode]) -> None:
        """The pages of `nodes`, parents first, have reached the host."""

    def on_scheduled(self, rid: str) -> None:
        """Request `rid` has locked what it uses and waits no more."""

    def on_aborted(self, rid: str) -> None:
        """Request `rid` will not run."""

    def begin_tick(self) -> None:
        """Start what was queued since the last tick."""

    def report(self, progress: Progress) -> None:
        """Add what this rank has seen to its ballot."""

    def act_on(self, agreed: Progress) -> None:
        """Do what follows from the agreement of the ranks."""

    def is_active(self) -> bool:
        """Whether there is anything to report: `busy`, asked at every tick."""
        return bool(self.busy())

    def busy(self) -> dict[str, int]:
        """Operations under way by kind, without zeros."""
        return {}

    def reset(self) -> None:
        """Forget what belongs to requests and nodes. Nothing may be under way."""

    def shutdown(self) -> None:
        """End what outlives a tick."""

    def owned_host_pages(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Host slots that operations own, which no node shows: owner and int64 slots."""
        return iter(())

    def owned_host_states(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same of recurrent states."""
        return iter(())

    def check(self) -> None:
        """Assert the flow's own invariants."""
