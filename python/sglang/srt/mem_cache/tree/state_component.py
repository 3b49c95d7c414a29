"""Recurrent states in the prefix tree: one slot stands for the whole prefix up to a node's end.

A prefix of a model with such states is usable if the tree has both its pages and the state at its
end. Slots are evicted apart from pages. A node that has neither a state on any tier nor children is
useless, and is deleted.

A request never runs on a slot of the tree: its first step reads the state and writes a slot that
the request owns. So a state is locked only by copies between tiers, and until the steps that read
it are launched; the next use of its slot is queued after them. A forward waits for a state that is
being loaded layer by layer, as for pages.

Threads: the scheduler's only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from sglang.srt.hardware_backend.device_runtime import on_device
from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.tree.base_prefix_cache import (
    CacheableRequest,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
    RunningRequest,
    StatefulRequest,
)
from sglang.srt.mem_cache.tree.component import TreeComponent
from sglang.srt.mem_cache.tree.evict_policy import EvictionHeap
from sglang.srt.mem_cache.tree.integrity import PageBooks
from sglang.srt.mem_cache.tree.state_metrics import StateMetrics
from sglang.srt.mem_cache.tree.tree_node import TreeNode

if TYPE_CHECKING:
    from sglang.srt.mem_cache.device.state_pool import StatePool
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree


class StateComponent(TreeComponent):
    """The states of one tree's nodes. Counts are slots unless a name says otherwise.

    Slots in the tree are int64 `[1]` on the CPU, so that freeing one does not wait for the device.

    Args:
        pool: Pool of the states.
        alignment: Tokens of which the positions of snapshots are multiples.
        metrics: Metrics of states in all tiers.

    Attributes:
        evictable: Number of states on the device that are not locked.
    """

    heap: EvictionHeap

    def __init__(
        self, pool: StatePool, alignment: int, metrics: StateMetrics | None = None
    ) -> None:
        self.pool = pool
        self.alignment = alignment
        self.metrics = metrics or StateMetrics(None)
        self.evictable = 0
        self._evicted = self.metrics.evicted.labels("device")
        self._tree: PrefixTree

    def bind(self, tree: PrefixTree) -> None:
        if self.alignment < 1 or self.alignment % tree.page_size:
            raise ValueError(
                f"snapshots every {self.alignment} tokens do not end with a page of "
                f"{tree.page_size}: give a common multiple of the page size and the kernel's chunk"
            )
        self._tree = tree
        self.heap = tree.add_heap(_may_lose_state, of_states=True)

    def reset(self) -> None:
        self.evictable = 0

    # ---- matching and inserting ------------------------------------------------------------

    def usable(self, path: Sequence[TreeNode], key_len: int) -> int:
        # The last token is always computed, and the state of the whole key includes it already.
        ends = itertools.accumulate(len(node.key) for node in path)
        fits = sum(1 for _ in itertools.takewhile(lambda end: end < key_len, ends))
        return next((count for count in range(fits, 0, -1) if path[count - 1].has_state), 0)

    def complete_match(
        self, match: MatchResult, path: Sequence[TreeNode], params: MatchPrefixParams
    ) -> MatchResult:
        end = match.best_match_node
        if params.cow_mamba:
            slot = _running_slot(params.req)
            if _is_ready(end):
                self.copy_to(end, slot)
        end.mamba_last_access_time = end.last_access_time
        matched = len(match.device_indices) + match.host_hit_length
        known = min(sum(len(node.key) for node in path), max(0, len(params.key) - 1))
        branching = known // self.alignment * self.alignment
        return match._replace(
            mamba_host_hit_length=int(end.parent is not None and not _is_ready(end)),
            mamba_branching_seqlen=branching if branching > matched else None,
            mamba_cut_length=known - matched,
        )

    def copy_to(self, node: TreeNode, slot: torch.Tensor) -> None:
        """Queue a copy of the state of `node`, which is on the device, on the current stream.

        If the state is being loaded, call this after the load has started; the current stream waits
        for it.

        Args:
            node: Node with the state.
            slot: int64 `[1]` on the device: target of the copy, which the tree does not own.
        """
        assert node.mamba_value is not None, f"{node} has no state on the device"
        self.pool.copy_from(self.on_device(node.mamba_value), slot)

    def transfer(
        self,
        host: torch.Tensor | None = None,
        device: torch.Tensor | None = None,
        keys: list[str] | None = None,
    ) -> PoolTransfer:
        """Transfer of a state between tiers; the pools that share its slot are transferred too.

        Args:
            host: Slot in L2, int64 `[1]` on the CPU.
            device: Slot in L1, int64 `[1]` on the CPU.
            keys: Hash of the last page before the state.
        """
        slot = None if device is None else self.on_device(device)
        spec = self.pool.spec
        return PoolTransfer(spec.name, host, slot, keys, spec.hit_policy)

    def on_device(self, slot: torch.Tensor) -> torch.Tensor:
        """`slot` as a tensor on the device, for kernels."""
        return on_device(slot.tolist(), self.pool.device, torch.int64)

    def check_insert(self, params: InsertParams) -> None:
        if params.mamba_value is None or len(params.mamba_value) != 1:
            raise ValueError("insert needs a `mamba_value`: the slot of the state after `key`")
        if params.key is None or not len(params.key) or len(params.key) % self._tree.page_size:
            raise ValueError("a state follows whole pages: give a `key` of whole pages")

    def on_insert(self, end: TreeNode, params: InsertParams) -> bool:
        """Take over the state of an insertion for its last node, `end`. True: the tree had a state
        there, and the caller still owns the slot."""
        assert params.mamba_value is not None
        return not self.put_on_device(end, params.mamba_value)

    def put_on_device(self, node: TreeNode, slot: torch.Tensor) -> bool:
        """Give `slot` to `node`, whose pages are on the device. False: the node has a state there,
        and the caller still owns `slot`."""
        if node.mamba_value is not None:
            return False
        assert node.value is not None, f"{node} gets a state without its pages"
        node.set_mamba_value(slot)
        node.mamba_last_access_time = node.last_access_time
        self.evictable += 1
        self.heap.offer(node)
        return True

    def insertable(self, req: CacheableRequest, length: int) -> int:
        holder = cast(StatefulRequest, req)
        behind = holder.mamba_last_track_seqlen
        if holder.mamba_track_slot is None or behind is None:
            return 0
        assert behind <= length and behind % self._tree.page_size == 0, (
            f"request {req.rid}: a snapshot behind {behind} tokens, of which {length} are computed "
            f"in whole pages of {self._tree.page_size}"
        )
        return behind

    def take_from(self, req: CacheableRequest, end: TreeNode) -> None:
        holder = cast(StatefulRequest, req)
        if holder.mamba_track_slot is not None and self.put_on_device(end, holder.mamba_track_slot):
            holder.mamba_track_slot = None
        holder.mamba_last_track_seqlen = None

    def release(self, req: CacheableRequest) -> None:
        holder = cast(StatefulRequest, req)
        if holder.mamba_track_slot is not None:
            self.pool.free(holder.mamba_track_slot)
        holder.mamba_track_slot = holder.mamba_last_track_seqlen = None

    # ---- eviction --------------------------------------------------------------------------

    def on_leave_device(self, node: TreeNode) -> None:
        if node.mamba_value is not None:
            self.pool.free(self.take_off_device(node))

    def take_off_device(self, node: TreeNode) -> torch.Tensor:
        """Take the unlocked state of `node` off the device. The caller frees the returned slot."""
        slot = node.mamba_value
        assert slot is not None and node.mamba_lock_ref == 0, f"{node}: its state is in use"
        node.set_mamba_value(None)
        self.evictable -= 1
        self._evicted.inc()
        return slot

    def needs(self, node: TreeNode) -> bool:
        return node.has_state

    # ---- locks -----------------------------------------------------------------------------

    def lock(self, node: TreeNode) -> None:
        """Keep the state of `node`, whose pages are locked, until the matching `unlock`."""
        assert node.mamba_value is not None and node.lock_ref > 0
        self.evictable -= node.mamba_lock_ref == 0
        node.mamba_lock_ref += 1

    def unlock(self, node: TreeNode) -> None:
        """Undo one `lock`. Call it before the pages are unlocked."""
        assert node.mamba_lock_ref > 0, f"the state of {node} is unlocked twice"
        node.mamba_lock_ref -= 1
        self.evictable += node.mamba_lock_ref == 0
        self.heap.offer(node)

    # ---- books -----------------------------------------------------------------------------

    def check(self, nodes: Sequence[TreeNode], request_states: Iterable[torch.Tensor]) -> None:
        books = PageBooks("states on the device", self.pool.size, 1, first_page=1)
        free = torch.tensor(self.pool.free_slot_ids(), dtype=torch.int64)
        books.own_pages("the free list", free)
        for index, slots in enumerate(request_states):
            books.own_pages(f"request {index}", slots)
        evictable = 0
        for node in nodes:
            _check_node(node)
            if node.mamba_value is not None:
                books.own_pages(repr(node), node.mamba_value)
                evictable += node.mamba_lock_ref == 0
            is_offered = node in self.heap
            assert is_offered or not _may_lose_state(node), f"{node}: its state is not offered"
        books.check()
        assert self.evictable == evictable, (
            f"the tree counts {self.evictable} states that can be evicted, and holds {evictable}"
        )


def _check_node(node: TreeNode) -> None:
    is_in_use = node.lock_ref or node.host_ref_counter
    assert node.children or node.has_state or is_in_use, f"{node} is useless"
    assert node.mamba_value is None or node.value is not None, f"{node}: a state without pages"
    assert node.mamba_host_value is None or node.backuped, f"{node}: a host state without pages"
    assert not node.mamba_lock_ref or (node.lock_ref and node.mamba_value is not None), (
        f"{node}: a lock on a state without one on its pages"
    )


def _running_slot(req: CacheableRequest | None) -> torch.Tensor:
    """Slot of the running state of `req`."""
    slot = None if req is None else cast(RunningRequest, req).mamba_pool_idx
    if slot is None:
        raise ValueError("cow_mamba needs a `req` with a `mamba_pool_idx` to copy the state to")
    return slot


def _is_ready(node: TreeNode) -> bool:
    """Whether the state of `node` is on the device; False while it is being loaded."""
    is_loading = node.mamba_lock_ref > 0 and node.mamba_host_value is not None
    return node.mamba_value is not None and not is_loading


def _may_lose_state(node: TreeNode) -> bool:
    return node.mamba_value is not None and node.mamba_lock_ref == 0
