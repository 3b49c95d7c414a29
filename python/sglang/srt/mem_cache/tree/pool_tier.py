"""The slots of one pool on one tier that a tree has: whose they are, and in which order they leave.

A tree has a tier object for its pages on the device and one for each further pool there; if there
is an L2, the host has the same. They differ in data only: the pool, the slots of a node, and
whether a node with children may lose them.

Threads: the scheduler's only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from sglang.srt.mem_cache.evict_policy import EvictionHeap, get_eviction_strategy
from sglang.srt.mem_cache.tree.kv_events import StorageMedium
from sglang.srt.mem_cache.tree.ownership_audit import OwnershipAudit
from sglang.srt.mem_cache.tree.tree_node import PoolSlots, TreeNode
from sglang.srt.messages.cache_key import tenant_of
from sglang.srt.utils.parts import NODE_ITEMS, Meter, Parts

if TYPE_CHECKING:
    from sglang.srt.mem_cache.tree.tenants import TenantUse
    from sglang.srt.utils.metrics import Counter


LEAST_LEAVING = 1024
"""Tokens: an eviction divides a node into parts that are at least so long. Whole nodes would leave
more than is needed: agents' conversations lost up to 0.034 of their tokens' hits. Shorter parts
would leave a node with another copy in as many parts as there were evictions."""


class SlotPool(Protocol):
    """A pool, or its allocator, that hands out slots in pages."""

    @property
    def size(self) -> int:
        """Slots that can be owned."""

    def available_size(self) -> int:
        """Slots without an owner."""

    def alloc(self, num: int, /) -> torch.Tensor | None:
        """Hand out int64 `[num]` slots, in whole pages; None: too few are free."""

    def free(self, slots: torch.Tensor, /) -> object:
        """Take back int64 `[n]` slots."""

    def free_page_ids(self) -> Iterable[torch.Tensor]:
        """int64: numbers of the pages without an owner, in any number of tensors. For the self
        check."""


class NodeKeeper(Protocol):
    """Keeps nodes of a tree beyond a call, or facts about them. The tree tells all keepers about
    each node that leaves, for whatever reason. Scheduler thread only."""

    def on_delete(self, node: TreeNode) -> None:
        """`node` is about to leave the tree; its parent is there, and no child is. Prompts do not
        find it any more; requests and copies may still have it locked (`TreeNode.is_condemned`)."""

    def on_reset(self, nodes: Sequence[TreeNode]) -> None:
        """`nodes`, which are all but the root, children before parents, are about to leave."""


class TierListener(Protocol):
    """Gets what happens to the pages of nodes on the device and the host."""

    def stored(self, node: TreeNode, medium: StorageMedium, session_id: str | None = None) -> None:
        """`node`, which is in the tree, is on `medium` now; `session_id`: see `BlockStored`."""

    def removed(self, node: TreeNode, medium: StorageMedium) -> None:
        """`node` is about to leave `medium`."""

    def deleted(self, node: TreeNode) -> None:
        """`node` is about to leave the tree. It may still have slots, if it is condemned."""

    def forgotten(self, nodes: Iterable[TreeNode]) -> None:
        """The tree is about to forget every node; `nodes` are all of them."""


class TieredTree(Protocol):
    """The part of `PrefixTree` that its tiers and kinds of state use; documented there."""

    page_size: int
    eviction_policy: str
    host_is_buffer: bool
    keepers: list[NodeKeeper]
    tenants: TenantUse
    tiers: list[PoolTier]
    device: DeviceTier

    @property
    def host(self) -> PoolTier: ...

    def prune(self, node: TreeNode) -> None: ...

    def split(self, node: TreeNode, length: int) -> TreeNode: ...

    def note_uses(self) -> None: ...


class PoolTier(ABC):
    """One pool on one tier. Counts are slots of the pool.

    Args:
        tree: Tree of the nodes, which keeps this tier up to date.
        state: Index in `TreeNode.states` of the pool's slots. Each stands for a whole prefix, and
            leaves by its own time of use. None: the pool has the node's pages, which leave after
            those of its children.
        free: Gives int64 slots back to the pool; None: `pool.free`.

    Attributes:
        heap: The nodes that may lose their slots, and no others.
        dependents: Tiers of pools whose slots leave with these.
        evicted: Counts the slots that leave; None: nothing does.
        held: Tokens of pages that nodes have here, by tenant (`tenant_of`).
        victims: Gets the tokens of pages that leave, by tenant; None: nobody wants them.
        medium: The tier's name for listeners.
        listeners: Get what happens to the slots.
    """

    medium: ClassVar[StorageMedium]
    listeners: Sequence[TierListener] = ()
    first_page = 0
    """Number of padding pages before the first page that may be owned."""

    def __init__(
        self,
        tree: TieredTree,
        name: str,
        pool: SlotPool,
        *,
        state: int | None = None,
        free: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        self.pool = pool
        self.free = free or pool.free
        self.dependents: list[PoolTier] = []
        self.evicted: Counter | None = None
        self.held: dict[str | None, int] = {}
        self.victims: dict[str | None, int] | None = None
        strategy = get_eviction_strategy(
            tree.eviction_policy,
            None if state is None else lambda node: node.states[state].last_access_time,
            self.kept,
        )
        self.heap = EvictionHeap(strategy, self.may_leave)
        self._tree = tree
        self.name = name
        self._state = state
        tree.tiers.append(self)
        tree.keepers.append(self)

    def slots_of(self, node: TreeNode) -> PoolSlots:
        """The slots of the pool that `node` has, on both tiers."""
        return node if self._state is None else node.states[self._state]

    @abstractmethod
    def get(self, node: TreeNode) -> torch.Tensor | None:
        """The slots that `node` has, int64; None: none."""

    @abstractmethod
    def kept(self, node: TreeNode) -> int:
        """Number of sessions that keep the slots of `node`."""

    @abstractmethod
    def may_leave(self, node: TreeNode) -> bool:
        """True if `node` has slots, which nothing uses and no slots of children need."""

    def take_off(self, node: TreeNode) -> torch.Tensor:
        """Take the unused slots of `node` and of its dependents. The caller frees the returned
        slots."""
        slots = self.get(node)
        assert slots is not None and node.parent is not None
        for tier in self.dependents:
            tier.drop(node)
        if not node.is_condemned:
            for one in self.listeners:
                one.removed(node, self.medium)
        self._clear(node)
        if self._state is None:
            self._hold(node, -slots.numel())
        self.heap.discard(node)
        self.heap.offer(node.parent)
        if self.evicted is not None and not node.is_condemned:
            self.evicted.inc(slots.numel())
        return slots

    def _offer_new(self, node: TreeNode) -> None:
        """`node` has got its slots."""
        if self._state is None:
            self._hold(node, len(node.key.ids))
            if node.parent is not None:
                self.heap.discard(node.parent)
        self.heap.offer(node)

    def _hold(self, node: TreeNode, tokens: int) -> None:
        """The pages here of the tenant of `node` are so many tokens more, or less."""
        key = node.key.extra_key
        tenant = None if key is None else tenant_of(key)
        held = self.held.get(tenant, 0) + tokens
        if held:
            self.held[tenant] = held
        else:
            del self.held[tenant]
        if self.victims is not None and tokens < 0 and not node.is_condemned:
            self.victims[tenant] = self.victims.get(tenant, 0) - tokens

    @abstractmethod
    def _clear(self, node: TreeNode) -> None:
        """Let `node`, which has slots, have none."""

    def on_delete(self, node: TreeNode) -> None:
        """See `NodeKeeper`."""
        self.heap.discard(node)

    def drop(self, node: TreeNode) -> None:
        """Take the slots of `node`, if it has any, and free them."""
        if self.get(node) is not None:
            self.free(self.take_off(node))

    def next_to_leave(self, num: int) -> TreeNode | None:
        """Take the node that loses its slots next from the heap; None: no node may lose any.

        If it has many more pages than `num` slots, only its last pages are the node, and the first
        ones a new parent, which stays.
        """
        self._tree.note_uses()
        node = self.heap.pop()
        if node is not None and self._state is None:
            page_size = self._tree.page_size
            leaving = -(-max(num, LEAST_LEAVING) // page_size) * page_size
            rest = len(node.key.ids) - leaving
            if rest >= LEAST_LEAVING:
                self._tree.split(node, rest)
        return node

    def evict(self, num: int, may_take: Callable[[TreeNode], bool] | None = None) -> int:
        """Free at least `num` slots if there are enough candidates; return the freed slots. Nodes
        that become useless leave the tree.

        Args:
            may_take: The eviction ends at the first candidate for which it is False.
        """
        before = self.pool.available_size()
        freed = 0
        while freed < num:
            if may_take is not None:
                self._tree.note_uses()
                first = self.heap.first()
                if first is not None and not may_take(first):
                    break
            if (node := self.next_to_leave(num - freed)) is None:
                break
            self.drop(node)
            self._tree.prune(node)
            freed = self.pool.available_size() - before
        return freed

    def on_reset(self, nodes: Sequence[TreeNode]) -> None:
        """See `NodeKeeper`. The caller clears the pool."""
        self.heap.clear()
        self.held.clear()

    def check(self, nodes: Sequence[TreeNode], owned: Iterable[tuple[str, torch.Tensor]]) -> Parts:
        """Assert that each page of the pool has one owner, and that the heap has each candidate.

        Args:
            nodes: All nodes of the tree but the root, and those that are condemned.
            owned: Slots that are not the tree's: owner, and int64 slots.
        """
        page_size = self._tree.page_size if self._state is None else 1
        audit = OwnershipAudit(self.name, self.pool.size, page_size, self.first_page)
        for pages in self.pool.free_page_ids():
            yield from audit.own_pages("the free list", pages)
        for owner, slots in owned:
            yield from audit.own(owner, slots)
        meter, candidates = Meter(), 0
        for node in nodes:
            yield from audit.own(node, self.get(node))
            for tier in self.dependents:
                assert self.get(node) is not None or tier.get(node) is None, (
                    f"{node} has slots ({tier.name}) without others ({self.name})"
                )
            self.heap.check(node)
            candidates += node in self.heap
            if meter.spend(NODE_ITEMS):
                yield
        yield from audit.check()
        assert candidates == len(self.heap), (
            f"{self.name}: {len(self.heap) - candidates} candidates have left the tree"
        )
        if self._state is None:
            yield from self._check_held(nodes)

    def _check_held(self, nodes: Iterable[TreeNode]) -> Parts:
        """Assert that `held` has what `nodes` have."""
        meter, held = Meter(), dict.fromkeys(self.held, 0)
        for node in nodes:
            if self.get(node) is not None:
                key = node.key.extra_key
                tenant = None if key is None else tenant_of(key)
                held[tenant] = held.get(tenant, 0) + len(node.key)
            if meter.spend(NODE_ITEMS // 2):
                yield
        assert held == self.held, f"{self.name}: the tokens of a tenant are miscounted"


class DeviceTier(PoolTier):
    """A pool on the device (L1). Locks keep slots there.

    Attributes:
        evictable: Slots in the tree that no lock protects.
        protected: Slots in the tree under a lock.
    """

    medium = StorageMedium.GPU
    first_page = 1
    evictable = 0
    protected = 0

    def get(self, node: TreeNode) -> torch.Tensor | None:
        return self.slots_of(node).value

    def kept(self, node: TreeNode) -> int:
        return self.slots_of(node).kept_on_device

    def may_leave(self, node: TreeNode) -> bool:
        at = self.slots_of(node)
        is_inner = self._state is None and node.device_children > 0
        is_free = at.lock_ref == 0 and not node.is_condemned
        return at.value is not None and is_free and not is_inner

    def put(self, node: TreeNode, slots: torch.Tensor, session_id: str | None = None) -> bool:
        """Give `slots` to `node`; they are the tree's from now on. False: the node has slots of the
        pool on the device, and the caller still owns `slots`. `session_id`: see `BlockStored`."""
        at = self.slots_of(node)
        if at.value is not None:
            return False
        at.set_value(slots)
        at.last_access_time = node.last_access_time
        for one in self.listeners:
            one.stored(node, self.medium, session_id)
        if at.lock_ref:
            self.protected += slots.numel()
        else:
            self.evictable += slots.numel()
        self._offer_new(node)
        return True

    def _clear(self, node: TreeNode) -> None:
        at = self.slots_of(node)
        assert at.value is not None and at.lock_ref == 0
        self.evictable -= at.value.numel()
        at.set_value(None)

    def lock(self, *nodes: TreeNode) -> None:
        """Keep the slots that `nodes` have or get until the matching `unlock`."""
        for node in nodes:
            at = node if self._state is None else node.states[self._state]
            if at.lock_ref == 0 and at.value is not None:
                self.evictable -= at.value.numel()
                self.protected += at.value.numel()
                if node.id in self.heap.places:
                    self.heap.discard(node)
            at.lock_ref += 1

    def unlock(self, *nodes: TreeNode) -> None:
        """Undo one `lock`."""
        for node in nodes:
            at = node if self._state is None else node.states[self._state]
            assert at.lock_ref > 0, f"{node} is unlocked twice"
            at.lock_ref -= 1
            if at.lock_ref == 0 and at.value is not None:
                self.evictable += at.value.numel()
                self.protected -= at.value.numel()
                if self._state is not None or not node.device_children:
                    self.heap.offer(node)

    def on_reset(self, nodes: Sequence[TreeNode]) -> None:
        super().on_reset(nodes)
        self.evictable = self.protected = 0

    def check(self, nodes: Sequence[TreeNode], owned: Iterable[tuple[str, torch.Tensor]]) -> Parts:
        yield from super().check(nodes, owned)
        meter, locked, total = Meter(), 0, 0
        for node in nodes:
            if (slots := self.get(node)) is not None:
                total += len(slots)
                locked += len(slots) if self.slots_of(node).lock_ref else 0
            if meter.spend(NODE_ITEMS // 4):
                yield
        assert (self.protected, self.evictable) == (locked, total - locked), (
            f"{self.name}: the tree counts {self.protected} protected and {self.evictable} "
            f"evictable slots, and holds {locked} and {total - locked}"
        )
