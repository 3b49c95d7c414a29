"""The radix tree of the device tier (L1).

A node holds whole pages. Sources: SGLang's RadixAttention (Zheng et al., "SGLang: Efficient
Execution of Structured Language Model Programs", 2024) for the idea; radix trees are Morrison's
(1968). The tree below also walks and splits nodes that are on the host alone, so that the
hierarchical cache adds tiers without a second copy of any of it.

Threads: the scheduler's only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.mem_cache.tree.base_prefix_cache import (
    BasePrefixCache,
    CacheableRequest,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.tree.digest import check_digest
from sglang.srt.mem_cache.tree.evict_policy import EvictionHeap, get_eviction_strategy
from sglang.srt.mem_cache.tree.integrity import PageBooks, check_nodes
from sglang.srt.mem_cache.tree.look_ahead import LookAhead
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.tree.tree_node import ROOT_ID, TreeNode

if TYPE_CHECKING:
    from sglang.srt.mem_cache.tree.cache_init_params import CacheInitParams

__all__ = ["RadixCache", "RadixKey", "TreeNode"]


class RadixCache(BasePrefixCache):
    """Prefix cache of one tier.

    With `params.disable` nothing is kept across requests: no match, no insert.
    """

    def __init__(self, params: CacheInitParams) -> None:
        self.disable = params.disable
        self.page_size = params.page_size
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.device = self.token_to_kv_pool_allocator.device
        self.eviction_strategy = get_eviction_strategy(params.eviction_policy)
        self._device_heap = EvictionHeap(self.eviction_strategy, self._is_device_candidate)
        self._look_ahead = LookAhead()
        self._reset_books()

    def reset(self) -> None:
        self._reset_books()

    def _reset_books(self) -> None:
        self.root_node = TreeNode(ROOT_ID, RadixKey([]))
        self._next_node_id = ROOT_ID + 1
        self._clock = 0
        self._evictable = 0
        self._protected = 0
        self._device_heap.clear()
        self._look_ahead.clear()

    # ---- matching and inserting ------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        path = [] if self.disable else self._walk(params.key)
        on_device = [node for node in path if node.value is not None]
        last_device = on_device[-1] if on_device else self.root_node
        last = path[-1] if path else self.root_node
        return MatchResult(
            device_indices=self._values_of(on_device),
            last_device_node=last_device,
            last_host_node=last,
            best_match_node=last,
            host_hit_length=sum(len(node.key) for node in path[len(on_device) :]),
        )

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert whole pages of `key` with their device slots; what is over is ignored.

        The tree takes the slots of pages that it does not have on the device; the caller keeps
        (and frees) those of the first `prefix_len` tokens.

        Raises:
            ValueError: `key` or `value` is missing, or they differ in length.
        """
        if params.key is None or params.value is None or len(params.key) != len(params.value):
            raise ValueError("insert needs `key` and a `value` of the same length")
        if self.disable:
            return InsertResult(prefix_len=0)
        key = params.key.page_aligned(self.page_size)
        prefix_len, path = self._insert(key, params.value, params.priority)
        if not params.chunked:
            self._count_hit(path)
        self._after_insert(path)
        return InsertResult(prefix_len=prefix_len, total_len=len(key))

    def _walk(self, key: RadixKey) -> list[TreeNode]:
        """Nodes that cover the longest known front of `key`, root's child first.

        Where the key leaves a node in its middle (at a page boundary), the node is split. Every
        node on the way is touched.
        """
        self._clock += 1
        node, done = self.root_node, 0
        path: list[TreeNode] = []
        while done + self.page_size <= len(key):
            rest = key[done:]
            child = node.children.get(rest.child_key(self.page_size))
            if child is None:
                break
            common = child.key.match(rest, self.page_size)
            if common < len(child.key):
                child = self._split_node(child, common)
            child.last_access_time = self._clock
            path.append(child)
            done += common
            node = child
        return path

    def _path_to(self, node: TreeNode) -> list[TreeNode]:
        """From root's child down to `node`; every node on the way is touched."""
        self._clock += 1
        path: list[TreeNode] = []
        while node.parent is not None:
            node.last_access_time = self._clock
            path.append(node)
            node = node.parent
        return path[::-1]

    def _insert(
        self, key: RadixKey, value: torch.Tensor, priority: int
    ) -> tuple[int, list[TreeNode]]:
        """Returns the tokens that were on the device before, and the path of the whole key."""
        path = self._walk(key)
        known = done = 0
        for node in path:
            length = len(node.key)
            if node.value is not None:
                known += length
            else:
                self._put_on_device(node, value[done : done + length].clone())
            node.priority = max(node.priority, priority)
            done += length
        if done < len(key):
            parent = path[-1] if path else self.root_node
            leaf = self._new_node(key[done:], parent)
            leaf.priority = priority
            self._put_on_device(leaf, value[done : len(key)].clone())
            path.append(leaf)
        return known, path

    def _new_node(self, key: RadixKey, parent: TreeNode) -> TreeNode:
        node = TreeNode(self._next_node_id, key)
        self._next_node_id += 1
        node.creation_time = node.last_access_time = self._clock
        node.attach(parent, self.page_size)
        return node

    def _put_on_device(self, node: TreeNode, slots: torch.Tensor) -> None:
        node.set_value(slots)
        if node.lock_ref:
            self._protected += len(slots)
        else:
            self._evictable += len(slots)
        self._device_heap.offer(node)

    def _split_node(self, lower: TreeNode, length: int) -> TreeNode:
        """Cut the first `length` tokens of `lower` off into a new parent, which is returned.

        The lower part keeps the object and its id; locks, pins and marks are copied, so that an
        operation that knows (node, length) releases both by walking upwards.
        """
        assert 0 < length < len(lower.key) and length % self.page_size == 0
        parent = lower.parent
        assert parent is not None
        upper = TreeNode(self._next_node_id, lower.key[:length])
        self._next_node_id += 1
        lower.detach(self.page_size)
        if lower.value is not None:
            upper.value, lower.value = lower.value[:length].clone(), lower.value[length:].clone()
        if lower.host_value is not None:
            upper.host_value = lower.host_value[:length].clone()
            lower.host_value = lower.host_value[length:].clone()
        if lower.hash_value is not None:
            pages = length // self.page_size
            upper.hash_value, lower.hash_value = lower.hash_value[:pages], lower.hash_value[pages:]
        for mark in (
            "lock_ref",
            "host_ref_counter",
            "write_id",
            "backup_op",
            "storage_epoch",
            "hit_count",
            "priority",
            "last_access_time",
            "creation_time",
        ):
            setattr(upper, mark, getattr(lower, mark))
        upper.wanted_by = lower.wanted_by.copy()
        lower.key = lower.key[length:]
        upper.attach(parent, self.page_size)
        lower.attach(upper, self.page_size)
        return upper

    def _count_hit(self, path: list[TreeNode]) -> None:
        """One more request went through `path` to its end."""
        for node in path:
            node.hit_count += 1

    def _after_insert(self, path: list[TreeNode]) -> None:
        """`path` has just been put on the device, or used again. For lower tiers."""

    def _values_of(self, nodes: list[TreeNode]) -> torch.Tensor:
        values = [node.value for node in nodes if node.value is not None]
        if not values:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        return torch.cat(values) if len(values) > 1 else values[0]

    # ---- requests --------------------------------------------------------------------------

    def cache_finished_req(self, req: CacheableRequest, is_insert: bool = True) -> None:
        key, slots = self._committed(req)
        kept = req.cache_protected_len
        if is_insert and not self.disable:
            aligned = key.page_aligned(self.page_size)
            if len(aligned) > kept:
                known, path = self._insert(aligned, slots, req.priority)
                # Pages that somebody else inserted meanwhile: ours are doubles.
                self._free_slots(slots[kept:known])
                kept = len(aligned)
            else:
                path = self._path_to(req.last_node)
            self._count_hit(path)
            self._after_insert(path)
        self._free_slots(slots[kept:])
        self.dec_lock_ref(req.last_node)
        req.last_node = self.root_node
        req.cache_protected_len = 0

    def cache_unfinished_req(self, req: CacheableRequest, chunked: bool = False) -> None:
        key, slots = self._committed(req)
        if self.disable:
            req.prefix_indices = slots
            return
        begin, aligned = req.cache_protected_len, key.page_aligned(self.page_size)
        known, path = self._insert(aligned, slots, req.priority)
        self._after_insert(path)
        if known > begin:
            # Pages that somebody else inserted meanwhile: ours are doubles.
            self._free_slots(slots[begin:known])
            theirs = self._values_of(path)[begin:known]
            self.req_to_token_pool.write((req.req_pool_idx, slice(begin, known)), theirs)
            slots = torch.cat([slots[:begin], theirs, slots[known:]])
        last = path[-1] if path else self.root_node
        self.inc_lock_ref(last)
        self.dec_lock_ref(req.last_node)
        req.last_node = last
        req.cache_protected_len = len(aligned)
        req.prefix_indices = slots

    def _committed(self, req: CacheableRequest) -> tuple[RadixKey, torch.Tensor]:
        ids = req.kv_committed_ids
        assert req.req_pool_idx is not None, f"request {req.rid} has no row of slots"
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx, : len(ids)]
        return RadixKey(ids, req.extra_key), row.to(torch.int64)

    def _free_slots(self, slots: torch.Tensor) -> None:
        if len(slots):
            self.token_to_kv_pool_allocator.free_in_order(slots)

    # ---- requests that wait ----------------------------------------------------------------

    def note_waiting(self, rid: str, arrival_number: int, node: TreeNode) -> None:
        self._look_ahead.add(rid, arrival_number, node)

    def note_scheduled(self, rid: str) -> None:
        self._stop_waiting(rid)

    def release_aborted_request(self, rid: str) -> None:
        self._stop_waiting(rid)

    def _stop_waiting(self, rid: str) -> None:
        for node in self._look_ahead.remove(rid):
            self._refresh(node)

    def _refresh(self, node: TreeNode) -> None:
        """`node` may leave earlier than thought."""
        self._device_heap.refresh(node)

    # ---- locks and eviction ----------------------------------------------------------------

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        delta = 0
        at: TreeNode | None = node
        while at is not None and at.parent is not None:
            if at.lock_ref == 0 and at.value is not None:
                self._evictable -= len(at.key)
                self._protected += len(at.key)
                delta -= len(at.key)
            at.lock_ref += 1
            at = at.parent
        return IncLockRefResult(delta=delta)

    def dec_lock_ref(self, node: TreeNode, params: Any = None) -> DecLockRefResult:
        delta = 0
        at: TreeNode | None = node
        while at is not None and at.parent is not None:
            assert at.lock_ref > 0, f"{at} unlocked twice"
            at.lock_ref -= 1
            if at.lock_ref == 0 and at.value is not None:
                self._evictable += len(at.key)
                self._protected -= len(at.key)
                delta += len(at.key)
                self._device_heap.offer(at)
            at = at.parent
        return DecLockRefResult(delta=delta)

    def evict(self, params: EvictParams) -> EvictResult:
        freed = 0
        while freed < params.num_tokens and (node := self._device_heap.pop()) is not None:
            freed += self._evict_node(node)
        return EvictResult(num_tokens_evicted=freed)

    def _evict_node(self, node: TreeNode) -> int:
        """Free the device slots of a candidate; returns how many."""
        freed = self._take_off_device(node)
        self._delete_node(node)
        return freed

    def _take_off_device(self, node: TreeNode) -> int:
        assert node.value is not None and node.lock_ref == 0
        freed = len(node.value)
        self._free_slots(node.value)
        node.set_value(None)
        self._evictable -= freed
        if node.parent is not None:
            self._device_heap.offer(node.parent)
        return freed

    def _delete_node(self, node: TreeNode) -> None:
        assert not node.children and node.value is None and node.lock_ref == 0
        self._look_ahead.on_delete(node)
        node.detach(self.page_size)

    def _is_device_candidate(self, node: TreeNode) -> bool:
        return (
            node.parent is not None
            and node.value is not None
            and node.lock_ref == 0
            and node.device_children == 0
        )

    # ---- sizes and books -------------------------------------------------------------------

    def evictable_size(self) -> int:
        return self._evictable

    def protected_size(self) -> int:
        return self._protected

    def total_size(self) -> int:
        return self._evictable + self._protected

    def nodes(self) -> Iterable[TreeNode]:
        """Every node but the root, parents before children."""
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def all_values_flatten(self) -> torch.Tensor:
        """int64: every device slot in the tree."""
        return self._values_of([node for node in self.nodes() if node.value is not None])

    def pretty_print(self) -> None:
        """Print the tree, a node a line, indented by depth."""
        depth = {self.root_node.id: -1}
        for node in self.nodes():
            assert node.parent is not None
            depth[node.id] = depth[node.parent.id] + 1
            print("  " * depth[node.id] + repr(node))  # noqa: T201
        print(f"device tokens: {self.total_size()}")  # noqa: T201

    def check_integrity(self, request_slots: Iterable[torch.Tensor] = ()) -> None:
        nodes = list(self.nodes())
        check_nodes(self.root_node, nodes, self.page_size)
        check_digest(self.root_node, nodes)
        self._look_ahead.check(nodes)
        on_device = [node for node in nodes if node.value is not None]
        locked = sum(len(node.key) for node in on_device if node.lock_ref)
        total = sum(len(node.key) for node in on_device)
        assert (self._protected, self._evictable) == (locked, total - locked), (
            f"the tree counts {self._protected} protected and {self._evictable} evictable tokens "
            f"but holds {locked} and {total - locked}"
        )
        for node in on_device:
            if self._is_device_candidate(node):
                assert node in self._device_heap, f"{node} could be evicted but is not offered"
        allocator = self.token_to_kv_pool_allocator
        books = PageBooks("device", allocator.size, self.page_size, first_page=1)
        books.own_pages("the free list", allocator.free_page_ids())
        for node in on_device:
            books.own(repr(node), node.value)
        for index, slots in enumerate(request_slots):
            books.own(f"request {index}", slots)
        books.check()
