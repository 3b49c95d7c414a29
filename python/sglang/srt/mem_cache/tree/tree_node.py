"""One node of the radix tree: some pages of tokens, and their slots on each tier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import torch

from sglang.srt.mem_cache.tree.digest import (
    DEVICE_WEIGHT,
    HOST_WEIGHT,
    PrefixHash,
    TreeDigest,
    empty_prefix,
    prefix_with,
    span_of,
    storage_weight,
)
from sglang.srt.mem_cache.tree.radix_key import ChildKey, PageHash, RadixKey

ROOT_ID: Final = 0
_COPIED_BY_SPLIT: Final = (
    "lock_ref",
    "host_ref_counter",
    "kept_on_device",
    "kept_on_host",
    "write_id",
    "backup_op",
    "storage_epoch",
    "hit_count",
    "priority",
    "last_access_time",
    "creation_time",
)


class PoolSlots:
    """Slots of one pool that a node has: on two tiers, with their locks and time of use.

    Attributes:
        value: int64 slots on the device tier (L1); None: none.
        host_value: int64 slots on the CPU, of the host tier (L2), whose bytes have landed; None:
            none.
        lock_ref: Number of requests and copies that need `value`.
        last_access_time: Time of use, by the tree's counter.
        kept_on_device, kept_on_host: Number of sessions that keep the slots (`session_hints.py`).
    """

    __slots__ = (
        "host_value",
        "kept_on_device",
        "kept_on_host",
        "last_access_time",
        "lock_ref",
        "value",
    )

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None
        self.host_value: torch.Tensor | None = None
        self.lock_ref = 0
        self.last_access_time = 0
        self.kept_on_device = 0
        self.kept_on_host = 0

    def set_value(self, value: torch.Tensor | None) -> None:
        """Put slots on the device, or take them off."""
        raise NotImplementedError

    def set_host_value(self, host_value: torch.Tensor | None) -> None:
        """Put slots on the host, or take them off."""
        raise NotImplementedError

    @property
    def is_on_any_tier(self) -> bool:
        """True if the node has slots of the pool on the device or on the host."""
        return self.value is not None or self.host_value is not None

    @property
    def is_on_device_only(self) -> bool:
        """True if the slots have no copy on the host."""
        return self.value is not None and self.host_value is None


class StateWeights(NamedTuple):
    """Weights of one kind of state in the digest of a tree, by tier."""

    device: int
    host: int


class StateSlots(PoolSlots):
    """The state of one kind at the end of a node: one slot, int64 `[1]` on the CPU, a tier.

    The pages of the node are on each tier that its state is on. Locks of the state lock the pages
    too. Setters change the digest of the node's tree.
    """

    # Not the node itself: a cycle would keep nodes that have left the tree.
    __slots__ = ("factor", "tree_digest", "weights")

    def __init__(self, weights: StateWeights) -> None:
        super().__init__()
        self.weights = weights
        self.tree_digest: TreeDigest
        """Digest of the tree that the node is in; set when it joins."""
        self.factor: int
        """Factor of the state in the digest: the hash of its prefix."""

    def set_value(self, value: torch.Tensor | None) -> None:
        change = (value is not None) - (self.value is not None)
        self._count(change * self.weights.device)
        self.value = value

    def set_host_value(self, host_value: torch.Tensor | None) -> None:
        change = (host_value is not None) - (self.host_value is not None)
        self._count(change * self.weights.host)
        self.host_value = host_value

    def leave_digest(self) -> None:
        """Leave the digest of the tree, though the node still has the slots."""
        for value, weight in zip((self.value, self.host_value), self.weights, strict=True):
            self._count(0 if value is None else -weight)
        self.tree_digest = TreeDigest()

    def _count(self, weight: int) -> None:
        self.tree_digest.change(self.factor, weight)


class TreeNode(PoolSlots):
    """A run of whole pages, reached through its parent.

    The slots are those of the primary pool, one for each token of `key`. Every node but the root
    has them on at least one tier. The parent of a node on the device is on the device too. `states`
    has the slots of further pools (`state_component.py`), which stand for the whole prefix: a split
    leaves them with the lower part.

    Setters change the digest of the node's tree too (`digest.py`).

    Threads: the scheduler's only.
    """

    __slots__ = (
        "_storage_epoch",
        "backup_op",
        "children",
        "creation_time",
        "device_children",
        "hash_value",
        "hit_count",
        "host_children",
        "host_ref_counter",
        "id",
        "is_condemned",
        "key",
        "parent",
        "prefix",
        "priority",
        "span",
        "states",
        "tree_digest",
        "wanted_by",
        "write_id",
    )

    def __init__(self, id: int, key: RadixKey, weights: Sequence[StateWeights] = ()) -> None:
        """
        Args:
            weights: For each kind of state that nodes of this tree have, its weights.
        """
        super().__init__()
        self.id = id
        self.key = key
        self.parent: TreeNode | None = None
        self.children: dict[ChildKey, TreeNode] = {}
        self.device_children = 0
        """Number of children on the device. It is kept because a popular node may have very many
        children on the host."""
        self.host_children = 0
        """Number of children on the host."""
        self.states = tuple(map(StateSlots, weights))
        self.host_ref_counter = 0
        """Number of copies and transfers that read or write host slots of this node; they also keep
        the node in the tree."""
        self.write_id: int | None = None
        """Id of the device-to-host copy under way for these pages, if any."""
        self.backup_op: object = None
        """The write of these pages to L3 under way, a `StorageOperation`; None: there is none."""
        self._storage_epoch = -1
        self.hash_value: list[PageHash] | None = None
        """Hash of each page, computed at the first use."""
        self.creation_time = 0
        self.hit_count = 0
        self.priority = 0
        self.wanted_by: list[int] = []
        """Arrival numbers of the waiting requests that will use these pages, ascending."""
        self.tree_digest: TreeDigest
        """Digest of the tree that this node is or was in. The root makes it."""
        if id == ROOT_ID:
            self.tree_digest = TreeDigest()
        self.prefix: PrefixHash | None = None
        """Hash of all tokens up to the end of this node, once it has been in a tree. It remains
        valid when the node leaves, since a node comes back only at the same place."""
        self.is_condemned = False
        """True if its pages may be wrong: see `PrefixTree.condemn`."""
        self.span = 0
        """Factor of the node in the digest; see `span_of`."""

    @property
    def evicted(self) -> bool:
        """True if its pages are not on the device."""
        return self.value is None

    @property
    def backuped(self) -> bool:
        """True if its pages are on the host."""
        return self.host_value is not None

    @property
    def backuped_from_root(self) -> bool:
        """True if its pages and all ancestors' are on the host. True for the root."""
        return all(node.host_value is not None for node in self.path_up())

    @property
    def has_unsaved_state(self) -> bool:
        """True if some state at its end is on the device only."""
        return any(state.is_on_device_only for state in self.states)

    @property
    def is_in_tree(self) -> bool:
        """True if prompts find it. False for the root, which has no pages."""
        return self.parent is not None and not self.is_condemned

    @property
    def storage_epoch(self) -> int:
        """Epoch of L3 in which these pages were last written or read; -1: never."""
        return self._storage_epoch

    @storage_epoch.setter
    def storage_epoch(self, epoch: int) -> None:
        if self.is_in_tree:
            change = storage_weight(epoch) - storage_weight(self._storage_epoch)
            self.tree_digest.change(self.span, change)
        self._storage_epoch = epoch

    def set_value(self, value: torch.Tensor | None) -> None:
        """Put the pages on the device, or take them off."""
        if self.is_in_tree and self.parent is not None:
            change = (value is not None) - (self.value is not None)
            self.parent.device_children += change
            self.tree_digest.change(self.span, change * DEVICE_WEIGHT)
        self.value = value

    def set_host_value(self, host_value: torch.Tensor | None) -> None:
        """Put the pages on the host, or take them off."""
        if self.is_in_tree and self.parent is not None:
            change = (host_value is not None) - (self.host_value is not None)
            self.parent.host_children += change
            self.tree_digest.change(self.span, change * HOST_WEIGHT)
        self.host_value = host_value

    def attach(self, parent: TreeNode, page_size: int) -> None:
        """Make this node a child of `parent`. A node that was in a tree comes back at its former
        place, so that the digest of its states has not changed."""
        self.parent, weight = parent, self._weight()
        parent.children[self.key.child_key(page_size)] = self
        parent.device_children += self.value is not None
        parent.host_children += self.host_value is not None
        begin = parent.prefix or empty_prefix(self.key.extra_key)
        if self.prefix is None:
            self.prefix = prefix_with(begin, self.key.ids)
        self.span = span_of(begin, self.prefix)
        self.tree_digest = parent.tree_digest
        self.tree_digest.change(self.span, weight)
        for state in self.states:
            state.tree_digest, state.factor = self.tree_digest, self.prefix.intdigest()

    def detach(self, page_size: int) -> None:
        """Remove this node from its parent; `parent` becomes None."""
        assert self.parent is not None, "the root stays"
        del self.parent.children[self.key.child_key(page_size)]
        self.parent.device_children -= self.value is not None
        self.parent.host_children -= self.host_value is not None
        self.tree_digest.change(self.span, -self._weight())
        self.parent = None

    def condemn(self, page_size: int) -> None:
        """Remove this node, which has no children, from its tree, but not from its path: `parent`
        stays, so that locks and pins can be undone."""
        parent = self.parent
        self.detach(page_size)
        for state in self.states:
            state.leave_digest()
        self.parent, self.is_condemned = parent, True

    def split_off_front(self, length: int, new_id: int, page_size: int) -> TreeNode:
        """Move the first `length` tokens (whole pages) into a new parent, which is returned.

        This node keeps its identity. Locks, pins and marks are copied, so that an operation that
        knows (node, length) releases both parts by walking upwards (`parts_of`).
        """
        assert 0 < length < len(self.key) and length % page_size == 0
        parent = self.parent
        assert parent is not None, "the root is not split"
        upper = TreeNode(new_id, self.key[:length], [state.weights for state in self.states])
        self.detach(page_size)
        if self.value is not None:
            upper.value, self.value = self.value[:length].clone(), self.value[length:].clone()
        if self.host_value is not None:
            upper.host_value = self.host_value[:length].clone()
            self.host_value = self.host_value[length:].clone()
        if self.hash_value is not None:
            pages = length // page_size
            upper.hash_value, self.hash_value = self.hash_value[:pages], self.hash_value[pages:]
        for mark in _COPIED_BY_SPLIT:
            setattr(upper, mark, getattr(self, mark))
        upper.wanted_by = self.wanted_by.copy()
        self.key = self.key[length:]
        upper.attach(parent, page_size)
        self.attach(upper, page_size)
        return upper

    def _weight(self) -> int:
        """Sum of the digest's weights of the tiers that this node is in."""
        weight = storage_weight(self._storage_epoch)
        if self.value is not None:
            weight += DEVICE_WEIGHT
        if self.host_value is not None:
            weight += HOST_WEIGHT
        return weight

    def protect_host(self) -> None:
        """Pin the host pages (and the node) until the matching `release_host`."""
        self.host_ref_counter += 1

    def release_host(self) -> None:
        """Undo one `protect_host`."""
        assert self.host_ref_counter > 0, f"node {self.id}: host pages released twice"
        self.host_ref_counter -= 1

    def path_up(self) -> list[TreeNode]:
        """This node and its ancestors, lowest first. Leaves out the root, which has no pages."""
        path = []
        node = self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path

    @property
    def depth(self) -> int:
        """Tokens from the root to the end of this node."""
        return sum([len(node.key.ids) for node in self.path_up()])

    def get_last_hash_value(self) -> PageHash | None:
        """Hash of the last page. The root and a node without computed hashes return None."""
        return self.hash_value[-1] if self.hash_value else None

    def page_hashes(self, page_size: int) -> list[PageHash]:
        """Hash of each page, computed at the first use, for the ancestors too."""
        missing: list[TreeNode] = []
        node: TreeNode = self
        while node.hash_value is None and node.parent is not None:
            missing.append(node)
            node = node.parent
        for unhashed in reversed(missing):
            assert unhashed.parent is not None
            prior = unhashed.parent.get_last_hash_value()
            unhashed.hash_value = unhashed.key.page_hashes(page_size, prior)
        return self.hash_value or []

    def get_prefix_hash_values(self, page_size: int) -> list[PageHash]:
        """Hashes of all pages before this node, from the root on."""
        pages: list[PageHash] = []
        for node in reversed(self.path_up()[1:]):
            pages += node.hash_value or node.page_hashes(page_size)
        return pages

    def __repr__(self) -> str:
        states = "".join(f", state {_tiers_of(state)}" for state in self.states)
        return (
            f"TreeNode({self.id}: {len(self.key)} tokens, {_tiers_of(self)}{states}, "
            f"locks {self.lock_ref}/{self.host_ref_counter})"
        )


def tokens_of(nodes: Iterable[TreeNode]) -> int:
    """The tokens of all `nodes`."""
    return sum([len(node.key.ids) for node in nodes])


def _tiers_of(slots: PoolSlots) -> str:
    tiers = [
        name
        for name, has in (("device", slots.value), ("host", slots.host_value))
        if has is not None
    ]
    return " ".join(tiers) or "nowhere"


def parts_of(node: TreeNode, length: int) -> list[tuple[TreeNode, int, int]]:
    """The nodes that cover the `length` tokens up to the end of `node`, lowest first.

    Each comes with its range of those tokens. There are several nodes if splits came between. It is
    a list, since unlocking or unpinning a node may take it out of the tree (`PrefixTree.prune`).
    """
    parts = []
    end = length
    while end > 0:
        begin = end - len(node.key)
        assert begin >= 0 and node.parent is not None, "an operation starts inside a node"
        parts.append((node, begin, end))
        node, end = node.parent, begin
    return parts
