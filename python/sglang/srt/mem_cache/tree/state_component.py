"""Recurrent states in the prefix tree: one slot stands for the whole prefix up to a node's end.

A prefix of a model with such states is usable if the tree has both its pages and the state at its
end. Slots are evicted apart from pages. A node that has neither a state on any tier nor children is
useless, and is deleted.

A request never runs on a slot of the tree: its first step reads the state and writes a slot that
the request owns. Locks on a state are therefore short: those of copies between tiers, and of steps
that read it, until they are launched; the next use of its slot is queued after them. A forward
waits for a state that is being loaded layer by layer, as it waits for pages.

Threads: the scheduler's only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from sglang.srt.hardware_backend.device_runtime import on_device
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheableRequest,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
    RunningRequest,
    StatefulRequest,
)
from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.tree.digest import hash_of
from sglang.srt.mem_cache.tree.hicache_metrics import StateMetrics
from sglang.srt.mem_cache.tree.host_tier import HostTier
from sglang.srt.mem_cache.tree.pool_tier import DeviceTier, SlotPool, TieredTree
from sglang.srt.mem_cache.tree.tree_node import StateSlots, StateWeights, TreeNode, tokens_of

if TYPE_CHECKING:
    from sglang.srt.mem_cache.device.state_pool import StatePool


class StateComponent:
    """A component of one tree: one kind of state that its nodes have beside pages. The tree of a
    model without such state has none. Counts are tokens unless a name says otherwise.

    Slots in the tree are int64 `[1]` on the CPU, so that freeing one does not wait for the device.

    Args:
        alignment: Snapshots are taken at multiples of this number of tokens.
        metrics: Metrics of states in all tiers.
        max_per_path: States of a path that leave in the order of their use. Those above leave
            before all others, unless prompts branch there; -1: none does.
        pages_alone: See below.

    Attributes:
        alignment: Usable prefixes have a multiple of this number of tokens.
        pages_alone: True if nodes are of use without a state, for requests whose state another
            server gives. No state is read from L3 then.
        weights: Weights of the slots in the digest of the tree.
        device: The slots on the device (L1), once the component is bound.
        host: The slots on the host (L2), if there is one.
    """

    device: DeviceTier
    host: HostTier

    def __init__(
        self,
        pool: StatePool,
        alignment: int,
        metrics: StateMetrics | None = None,
        max_per_path: int = -1,
        *,
        pages_alone: bool = False,
    ) -> None:
        self.pages_alone = pages_alone
        self.pool = pool
        self.alignment = alignment
        self.max_per_path = max_per_path
        self.metrics = metrics or StateMetrics(None)
        name = pool.spec.name
        self.weights = StateWeights(hash_of(f"{name} in L1"), hash_of(f"{name} in L2"))
        self._tree: TieredTree
        self._index = 0

    def bind(self, tree: TieredTree, index: int) -> None:
        """Join `tree`, which is empty. The slots of a node will be `node.states[index]`."""
        if self.alignment < 1 or self.alignment % tree.page_size:
            raise ValueError(
                f"snapshots every {self.alignment} tokens do not end with a page of "
                f"{tree.page_size}: give a common multiple of the page size and the kernel's chunk"
            )
        self._tree = tree
        self._index = index
        name = f"{self.pool.spec.name} states on the device"
        self.device = DeviceTier(tree, name, self.pool, state=index)
        self.device.evicted = self.metrics.evicted.labels("device")
        tree.device.dependents.append(self.device)

    def add_host(self, pool: SlotPool) -> None:
        """Let nodes have slots of `pool` on the host too."""
        name = f"{self.pool.spec.name} states on the host"
        self.host = HostTier(self._tree, name, pool, state=self._index)
        if not self._tree.host_is_buffer:
            self.host.evicted = self.metrics.evicted.labels("host")
        self._tree.host.dependents.append(self.host)

    def of(self, node: TreeNode) -> StateSlots:
        """Slots of this kind that `node` has."""
        return node.states[self._index]

    # ---- matching and inserting ------------------------------------------------------------

    def usable(self, path: Sequence[TreeNode], key_len: int) -> int:
        """Number of nodes at the front of `path` that a match of a key of `key_len` may use. `path`
        begins with the root's child."""
        fits, left = 0, self.longest_match(key_len)
        for node in path:
            left -= len(node.key.ids)
            if left < 0:
                break
            fits += 1
        while fits and not self.can_end(path[fits - 1]):
            fits -= 1
        return fits

    def longest_match(self, key_len: int) -> int:
        """Most tokens of a key of `key_len` whose state serves a request for it. The last token is
        always computed, and the state of the whole key includes it already."""
        return key_len if self.pool.spec.is_repeatable else max(0, key_len - 1)

    def complete_match(
        self, match: MatchResult, path: Sequence[TreeNode], params: MatchPrefixParams
    ) -> MatchResult:
        """`match` with the fields of this kind of state filled in.

        Args:
            path: All nodes of the key in the tree; the match may use only a front of them.
        """
        end = match.best_match_node
        if params.cow_mamba:
            slot = _running_slot(params.req)
            if self._is_ready(end):
                self.copy_to(end, slot)
        self.of(end).last_access_time = end.last_access_time
        matched = match.device_indices.numel() + match.host_hit_length
        known = min(tokens_of(path), self.longest_match(len(params.key)))
        branching = known // self.alignment * self.alignment
        return match._replace(
            mamba_host_hit_length=int(end.parent is not None and not self._is_ready(end)),
            mamba_branching_seqlen=branching if branching > matched else None,
            mamba_cut_length=known - matched,
        )

    def copy_to(self, node: TreeNode, slot: torch.Tensor) -> None:
        """Queue a copy of the state of `node`, which is on the device, on the current stream.

        If the state is being loaded, call this after the load has started; the current stream waits
        for it.

        Args:
            slot: int64 `[1]` on the device: target of the copy, which the tree does not own.
        """
        value = self.of(node).value
        assert value is not None, f"{node} has no state on the device"
        self.pool.copy_from(self.on_device(value), slot)

    def transfer(
        self,
        host: torch.Tensor | None = None,
        device: torch.Tensor | None = None,
        keys: list[str] | None = None,
    ) -> PoolTransfer:
        """Transfer between tiers of slots of this kind; pools that share them are transferred too.

        Args:
            host: Slots in L2, int64 on the CPU.
            device: Slots in L1, int64 on the CPU, where they stay: the copy stages them.
            keys: Hash of the last page before each slot; None: the last page of the operation.
        """
        spec = self.pool.spec
        return PoolTransfer(spec.name, host, device, keys, spec.hit_policy)

    def on_device(self, slot: torch.Tensor) -> torch.Tensor:
        """`slot` as a tensor on the device, for kernels."""
        return on_device(slot.tolist(), self.pool.device, torch.int64)

    def check_insert(self, params: InsertParams) -> None:
        """Raise ValueError if `params` lacks a field that this kind of state needs."""
        if params.mamba_value is None or len(params.mamba_value) != 1:
            raise ValueError("insert needs a `mamba_value`: the slot of the state after `key`")
        if params.key is None or not len(params.key) or len(params.key) % self._tree.page_size:
            raise ValueError("a state follows whole pages: give a `key` of whole pages")

    def on_insert(self, end: TreeNode, params: InsertParams) -> bool:
        """Take over the slots of an insertion for its last node, `end`. True: the tree had slots
        there, and the caller still owns those of `params`."""
        assert params.mamba_value is not None
        return not self._put(end, params.mamba_value)

    def insertable(self, req: CacheableRequest, length: int) -> int:
        """Number of leading tokens of a request, at most `length`, that the tree may take over."""
        behind = self.snapshot_end(req)
        if behind is None:
            return length if self.pages_alone else 0
        assert behind <= length and behind % self._tree.page_size == 0, (
            f"request {req.rid}: a snapshot behind {behind} tokens, of which {length} are computed "
            f"in whole pages of {self._tree.page_size}"
        )
        return length if self.pages_alone else behind

    def snapshot_end(self, req: CacheableRequest) -> int | None:
        """Tokens before the snapshot that `req` has for the tree; None: it has none."""
        holder = cast(StatefulRequest, req)
        return None if holder.mamba_track_slot is None else holder.mamba_last_track_seqlen

    def take_from(self, req: CacheableRequest, end: TreeNode) -> None:
        """Take over the snapshot of `req`, which has one, at `end`. The tree has taken over the
        tokens up to there."""
        holder = cast(StatefulRequest, req)
        if holder.mamba_track_slot is not None and self._put(end, holder.mamba_track_slot):
            holder.mamba_track_slot = None
        holder.mamba_last_track_seqlen = None

    def take_behind(self, req: CacheableRequest) -> None:
        """Take over the snapshot of `req` if it is behind the pages that the tree has of it."""
        if self.snapshot_end(req) == req.cache_protected_len:
            self.take_from(req, req.last_node)

    def release(self, req: CacheableRequest) -> None:
        """Free the slots that `req`, which has ended, holds for the tree."""
        holder = cast(StatefulRequest, req)
        if holder.mamba_track_slot is not None:
            self.pool.free(holder.mamba_track_slot)
        holder.mamba_track_slot = holder.mamba_last_track_seqlen = None

    def can_end(self, node: TreeNode) -> bool:
        """True if a prefix that ends with `node`, whose pages are there, can be used."""
        return self.of(node).is_on_any_tier

    def is_of_use(self, node: TreeNode) -> bool:
        """True if `node`, whose pages are there, may stay in the tree without children."""
        return self.pages_alone or self.can_end(node)

    def _put(self, end: TreeNode, slot: torch.Tensor) -> bool:
        """As `DeviceTier.put`. States above that `end` replaces are the next to leave."""
        if not self.device.put(end, slot):
            return False
        if self._tree.host_is_buffer:
            end.storage_epoch = -1  # L3 may have the pages without the state.
        if self.max_per_path != -1:
            with_state = [node for node in end.path_up() if self.can_end(node)]
            for node in with_state[self.max_per_path :]:
                if len(node.children) == 1:
                    self.of(node).last_access_time = 0
        return True

    def _is_ready(self, node: TreeNode) -> bool:
        """True if the state of `node` is on the device; False while it is being loaded."""
        at = self.of(node)
        is_loading = at.lock_ref > 0 and at.host_value is not None
        return at.value is not None and not is_loading


def _running_slot(req: CacheableRequest | None) -> torch.Tensor:
    """Slot of the running state of `req`."""
    slot = None if req is None else cast(RunningRequest, req).mamba_pool_idx
    if slot is None:
        raise ValueError("cow_mamba needs a `req` with a `mamba_pool_idx` to copy the state to")
    return slot
