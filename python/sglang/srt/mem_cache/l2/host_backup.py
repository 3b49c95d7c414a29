"""Flow from L1 to L2: copies of pages and states to the host.

Threads: the scheduler's only.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from sglang.srt.mem_cache.l2.owed_copies import OwedCopies
from sglang.srt.mem_cache.tree.tenants import Evictor
from sglang.srt.mem_cache.tree.tree_node import TreeNode, parts_of, tokens_of
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from sglang.srt.mem_cache.l2.cache_controller import HiCacheController
    from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
    from sglang.srt.mem_cache.tree.pool_tier import PoolTier
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree
    from sglang.srt.mem_cache.tree.state_component import StateComponent
    from sglang.srt.messages.cache_report import CacheReport

logger = logging.getLogger(__name__)

WRITE_POLICIES: Final = ("write_through", "write_through_selective", "write_back")
_SELECTIVE_HITS: Final = 2


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """A copy between L1 and L2 of the `length` tokens up to the end of `node`. After splits several
    nodes have them: see `parts_of`."""

    operation_id: int
    node: TreeNode
    length: int
    host_indices: torch.Tensor
    """Host slots of the pages; empty if only states are copied."""
    host_states: Mapping[StateComponent, torch.Tensor]
    """Host slots of the states of `node` that the copy includes, by kind."""
    report: CacheReport | None = None
    """Gets the time of the copy."""


class HostBackup:
    """Copies of one tree's pages to the host.

    - A node's host pages are set when their bytes have landed, never before.
    - While a copy runs, its device pages are locked and the operation owns its host pages.
    - States of a node go in the same copy as its pages, or alone if the pages are on the host
      already.

    Args:
        write_policy: One of `WRITE_POLICIES`.
        on_landed: Called with nodes, parents first, whose pages have reached the host.

    Attributes:
        POLICIES: Write policies that this one can have.
        write_policy: The write policy; an operator may change it.
        writing: The copies under way, by operation. Read only.
        owed: Copies that wait for room. Read only.
    """

    POLICIES: ClassVar[tuple[str, ...]] = WRITE_POLICIES

    def __init__(
        self,
        tree: PrefixTree,
        controller: HiCacheController,
        *,
        write_policy: str,
        metrics: HiCacheMetrics,
        on_landed: Callable[[list[TreeNode]], None],
    ) -> None:
        self.write_policy = write_policy
        self.writing: dict[int, DeviceCopy] = {}
        self.owed = OwedCopies(tree)
        self.on_landed = on_landed
        self._tree = tree
        self._controller = controller
        self._metrics = metrics
        self._log = RateLimitedLogger(logger)

    def owned_slots(self) -> Iterator[tuple[PoolTier, str, torch.Tensor]]:
        """Slots that copies own and no node has: the tier, the owner, and int64 slots."""
        for operation_id, copy in self.writing.items():
            owner = f"write {operation_id}"
            yield self._tree.host, owner, copy.host_indices
            for component, slots in copy.host_states.items():
                yield component.host, owner, slots

    def on_insert(self, path: list[TreeNode]) -> None:
        """The nodes of `path`, root's child first, were put on the device or used again."""
        if self.write_policy == "write_back":
            return
        wanted = 1 if self.write_policy == "write_through" else _SELECTIVE_HITS
        self._write_path(
            path,
            lambda node: wanted == 1 or node.hit_count >= wanted or node.kept_on_host > 0,
        )

    def is_saved(self, node: TreeNode) -> bool:
        """True if a tier below L1 has the pages of `node`."""
        return node.backuped

    def resume(self) -> None:
        """Begin copies that wait for room, the newest first: where it finds none, older ones find
        none either. Call it when room may have come."""
        self.owed.resume(
            self._first_due, lambda node: node if self._begin(node) else None, newest_first=True
        )

    def _first_due(self, node: TreeNode) -> TreeNode | None:
        """See `OwedCopies.resume`."""
        first = node if self._lacks_state_alone(node) else None
        while node.parent is not None and not self._is_on_its_way(node):
            first, node = node, node.parent
        return first

    def _is_on_its_way(self, node: TreeNode) -> bool:
        return self.is_saved(node) or node.write_id is not None

    def back_up(self, path: list[TreeNode]) -> int:
        """Queue copies of what L2 lacks of `path`, root's child first, whatever the write policy.
        Returns the tokens that L2 has no room for yet."""
        written = self._write_path(path, lambda node: True)
        return tokens_of(path[written:])

    def _write_path(self, path: list[TreeNode], is_due: Callable[[TreeNode], bool]) -> int:
        """Queue copies of the nodes of `path` that are due, top down, up to the first node that is
        not written: a written node has written ancestors. The rest of those that are due is owed.
        Returns the number of nodes before it."""
        for nth, node in enumerate(path):
            if node.backuped:
                if node.states and is_due(node):
                    self._save_states(node)
            elif node.write_id is None:
                if not is_due(node):
                    return nth
                if not self.write(node):
                    *_, last = itertools.takewhile(is_due, path[nth:])
                    self.owed.add(last)
                    return nth
        return len(path)

    def write(self, node: TreeNode) -> bool:
        """As `_begin`; tells the log if L2 has no room."""
        if self._begin(node):
            return True
        lacks_pages = not node.backuped and self._tree.host.pool.available_size() < len(node.key)
        what = f"{len(node.key)} tokens wait"
        if node.backuped:
            what = f"the state behind {node.depth} tokens waits"
        self._log.warning(
            "l2-full" if lacks_pages else "l2-states-full",
            "L2 is full of %s; %s in L1 for room",
            "pages in use or of the same prompt" if lacks_pages else "states in use",
            what,
        )
        return False

    def _begin(self, node: TreeNode) -> bool:
        """Queue the copy of the pages and states of `node` that are on the device alone. If L2 has
        room for some pages alone, a node without states is split: they are a new parent. False: L2
        has no room for what is `node` now."""
        has_pages = not node.backuped
        if not has_pages:
            self._tree.host.pin(node)
        part, copy = node, self.queue_copy(node, only_older=True)
        if copy is None and has_pages and not node.states:
            room = self._tree.host.pool.available_size() // self._tree.page_size
            if room:
                part = self._tree.split(node, room * self._tree.page_size)
                copy = self.queue_copy(part, only_older=True)
        if copy is not None:
            if has_pages:
                part.write_id = copy.operation_id
            self._tree.lock(part)
            for component in copy.host_states:
                component.device.lock(part)
            self.writing[copy.operation_id] = copy
            if part is node:
                return True
        if not has_pages:
            self._tree.host.unpin(node)
        return False

    def _save_states(self, node: TreeNode) -> None:
        """Queue the copy of states whose pages are on the host already."""
        if self._lacks_state_alone(node) and not self.write(node):
            self.owed.add(node)

    @staticmethod
    def _lacks_state_alone(node: TreeNode) -> bool:
        """True if the pages of `node` are on the host, and the copy of a state has to begin."""
        is_wanted = node.backuped and node.has_unsaved_state and not node.is_condemned
        return is_wanted and not any(state.lock_ref for state in node.states)

    def queue_copy(
        self, node: TreeNode, *, with_states: bool = True, only_older: bool = False
    ) -> DeviceCopy | None:
        """Queue the copy of the pages and the states of `node` that are not on the host: all or
        none. The caller keeps them on the device.

        Args:
            only_older: Evict nothing that was used after `node`.
        """
        assert node.value is not None
        pages = node.value[:0] if node.backuped else node.value
        states = {
            component: component.transfer(device=component.of(node).value)
            for component in self._tree.components
            if with_states and component.of(node).is_on_device_only
        }
        self._make_room(node, len(pages), states, only_older=only_older)
        operation = self._controller.write(pages, list(states.values()))
        if operation is None:
            return None
        self._metrics.host_written.inc(len(pages))
        slots = {
            component: transfer.host_indices
            for component, transfer in states.items()
            if transfer.host_indices is not None
        }
        number, host = operation.operation_id, operation.host_indices
        return DeviceCopy(number, node, len(node.key), host, slots)

    def _make_room(
        self, node: TreeNode, pages: int, states: Iterable[StateComponent], *, only_older: bool
    ) -> None:
        """Make room for `pages` of `node` and for its `states`. Pages before them stay: without
        these, L2 could not use the copy."""
        host = self._tree.host
        if pages:
            above = node.parent
            assert above is not None, "the root has no pages"
            while above.parent is not None and not above.backuped:
                above = above.parent
            host.pin(above)
            by = Evictor(None, node.key.extra_key)
            arrival = node.wanted_by[0] if node.wanted_by else None
            host.make_room(pages, by, node, arrival=arrival, only_older=only_older)
            host.release(above)
        if host.pool.available_size() < pages:
            return
        for kind in states:
            if not kind.host.pool.available_size():
                kind.host.evict(1, kind.host.used_before(node) if only_older else None)

    def settle(self, num_ended: int) -> None:
        """Act on the end of the first `num_ended` copies, on which the ranks have agreed."""
        for _ in range(num_ended):
            ack = self._controller.ack_write_queue.popleft()
            self._controller.keep_checksums(ack)
            self._metrics.transfer_seconds.labels("write").observe(time.monotonic() - ack.started)
            for operation_id in ack.operation_ids:
                # Absent: an eviction has waited for the copy and settled it.
                if (copy := self.writing.pop(operation_id, None)) is not None:
                    self._settle(copy)

    def _settle(self, copy: DeviceCopy) -> None:
        """Set the host pages, whose bytes have landed, and unlock the device pages."""
        host = self._tree.host
        has_pages = len(copy.host_indices) > 0
        parts = parts_of(copy.node, copy.length)
        if has_pages:
            for node, begin, end in parts:
                node.write_id = None
                # A copy of the range, so that the rest is not kept alive.
                slots = copy.host_indices[begin:end]
                if node.is_condemned:
                    host.free(slots)
                    continue
                # L3 may have had the pages before the host.
                host.put(node, slots.clone() if len(parts) > 1 else slots, is_stored=True)
        for component, slots in copy.host_states.items():
            if copy.node.is_condemned:
                component.host.free(slots)
            else:
                component.host.put(copy.node, slots)
            component.device.unlock(copy.node)
        if not has_pages:
            for node, _, _ in parts:
                host.unpin(node)
        self._tree.unlock(copy.node)
        # Nodes that had become useless were deleted when they were unlocked.
        landed = [node for node, _, _ in parts if node.is_in_tree]
        if self.write_policy != "write_back" and copy.node.states:
            for node in landed:
                self._save_states(node)  # A state that came while the pages were being copied.
        self.on_landed(landed[::-1])
