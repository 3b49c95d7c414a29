"""A copy between L1 and L2 under way, as the flows in both directions know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hybrid_cache.cache_controller import HiCacheAck
    from sglang.srt.mem_cache.tree.tree_node import TreeNode


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """`length` tokens that end at the end of `node`. Splits may have come between: `parts_of`."""

    node: TreeNode
    length: int
    host_indices: torch.Tensor
    """Host slots of the pages; none where the state is copied alone."""
    host_state: torch.Tensor | None = None
    """Host slot of the state of `node`, int64 `[1]`, where it goes along."""


def num_reached(acks: Sequence[HiCacheAck]) -> int:
    """Number of copies that have ended, from the head of their queue on."""
    count = 0
    for ack in acks:
        if not ack.finish_event.query():
            break
        count += 1
    return count
