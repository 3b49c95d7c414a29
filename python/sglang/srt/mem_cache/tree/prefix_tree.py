"""The radix tree: structure, locks, and the books of the device tier (L1).

A node holds whole pages. Sources: SGLang's RadixAttention (Zheng et al., "SGLang: Efficient
Execution of Structured Language Model Programs", 2024) for the idea; radix trees are Morrison's
(1968). The tree also walks and splits nodes that are on the host alone, so that tiers below L1
need no second copy of any of it. What else a node owns is the business of components.

Threads: the scheduler's only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from sglang.srt.mem_cache.tree.digest import check_digest
from sglang.srt.mem_cache.tree.evict_policy import EvictionHeap, get_eviction_strategy
from sglang.srt.mem_cache.tree.integrity import PageBooks, check_nodes
from sglang.srt.mem_cache.tree.look_ahead import LookAhead
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.tree.tree_node import ROOT_ID, TreeNode

if TYPE_CHECKING:
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.tree.component import TreeComponent
    from sglang.srt.mem_cache.tree.kv_event_log import KVEventLog


class PrefixTree:
    """Nodes, who locks them, and which device slots they hold. Counts are tokens.

    Args:
        allocator: Takes device slots back.
        page_size: Tokens of a page.
        eviction_policy: Name of the order in which nodes leave a tier.
        components: Kinds of state that nodes own beside pages.
        events: Gets what happens to pages on the device; None: nobody wants that.

    Raises:
        ValueError: The policy is unknown, or a component does not fit the tree.
    """

    def __init__(
        self,
        allocator: BaseTokenToKVPoolAllocator,
        page_size: int,
        eviction_policy: str,
        components: Sequence[TreeComponent] = (),
        events: KVEventLog | None = None,
    ) -> None:
        self.events: KVEventLog | None = None
        self.page_size = page_size
        self.allocator = allocator
        self.look_ahead = LookAhead()
        self._strategy = get_eviction_strategy(eviction_policy)
        self._state_strategy = get_eviction_strategy(eviction_policy, of_states=True)
        self._heaps: list[EvictionHeap] = []
        self.device_heap = self.add_heap(_may_leave_device)
        self._forget_below: Callable[[TreeNode], None] | None = None
        self._walks: WeakKeyDictionary[RadixKey, list[TreeNode]] = WeakKeyDictionary()
        """What `walk` gave for keys that are still in use. Forgotten whenever a node joins the
        tree, leaves it or is split; tiers do not matter."""
        self.components = tuple(components)
        for component in self.components:
            component.bind(self)
        self.reset()
        self.events = events

    def reset(self) -> None:
        """Forget every node. The caller clears the pools."""
        self.root = TreeNode(ROOT_ID, RadixKey([]))
        self._walks.clear()
        self._next_node_id = ROOT_ID + 1
        self._clock = 0
        self.evictable = 0
        self.protected = 0
        self.look_ahead.clear()
        for heap in self._heaps:
            heap.clear()
        for component in self.components:
            component.reset()
        if self.events is not None:
            self.events.cleared()

    def add_heap(
        self, is_candidate: Callable[[TreeNode], bool], *, of_states: bool = False
    ) -> EvictionHeap:
        """An eviction order over the nodes for which `is_candidate` holds, kept up to date; of
        their pages, or of their states."""
        strategy = self._state_strategy if of_states else self._strategy
        heap = EvictionHeap(strategy, is_candidate)
        self._heaps.append(heap)
        return heap

    def watch_leaving(self, forget: Callable[[TreeNode], None]) -> None:
        """`forget` frees what lower tiers have of a node that is about to leave the tree."""
        self._forget_below = forget

    # ---- structure -------------------------------------------------------------------------

    def walk(self, key: RadixKey) -> list[TreeNode]:
        """Nodes that cover the longest known front of `key`, root's child first.

        Where the key leaves a node in its middle (at a page boundary), the node is split. Every
        node on the way is touched. A second walk along the same `key` compares no tokens, unless
        the nodes of the tree are others by then.
        """
        self._clock += 1
        path = self._walks.get(key)
        if path is None:
            path = self._walks[key] = self._descend(key)
        for node in path:
            node.last_access_time = self._clock
        return path.copy()

    def _descend(self, key: RadixKey) -> list[TreeNode]:
        node, done, page_size = self.root, 0, self.page_size
        path: list[TreeNode] = []
        while done + page_size <= len(key.ids):
            child = node.children.get(key.child_key(page_size, done))
            if child is None:
                break
            common = child.key.match(key, page_size, done)
            if common < len(child.key.ids):
                self._walks.clear()
                child = child.split_off_front(common, self._take_id(), page_size)
            path.append(child)
            done += common
            node = child
        return path

    def usable(self, path: list[TreeNode], key_len: int) -> list[TreeNode]:
        """The front of `path` that a request with a key of `key_len` tokens can use."""
        for component in self.components:
            path = path[: component.usable(path, key_len)]
        return path

    def path_to(self, node: TreeNode) -> list[TreeNode]:
        """From root's child down to `node`; every node on the way is touched."""
        self._clock += 1
        path: list[TreeNode] = []
        while node.parent is not None:
            node.last_access_time = self._clock
            path.append(node)
            node = node.parent
        return path[::-1]

    def insert(
        self, key: RadixKey, value: torch.Tensor, priority: int
    ) -> tuple[int, list[TreeNode]]:
        """Put `key` (whole pages) with its device slots (int64, as many) into the tree.

        Returns:
            The tokens at the front that were on the device before, whose slots stay the caller's;
            and the path of the whole key.
        """
        path = self.walk(key)
        known = done = 0
        for node in path:
            length = len(node.key)
            if node.value is not None:
                known += length
            else:
                self.put_on_device(node, value[done : done + length].clone())
            node.priority = max(node.priority, priority)
            done += length
        if done < len(key):
            leaf = self.add_leaf(key[done:], path[-1] if path else self.root)
            leaf.priority = priority
            self.put_on_device(leaf, value[done : len(key)].clone())
            path.append(leaf)
        return known, path

    def add_leaf(self, key: RadixKey, parent: TreeNode) -> TreeNode:
        """A new node below `parent`, on no tier yet."""
        node = TreeNode(self._take_id(), key)
        node.creation_time = node.last_access_time = self._clock
        self._walks.clear()
        node.attach(parent, self.page_size)
        return node

    def delete(self, node: TreeNode) -> None:
        """Take a leaf that nothing holds out of the tree."""
        assert not node.children and node.value is None and node.lock_ref == 0
        self.look_ahead.on_delete(node)
        self._walks.clear()
        for heap in self._heaps:
            heap.discard(node)
        node.detach(self.page_size)

    def prune(self, node: TreeNode) -> int:
        """Delete `node` if it is useless, and then what it leaves useless above; the device
        tokens that this frees. Call it when `node` may have become useless."""
        freed = 0
        while self._is_useless(node):
            parent = node.parent
            assert parent is not None
            if node.value is not None:
                value = self.take_off_device(node)
                self.free_slots(value)
                freed += len(value)
            if self._forget_below is not None:
                self._forget_below(node)
            self.delete(node)
            node = parent
        return freed

    def _is_useless(self, node: TreeNode) -> bool:
        if node.parent is None or node.children or node.lock_ref or node.host_ref_counter:
            return False
        return any(not component.needs(node) for component in self.components)

    def nodes(self) -> Iterable[TreeNode]:
        """Every node but the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def refresh(self, nodes: Iterable[TreeNode]) -> None:
        """`nodes` may leave their tiers earlier than thought."""
        for node in nodes:
            for heap in self._heaps:
                heap.refresh(node)

    def _take_id(self) -> int:
        node_id = self._next_node_id
        self._next_node_id += 1
        return node_id

    # ---- the device tier -------------------------------------------------------------------

    def put_on_device(self, node: TreeNode, slots: torch.Tensor) -> None:
        """`node` gets device slots, int64 `[len(node.key)]`, which are the tree's from now on."""
        node.set_value(slots)
        if self.events is not None:
            self.events.stored(node)
        if node.lock_ref:
            self.protected += len(slots)
        else:
            self.evictable += len(slots)
        self.device_heap.offer(node)

    def take_off_device(self, node: TreeNode) -> torch.Tensor:
        """`node`, which nothing locks, loses its device slots; they are the caller's to free."""
        value = node.value
        assert value is not None and node.lock_ref == 0 and node.parent is not None
        for component in self.components:
            component.on_leave_device(node)
        if self.events is not None:
            self.events.removed(node)
        node.set_value(None)
        self.evictable -= len(value)
        self.device_heap.offer(node.parent)
        return value

    def free_slots(self, slots: torch.Tensor) -> None:
        """Give device slots (int64) back to the allocator."""
        if len(slots):
            self.allocator.free_in_order(slots)

    def values_of(self, nodes: list[TreeNode]) -> torch.Tensor:
        """int64: the device slots of `nodes` that are on the device, in their order."""
        values = [node.value for node in nodes if node.value is not None]
        if not values:
            return torch.empty(0, dtype=torch.int64, device=self.allocator.device)
        return torch.cat(values) if len(values) > 1 else values[0]

    # ---- locks -----------------------------------------------------------------------------

    def lock(self, node: TreeNode) -> int:
        """Keep `node` and its ancestors on the device; the change of what can be evicted."""
        delta = 0
        at: TreeNode | None = node
        while at is not None and at.parent is not None:
            if at.lock_ref == 0 and at.value is not None:
                delta -= len(at.key)
            at.lock_ref += 1
            at = at.parent
        self.evictable += delta
        self.protected -= delta
        return delta

    def unlock(self, node: TreeNode) -> int:
        """Undo one `lock`; the change of what can be evicted."""
        delta = 0
        at: TreeNode | None = node
        while at is not None and at.parent is not None:
            assert at.lock_ref > 0, f"{at} unlocked twice"
            at.lock_ref -= 1
            if at.lock_ref == 0 and at.value is not None:
                delta += len(at.key)
                self.device_heap.offer(at)
            at = at.parent
        self.evictable += delta
        self.protected -= delta
        if self.components:
            self.prune(node)
        return delta

    # ---- books -----------------------------------------------------------------------------

    def check(
        self,
        request_slots: Iterable[torch.Tensor],
        request_states: Iterable[torch.Tensor] = (),
    ) -> None:
        """Assert structure, locks, marks, and that each device page has one owner.

        Args:
            request_slots: For each request the int64 slots that it owns itself.
            request_states: For each request the int64 slots of states that it owns.
        """
        nodes = list(self.nodes())
        check_nodes(self.root, nodes, self.page_size)
        check_digest(self.root, nodes)
        self.look_ahead.check(nodes)
        for heap in self._heaps:
            heap.check(nodes)
        for key, path in list(self._walks.items()):
            assert self._descend(key) == path, f"another walk along {key} is remembered"
        on_device = [node for node in nodes if node.value is not None]
        locked = sum(len(node.key) for node in on_device if node.lock_ref)
        total = sum(len(node.key) for node in on_device)
        assert (self.protected, self.evictable) == (locked, total - locked), (
            f"the tree counts {self.protected} protected and {self.evictable} evictable tokens "
            f"but holds {locked} and {total - locked}"
        )
        for node in on_device:
            if _may_leave_device(node):
                assert node in self.device_heap, f"{node} could be evicted but is not offered"
        books = PageBooks("device", self.allocator.size, self.page_size, first_page=1)
        books.own_pages("the free list", self.allocator.free_page_ids())
        for node in on_device:
            books.own(repr(node), node.value)
        for index, slots in enumerate(request_slots):
            books.own(f"request {index}", slots)
        books.check()
        for component in self.components:
            component.check(nodes, request_states)


def _may_leave_device(node: TreeNode) -> bool:
    return (
        node.parent is not None
        and node.value is not None
        and node.lock_ref == 0
        and node.device_children == 0
    )
