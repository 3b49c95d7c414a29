"""The radix tree: structure and locks.

A node holds whole pages. Sources: SGLang's RadixAttention (Zheng et al., "SGLang: Efficient
Execution of Structured Language Model Programs", 2024) for the idea; radix trees are Morrison's
(1968). The tree also walks and splits nodes that are on the host alone, so that tiers below L1
need no second copy of any of it. `pool_tier.py` has who owns which slots.

Threads: the scheduler's only.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from sglang.srt.mem_cache.evict_policy import LookAhead
from sglang.srt.mem_cache.tree.departed_prefixes import DepartedPrefixes
from sglang.srt.mem_cache.tree.host_tier import HostTier
from sglang.srt.mem_cache.tree.pool_tier import DeviceTier, NodeKeeper, PoolTier, SlotPool
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.tree.replicated_state import check_digest
from sglang.srt.mem_cache.tree.session_hints import SessionHints
from sglang.srt.mem_cache.tree.tenants import TenantUse
from sglang.srt.mem_cache.tree.tree_node import ROOT_ID, TreeNode
from sglang.srt.utils.parts import NODE_ITEMS, Meter, Parts

if TYPE_CHECKING:
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.tree.kv_events import KVEventLog
    from sglang.srt.mem_cache.tree.pool_tier import TierListener
    from sglang.srt.mem_cache.tree.state_component import StateComponent


class PrefixTree:
    """Nodes, who locks them, and the slots that they have on each tier. Counts are tokens.

    Args:
        page_size: Tokens of a page.
        eviction_policy: Name of the order in which nodes leave a tier.
        components: Kinds of state that nodes have beside pages.
        events: Gets what happens to pages on the device and the host; None: nobody wants that.
        sessions: Hints of sessions, without tiers yet; None: there are none.
        tenants: Counts the use by tenants, without tiers yet; None: nobody reads it.

    Attributes:
        keepers: Told about each node that leaves.
        tiers: All pools on all tiers: the pages on the device first.
        device: The pages on the device (L1).
        host: The pages on the host (L2), if there is one.
        departed: The prefixes that have left all tiers.
        events: The log of the arguments.
        host_is_buffer: True if pages only pass through L2; see `HostTier.unneeded`.

    Raises:
        ValueError: The policy is unknown, or a component does not fit the tree.
    """

    host: HostTier
    host_is_buffer = False

    def __init__(
        self,
        allocator: BaseTokenToKVPoolAllocator,
        page_size: int,
        eviction_policy: str,
        components: Sequence[StateComponent] = (),
        events: KVEventLog | None = None,
        sessions: SessionHints | None = None,
        tenants: TenantUse | None = None,
    ) -> None:
        self.page_size = page_size
        self.allocator = allocator
        self._no_slots = torch.empty(0, dtype=torch.int64, device=allocator.device)
        self.look_ahead = LookAhead()
        self.sessions = SessionHints() if sessions is None else sessions
        self.eviction_policy = eviction_policy
        self._walks: WeakKeyDictionary[RadixKey, list[TreeNode]] = WeakKeyDictionary()
        """Results of `walk` for keys that are still in use. Forgotten whenever a node joins the
        tree, leaves it or is split; tiers do not matter."""
        self._touched: dict[int, list[TreeNode]] = {}
        """Paths that were used since the last `note_uses`, by the id of their last node."""
        self._listeners: list[TierListener] = []
        self.keepers: list[NodeKeeper] = []
        self.tiers: list[PoolTier] = []
        self.tenants = TenantUse() if tenants is None else tenants
        self.device = DeviceTier(
            self, "pages on the device", allocator, free=allocator.free_in_order
        )
        self.device.listeners = self._listeners
        self.tenants.add_tier("device", self.device)
        self.components = tuple(components)
        self.components_from_storage = tuple(one for one in components if not one.pages_alone)
        """Those whose states reads from L3 bring."""
        for index, component in enumerate(self.components):
            component.bind(self, index)
        self.departed = DepartedPrefixes(page_size)
        self.keepers += [self.look_ahead, self.sessions, self.departed]
        self.root = self._new_node(ROOT_ID, RadixKey([]))
        states = [component.device.pool.size for component in self.components]
        self.sessions.add_tier("device", allocator.size, states)
        self.reset()
        self.events = events
        if events is not None:
            self.add_listener(events)

    def add_host(
        self, pool: SlotPool, pools: Mapping[str, SlotPool], *, is_buffer: bool = False
    ) -> None:
        """Let nodes have slots on the host too.

        Args:
            pool: The host pool of pages.
            pools: Host pools of the components' states, by name.
            is_buffer: Pages only pass through it.
        """
        self.host_is_buffer = is_buffer
        self.host = HostTier(self, "pages on the host", pool)
        self.host.listeners = self._listeners
        self.tenants.add_tier("host", self.host)
        for component in self.components:
            component.add_host(pools[component.pool.spec.name])
        states = [component.host.pool.size for component in self.components]
        self.sessions.add_tier("host", pool.size, states)

    def add_listener(self, listener: TierListener) -> None:
        """Tell `listener` what happens to pages on the device and the host, from now on."""
        self._listeners.append(listener)

    def reset(self) -> None:
        """Forget every node. The caller clears the pools."""
        for one in self._listeners:
            one.forgotten(self.nodes())
        leaving = list(self.nodes())[::-1]
        for keeper in self.keepers:
            keeper.on_reset(leaving)
        self.root = self._new_node(ROOT_ID, RadixKey([]))
        self._walks.clear()
        self._touched.clear()
        self._ids = itertools.count(ROOT_ID + 1)
        self._condemned: dict[int, TreeNode] = {}
        """Nodes out of the tree whose slots are still locked or pinned, by id."""
        self._clock = 0

    # ---- structure -------------------------------------------------------------------------

    def walk(self, key: RadixKey) -> list[TreeNode]:
        """Nodes that cover the longest known front of `key`, root's child first.

        A node that the key leaves in its middle, at a page boundary, is split there. Every node on
        the way is touched. A second walk along the same `key` compares no tokens, unless the tree
        has changed.
        """
        self._clock += 1
        path = self._walks.get(key)
        if path is None:
            path = self._walks[key] = self._descend(key)
        for node in path:
            node.last_access_time = self._clock
        if path:
            self._touched[path[-1].id] = path
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
                child = self.split(child, common)
            path.append(child)
            done += common
            node = child
        return path

    def split(self, node: TreeNode, length: int) -> TreeNode:
        """Move the first `length` tokens of `node` into a new parent, which is returned; see
        `TreeNode.split_off_front`."""
        self._walks.clear()
        return node.split_off_front(length, next(self._ids), self.page_size)

    def usable(self, path: list[TreeNode], key_len: int) -> list[TreeNode]:
        """The front of `path` that a request with a key of `key_len` tokens can use, if no other
        server gives its states."""
        for component in self.components:
            path = path[: component.usable(path, key_len)]
        return path

    def longest_match(self, key_len: int) -> int:
        """Most tokens of a key of `key_len` that a match may have."""
        return min((one.longest_match(key_len) for one in self.components), default=key_len)

    def path_to(self, node: TreeNode) -> list[TreeNode]:
        """From root's child down to `node`; every node on the way is touched."""
        self._clock += 1
        path = node.path_up()[::-1]
        for at in path:
            at.last_access_time = self._clock
        if path:
            self._touched[path[-1].id] = path
        return path

    def note_uses(self) -> None:
        """Update the places of nodes that were used since the last call. Each tick calls it, so
        that no eviction has to do so for many nodes."""
        if self._touched:
            for path in self._touched.values():
                # If a waiting request wants the nodes, their order does not depend on their use.
                if not path[-1].wanted_by:
                    self.refresh(path)
            self._touched.clear()

    def insert(
        self, key: RadixKey, value: torch.Tensor, priority: int, session_id: str | None = None
    ) -> tuple[int, list[TreeNode]]:
        """Put `key` (whole pages) with its device slots (int64, one a token) into the tree, for a
        request of the session `session_id`.

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
                self.device.put(node, value[done : done + length].clone(), session_id)
            node.priority = max(node.priority, priority)
            done += length
        if done < len(key):
            leaf = self.add_leaf(key[done:], path[-1] if path else self.root)
            leaf.priority = priority
            self.device.put(leaf, value[done : len(key)].clone(), session_id)
            path.append(leaf)
        return known, path

    def add_leaf(self, key: RadixKey, parent: TreeNode) -> TreeNode:
        """A new node below `parent`, on no tier yet."""
        node = self._new_node(next(self._ids), key)
        node.creation_time = node.last_access_time = self._clock
        self._walks.clear()
        node.attach(parent, self.page_size)
        return node

    def prune(self, node: TreeNode) -> None:
        """Delete `node` if it is useless, and then what it leaves useless above. Call it when
        `node` may have become useless: no child, lock or pin needs it, and no prompt can end
        there."""
        while (parent := node.parent) is not None:
            if node.is_condemned:
                self._free_condemned(node)
                node = parent
                continue
            if node.children or node.lock_ref or node.host_ref_counter:
                return
            has_pages = node.value is not None or node.host_value is not None
            if has_pages and self._is_of_use(node):
                return
            for tier in self.tiers:
                tier.drop(node)
            self._tell_leaving(node)
            node.detach(self.page_size)
            node = parent

    def _tell_leaving(self, node: TreeNode) -> None:
        """Tell all keepers and listeners that `node` is about to leave."""
        self._walks.clear()
        for keeper in self.keepers:
            keeper.on_delete(node)
        for one in self._listeners:
            one.deleted(node)

    def condemn(self, node: TreeNode, begin: int) -> int:
        """Take the pages of `node` from token `begin` on, and all nodes below it, out of the tree,
        because their contents may be wrong. Returns the number of tokens of all tiers.

        No prompt finds them any more, and no copy of them is kept. Their slots are freed when
        nothing has them locked or pinned; until then they keep their path. A request that has them
        locked must not insert.
        """
        if begin:
            self.split(node, begin)
        above = node.parent
        assert above is not None, "the root has no pages"
        nodes = [node]
        for at in nodes:
            nodes.extend(at.children.values())
        for at in reversed(nodes):
            self._tell_leaving(at)
            at.condemn(self.page_size)
            self._condemned[at.id] = at
        for at in reversed(nodes):
            self.prune(at)
        for tier in self.tiers:
            tier.heap.offer(above)
        self.prune(above)
        return sum(len(at.key) for at in nodes)

    def _free_condemned(self, node: TreeNode) -> None:
        """Free the slots of a condemned node unless something needs them. A pin on the host keeps
        none on the device, where no eviction finds them."""
        for tier in self.tiers:
            if isinstance(tier, DeviceTier) and not tier.slots_of(node).lock_ref:
                tier.drop(node)
        if node.lock_ref or node.host_ref_counter:
            return
        for tier in self.tiers:
            tier.drop(node)
        del self._condemned[node.id]
        node.parent = None

    def can_end(self, node: TreeNode) -> bool:
        """True if a prefix that ends with `node`, whose pages are there, can be used."""
        return all(component.can_end(node) for component in self.components)

    def _is_of_use(self, node: TreeNode) -> bool:
        return all(component.is_of_use(node) for component in self.components)

    def nodes(self) -> Iterable[TreeNode]:
        """Every node but the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def refresh(self, nodes: Iterable[TreeNode]) -> None:
        """Update the places of `nodes` in the order of eviction."""
        for tier in self.tiers:
            heap = tier.heap
            for node in nodes:
                if node.id in heap.places:
                    heap.refresh(node)

    def _new_node(self, node_id: int, key: RadixKey) -> TreeNode:
        return TreeNode(node_id, key, [component.weights for component in self.components])

    def values_of(self, nodes: list[TreeNode]) -> torch.Tensor:
        """int64: the device slots of `nodes` that are on the device, in their order."""
        values = [node.value for node in nodes if node.value is not None]
        if not values:
            return self._no_slots
        return torch.cat(values) if len(values) > 1 else values[0]

    # ---- locks -----------------------------------------------------------------------------

    def lock(self, node: TreeNode) -> int:
        """Keep `node` and its ancestors on the device. Returns the change of evictable tokens."""
        before = self.device.evictable
        self.device.lock(*node.path_up())
        return self.device.evictable - before

    def unlock(self, node: TreeNode) -> int:
        """Undo one `lock`. Returns the change of evictable tokens."""
        before = self.device.evictable
        self.device.unlock(*node.path_up())
        delta = self.device.evictable - before
        if self.components or node.is_condemned:
            self.prune(node)  # A node with pages is useless only if it lacks a state.
        return delta

    # ---- self check ------------------------------------------------------------------------

    def check(self, owned: Iterable[tuple[PoolTier, str, torch.Tensor]]) -> Parts:
        """Assert structure, locks, marks, and that each page of each pool has one owner, in parts.
        Nothing may change between two parts.

        Args:
            owned: Slots that are not the tree's: the tier, the owner, and int64 slots.
        """
        nodes, meter = [], Meter()
        for node in self.nodes():
            nodes.append(node)
            if meter.spend(NODE_ITEMS // 4):
                yield
        yield from _check_nodes(self.root, nodes, self.page_size)
        yield from check_digest(self.root, nodes)
        yield from self.look_ahead.check(nodes)
        yield from self.sessions.check(nodes)
        for key, path in list(self._walks.items()):
            assert self._descend(key) == path, f"another walk along {key} is remembered"
            yield
        by_tier: dict[PoolTier, list[tuple[str, torch.Tensor]]] = {tier: [] for tier in self.tiers}
        for tier, owner, slots in owned:
            by_tier[tier].append((owner, slots))
        for tier, others in by_tier.items():
            yield from tier.check([*nodes, *self._condemned.values()], others)
        for node in self._condemned.values():
            assert node.lock_ref or node.host_ref_counter, f"{node} is condemned and of no use"
        for node in nodes:
            in_use = node.children or node.lock_ref or node.host_ref_counter
            assert in_use or self._is_of_use(node), f"{node} is useless"
            if meter.spend(NODE_ITEMS // 4):
                yield


def _check_nodes(root: TreeNode, nodes: Sequence[TreeNode], page_size: int) -> Parts:
    """Assert the invariants of each node of a tree, and of its parent and children, in parts."""
    meter = Meter()
    device_children: Counter[int] = Counter()
    host_children: Counter[int] = Counter()
    for node in nodes:
        parent = node.parent
        assert parent is not None, f"{node} has no parent"
        assert parent.children[node.key.child_key(page_size)] is node, f"{node}: wrong key"
        assert len(node.key) and len(node.key) % page_size == 0, f"{node}: not whole pages"
        assert node.value is not None or node.backuped, f"{node} is on no tier"
        for value in (node.value, node.host_value):
            assert value is None or len(value) == len(node.key), f"{node}: slots and tokens differ"
        if node.value is not None:
            assert parent is root or parent.value is not None, f"{node}: parent off the device"
        if parent is not root:
            assert parent.lock_ref >= node.lock_ref, f"{node} is locked more than its parent"
        device_children[parent.id] += node.value is not None
        host_children[parent.id] += node.backuped
        if meter.spend(NODE_ITEMS // 2):
            yield
    for node in itertools.chain((root,), nodes):
        counted = (node.device_children, node.host_children)
        assert counted == (device_children[node.id], host_children[node.id]), (
            f"{node} counts {counted} children on device and host"
        )
        if meter.spend(NODE_ITEMS // 4):
            yield
