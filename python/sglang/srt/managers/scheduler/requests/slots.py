"""Resources of a request on the device: a row, slots, a lock in the tree, counts of penalties."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.penalties import TokenHistory

if TYPE_CHECKING:
    from sglang.srt.managers.messages.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.scheduler.requests.progress import RequestProgress
    from sglang.srt.mem_cache.device.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.tree.radix_key import TokenArray
    from sglang.srt.mem_cache.tree.tree_node import TreeNode

NO_SLOTS = torch.empty(0, dtype=torch.int64)


@dataclass(slots=True, eq=False)
class RequestSlots:
    """Resources that a request holds. The tree and the row pool get only this part: it is a
    `CacheableRequest`, for which the other parts are read-only.

    Invariant between two steps: columns `[0, kv_committed_len)` of the row hold slots with the keys
    and values of `kv_committed_ids`; the `num_in_flight` columns after them hold the slots that a
    step in flight fills; and the row has no others.
    """

    spec: TokenizedGenerateReqInput
    progress: RequestProgress
    req_pool_idx: int | None = None
    prefix_indices: torch.Tensor = NO_SLOTS
    cache_protected_len: int = 0
    last_node: TreeNode = field(init=False)
    mamba_track_slot: torch.Tensor | None = None
    mamba_last_track_seqlen: int | None = None
    snapshot_slot: torch.Tensor | None = None
    """int64 `[1]` on the CPU: slot of the next snapshot of a decode step; `mamba_track_slot` has
    the last snapshot. The two slots take turns."""
    snapshot_in_flight: int | None = None
    """Tokens of the snapshot that a decode step in flight writes to `snapshot_slot`; None: none is
    in flight."""
    history: TokenHistory = field(init=False)
    """Token counts for penalties, on the device while the request runs."""

    def __post_init__(self) -> None:
        self.history = TokenHistory(self.progress.prompt_ids, self.progress.output_ids)

    @property
    def rid(self) -> str:
        return self.spec.rid

    @property
    def extra_key(self) -> str | None:
        return self.spec.extra_key

    @property
    def priority(self) -> int:
        return self.spec.priority

    @property
    def kv_committed_len(self) -> int:
        return self.progress.kv_committed_len

    @property
    def kv_committed_ids(self) -> TokenArray:
        return self.progress.ids_between(0, self.kv_committed_len)

    @property
    def row(self) -> int:
        """`req_pool_idx` of a request that has one."""
        assert self.req_pool_idx is not None, f"request {self.rid} has no row"
        return self.req_pool_idx

    def own_slots(self, pool: ReqToTokenPool) -> torch.Tensor:
        """int64: slots that the request owns itself; they follow the tree's in its row."""
        if self.req_pool_idx is None:
            return NO_SLOTS
        row = pool.req_to_token[self.req_pool_idx]
        return row[self.cache_protected_len : self.progress.next_seq_len].to(torch.int64)
