"""State that must be equal on all ranks: its digest, and a description of the first difference.

Threads: the scheduler's only.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

import msgspec

from sglang.srt.distributed.rank_group import RankGroup, gather_texts
from sglang.srt.mem_cache.tree.digest import (
    DEVICE_WEIGHT,
    HOST_WEIGHT,
    MODULUS,
    TreeDigest,
    empty_prefix,
    span_of,
    storage_weight,
)
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.srt.utils.parts import NODE_ITEMS, Meter, Parts, slices

_COUNT_WEIGHT: Final = 0x02F1BBCDCBFA53E0

_MAX_ENTRIES: Final = 20_000
"""Most entries of a description, which ranks with different states exchange: a few megabytes."""
_MAX_ENTRY_CHARS: Final = 120
_MAX_DIFFERENCE_BYTES: Final = 512


class ReplicatedState(Protocol):
    """Data that must be equal on all ranks."""

    @property
    def digest(self) -> int:
        """Number of at most 62 bits, not negative; equal states have equal digests."""

    def describe(self) -> Mapping[str, str]:
        """Entries of the digest, by names that are the same on all ranks."""


@dataclasses.dataclass(slots=True)
class CacheState:
    """`ReplicatedState` of a prefix cache and of the queues above it."""

    root: Callable[[], TreeNode]
    counts: dict[str, Callable[[], int]]
    """Functions that give numbers which must be equal, each below 2**61."""
    queues: ReplicatedState | None = None
    """Queues of the scheduler, once there is one."""

    @property
    def digest(self) -> int:
        """See `ReplicatedState`."""
        total = self.root().tree_digest.value + (self.queues.digest if self.queues else 0)
        for number, count in enumerate(self.counts.values(), start=1):
            total += count() * (_COUNT_WEIGHT + number * DEVICE_WEIGHT)
        return total % MODULUS

    def describe(self) -> Mapping[str, str]:
        """See `ReplicatedState`; of large trees the first `_MAX_ENTRIES` entries."""
        entries = {name: str(count()) for name, count in self.counts.items()}
        if self.queues is not None:
            entries.update(self.queues.describe())
        stack = [(child, 0) for child in reversed(self.root().children.values())]
        while stack and len(entries) < _MAX_ENTRIES:
            node, begin = stack.pop()
            end = begin + len(node.key)
            assert node.prefix is not None, "it is in the tree"
            entries[f"node {node.prefix.hexdigest()}"] = _state_of(node, begin, end)
            stack += [(child, end) for child in reversed(node.children.values())]
        first = itertools.islice(entries.items(), _MAX_ENTRIES)
        return {name[:_MAX_ENTRY_CHARS]: text[:_MAX_ENTRY_CHARS] for name, text in first}


def _state_of(node: TreeNode, begin: int, end: int) -> str:
    tiers = [name for name, has in (("L1", not node.evicted), ("L2", node.backuped)) if has]
    tiers += [f"L3 in epoch {node.storage_epoch}"] * (node.storage_epoch >= 0)
    for state in node.states:
        tiers += ["a state in L1"] * (state.value is not None)
        tiers += ["a state in L2"] * (state.host_value is not None)
    first = ", ".join(map(str, node.key.ids[:4]))
    return f"tokens {begin} to {end} ({first}, ...): {' and '.join(tiers)}"


def check_digest(root: TreeNode, nodes: Iterable[TreeNode]) -> Parts:
    """Assert that the digest fits the tree, and that the hash and span of each node are right, in
    parts.

    Args:
        nodes: All other nodes, parents before children.
    """
    anew, meter = TreeDigest(), Meter()
    for node in nodes:
        assert node.parent is not None and node.prefix is not None
        begin = node.parent.prefix or empty_prefix(node.key.extra_key)
        end = begin.copy()
        for part in slices(len(node.key)):
            end.update(node.key.ids[part].data)
            if meter.spend(len(node.key.ids[part])):
                yield
        kept_hash = node.prefix.digest(), node.span
        assert kept_hash == (end.digest(), span_of(begin, end)), f"{node}: other tokens"
        weight = DEVICE_WEIGHT * (not node.evicted) + HOST_WEIGHT * node.backuped
        anew.change(node.span, weight + storage_weight(node.storage_epoch))
        for state in node.states:
            weight = state.weights.device * (state.value is not None)
            weight += state.weights.host * (state.host_value is not None)
            anew.change(end.intdigest(), weight)
        if meter.spend(NODE_ITEMS // 2):
            yield
    kept = root.tree_digest.value
    assert kept == anew.value, f"the digest of the tree is {kept:x}, its nodes make {anew.value:x}"


def explain_difference(group: RankGroup, state: ReplicatedState) -> str:
    """Name the ranks that differ from rank 0, each with its first different entry. A collective.

    Rank 0 broadcasts its description, a few megabytes; each rank returns one line.
    """
    mine = state.describe()
    raw = group.broadcast(msgspec.msgpack.encode(mine) if group.rank == 0 else None)
    theirs = msgspec.msgpack.decode(raw, type=dict[str, str])
    differences = gather_texts(group, _first_difference(mine, theirs), _MAX_DIFFERENCE_BYTES)
    lines = [f"rank {rank} has {text}" for rank, text in enumerate(differences) if text]
    return "; ".join(lines) or f"the first {len(mine)} entries are equal on all ranks"


def _first_difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    for name in {**theirs, **mine}:
        if mine.get(name) != theirs.get(name):
            return f"{name}: {mine.get(name, 'nothing')}, rank 0 {theirs.get(name, 'nothing')}"
    return ""
