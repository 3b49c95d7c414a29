"""A copy between L1 and L2 under way, as both flows record it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.l2.cache_controller import HiCacheAck
    from sglang.srt.mem_cache.tree.component import TreeComponent
    from sglang.srt.mem_cache.tree.tree_node import TreeNode


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """A copy of the `length` tokens up to the end of `node`. After splits several nodes have them:
    see `parts_of`."""

    node: TreeNode
    length: int
    host_indices: torch.Tensor
    """Host slots of the pages; empty if only states are copied."""
    host_states: Mapping[TreeComponent, torch.Tensor]
    """Host slots of the states of `node` that the copy includes, by kind."""


def num_reached(acks: Sequence[HiCacheAck]) -> int:
    """Number of copies that have ended, from the head of their queue on."""
    count = 0
    for ack in acks:
        if not ack.finish_event.query():
            break
        count += 1
    return count
