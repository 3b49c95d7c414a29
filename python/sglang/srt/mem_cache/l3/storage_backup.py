"""Flow from L2 to L3: writes pages that have reached the host to the store, parents first.

`storage_writes.py` has the thread that writes. If the store refuses a page, the pages after it are
not written: readers find a whole prefix or none.

The flow checks now and then whether L3 still has the pages of a prompt. Only this check detects
that the store was restarted or has evicted pages: the engine does not write a stored page again,
and does not read it while L1 or L2 has it.

Threads: the scheduler's only.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from sglang.srt.mem_cache.l3.storage_reads import CheckOperation
from sglang.srt.mem_cache.l3.storage_writes import StorageOperation
from sglang.srt.mem_cache.tree.hicache_metrics import Decision
from sglang.srt.mem_cache.tree.radix_key import PageHash
from sglang.srt.mem_cache.tree.tick_sync import MAX_SETTLED, Progress, Status
from sglang.srt.mem_cache.tree.tree_node import StateSlots, TreeNode, parts_of

if TYPE_CHECKING:
    from sglang.srt.mem_cache.l3.store_connection import StoreConnection
    from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree

_BACKUP_SHARE: Final = 0.5
"""Share of the pages of L2, and of its states, that writes to L3 in flight may pin, so that L2 does
not run short of either."""
_CHECK_EVERY: Final = 61
"""Re-check L3 on every 61st use of a stored prompt. A count, not a time, so that all ranks check at
the same tick; a prime, so that prompts used in rotation all get a turn."""


class NoWrite(StrEnum):
    """Reason why a node is not written. Label values of `sglang:hicache_backup_total`."""

    QUEUE_FULL = "queue_full"
    """Writes in flight pin their whole share of L2's pages or states. Only this reason is
    temporary: the write is tried again. For the others the node has to be used again."""
    ORPHAN = "orphan"
    """L3 lacks the pages before it."""
    UNAVAILABLE = "unavailable"
    """L3 may not be asked now."""
    EVICTED = "evicted"
    """The node left the host while its write waited."""
    SHORT = "short"
    """The store refused a page before it."""


class StorageBackup:
    """Writes to L3 for one tree, and checks of stored pages, one at a time.

    Args:
        tree: Tree of the nodes, which are pinned in L2 while they are written.

    Attributes:
        under_way: The writes in flight, in their order. Read only.
        postponed: Nodes that wait until writes in flight end, by id, parents first. Read only.
        owed: Nodes by id whose copies to a buffer wait, to be written after them. One that is given
            up leaves.
        check: The check in flight. Read only.
    """

    def __init__(self, tree: PrefixTree, store: StoreConnection, metrics: HiCacheMetrics) -> None:
        self._tree = tree
        self._store = store
        self._metrics = metrics
        self.under_way: deque[StorageOperation] = deque()
        self._tokens = 0
        """Tokens of the writes in flight."""
        self.postponed: dict[int, TreeNode] = {}
        self.owed: dict[int, TreeNode] = {}
        self.check: CheckOperation | None = None
        self._uses = 0
        """Uses of stored prompts since the start."""
        tree.keepers.append(self)
        tree.host.is_owed = lambda node: node.id in self.postponed

    def has_stored(self, node: TreeNode) -> bool:
        """True if L3 is believed to have the pages of `node`."""
        return node.parent is None or node.storage_epoch == self._store.epoch

    @property
    def pending_tokens(self) -> int:
        """Tokens in L2 whose writes are in flight or postponed."""
        return self._tokens + sum(len(node.key) for node in self.postponed.values())

    def on_delete(self, node: TreeNode) -> None:
        """See `NodeKeeper`: a postponed write is given up."""
        if self.postponed.pop(node.id, None) is not None:
            self._count(NoWrite.EVICTED, node)

    def on_reset(self, nodes: Sequence[TreeNode]) -> None:
        """See `NodeKeeper`."""
        for node in nodes:
            self.on_delete(node)

    # ---- writes ----------------------------------------------------------------------------

    def on_insert(self, path: list[TreeNode]) -> None:
        """The nodes of `path`, root's child first, were put on the device or used again. A store is
        attached."""
        if path and self.has_stored(path[0]):
            self._uses += 1
            if self._uses % _CHECK_EVERY == 0 and self.check is None and self._store.available:
                self._start_check(path)
        # L3 may lack these pages, if it was attached, came back or lost pages since their write.
        self._write_all([node for node in path if node.backuped])

    def _start_check(self, path: list[TreeNode]) -> None:
        """Ask L3 whether it still has the stored pages of `path`."""
        assert self._store.attached is not None
        stored = list(itertools.takewhile(self.has_stored, path))
        needed = self._tree.components_from_storage
        while stored and not all(self._is_stored(kind.of(stored[-1])) for kind in needed):
            stored.pop()  # A stored prompt ends with its states.
        hashes = [page for node in stored for page in node.page_hashes(self._tree.page_size)]
        if hashes:
            self.check = CheckOperation(hashes, self._store.epoch, self._store.asked_at)
            self._store.attached.reads.queue.put(self.check)

    def _is_stored(self, state: StateSlots) -> bool:
        """True if L3 is known to have the state, where it has the pages: those on the host are
        there. If they only pass through the host, a state that comes takes the mark away."""
        return state.is_on_any_tier if self._tree.host_is_buffer else state.host_value is not None

    def on_host_landed(self, nodes: list[TreeNode]) -> None:
        """The pages of `nodes`, parents first, have reached the host."""
        if self._store.attached is None:
            return
        self._write_all(nodes)
        # Under write_back whole branches may have landed before their ancestors.
        below = deque(child for node in nodes for child in node.children.values())
        while below:
            node = below.popleft()
            if node.backuped and not self.has_stored(node) and node.backup_op is None:
                self._write_all([node])
                if node.backup_op is not None or node.id in self.postponed:
                    below.extend(node.children.values())

    def _write_all(self, nodes: list[TreeNode]) -> None:
        for node in nodes:
            is_known = node.backup_op is not None or node.id in self.postponed
            if is_known or self.has_stored(node):
                continue
            refusal = self.write(node)
            if refusal is NoWrite.QUEUE_FULL:
                self.postponed[node.id] = node
            elif refusal is not None:
                self._count(refusal, node)

    def write(self, node: TreeNode) -> NoWrite | None:
        """Queue the write of a node's host pages to L3; return None, or the reason why not."""
        attached = self._store.attached
        assert attached is not None and node.host_value is not None and node.parent is not None
        refusal = self._refusal(node, node.parent)
        if refusal is not None:
            return refusal
        prefix: list[PageHash] = []
        if attached.wants_prefixes:
            prefix = node.get_prefix_hash_values(self._tree.page_size)
        hashes = node.page_hashes(self._tree.page_size)
        # A state follows the last page.
        states = [
            component.transfer(slot, keys=[hashes[-1]])
            for component in self._tree.components
            if (slot := component.of(node).host_value) is not None
        ]
        after = node.parent.backup_op
        assert after is None or isinstance(after, StorageOperation)
        operation = StorageOperation(
            node=node,
            host_indices=node.host_value,
            hashes=hashes,
            prefix_hashes=prefix,
            after=after,
            epoch=self._store.epoch,
            extra_transfers=states,
        )
        self._tree.host.pin(node)
        node.backup_op = operation
        self.under_way.append(operation)
        self._tokens += len(node.key)
        attached.writes.queue.put(operation)
        return None

    def may_take(self, node: TreeNode) -> bool:
        """True if the pages of `node`, once they are on the host, can be written. Counts the reason
        if not."""
        above = node.parent
        if self._store.attached is None or above is None:
            return False
        if not self._store.available:
            self._count(NoWrite.UNAVAILABLE, node)
            return False
        if above.backuped or above.write_id is not None or self.has_stored(above):
            return True
        self._count(NoWrite.ORPHAN, node)
        return False

    def _refusal(self, node: TreeNode, above: TreeNode) -> NoWrite | None:
        if node.is_condemned:
            return NoWrite.EVICTED
        if not self.has_stored(above) and above.backup_op is None:
            return NoWrite.QUEUE_FULL if above.id in self.postponed else NoWrite.ORPHAN
        if not (self._tree.host_is_buffer or above.backuped_from_root):
            # If this write hung, an ancestor without a host copy could not be evicted from L1. When
            # the ancestor reaches the host, these pages are written after it.
            return NoWrite.ORPHAN
        if not self._store.available:
            return NoWrite.UNAVAILABLE
        if not self.under_way:
            return None  # Waiting would make no node smaller.
        if self._tokens + len(node.key) > _BACKUP_SHARE * self._tree.host.pool.size:
            return NoWrite.QUEUE_FULL
        # Each write pins the states of its node, also those that come meanwhile.
        sizes = [component.host.pool.size for component in self._tree.components]
        if any(len(self.under_way) >= _BACKUP_SHARE * size for size in sizes):
            return NoWrite.QUEUE_FULL
        return None

    def _count(self, refusal: NoWrite, node: TreeNode) -> None:
        self._metrics.backup_outcomes.labels(refusal.value).inc()
        self._metrics.decisions.note(Decision.NO_WRITE, refusal.value, len(node.key))

    # ---- one tick --------------------------------------------------------------------------

    def report(self, progress: Progress) -> None:
        outcomes = itertools.takewhile(
            lambda outcome: outcome is not None, (one.outcome for one in self.under_way)
        )
        progress.backups = [
            Status.on(is_good=bool(outcome)) for outcome in itertools.islice(outcomes, MAX_SETTLED)
        ]
        if self.check is not None and self.check.there is not None:
            progress.check = 1 + self.check.there

    def act_on(self, agreed: Progress) -> None:
        if (check := self.check) is not None and agreed.check:
            self.check = None
            there = agreed.check - 1
            if there < len(check.hashes) and check.epoch == self._store.epoch:
                # A hit ends with a state, if there are states, and the next page may be there. But
                # a hit would end with the last page.
                lost = check.hashes[-1 if self._tree.components_from_storage else there]
                self._store.note_lost(lost, check.asked_at)
                self._store.forget_stored()
        refused: set[TreeNode] = set()
        for status in agreed.backups:
            nodes = self._settle(self.under_way.popleft(), success=status is Status.LANDED)
            if status is Status.FAILED:
                refused.update(nodes)
        if refused:
            self._give_up_below(refused)
        if self.postponed:
            self._resume_postponed()

    def _settle(self, operation: StorageOperation, *, success: bool) -> list[TreeNode]:
        """Act on the end of a write; returns its nodes, several after splits, top first."""
        length = len(operation.host_indices)
        self._tokens -= length
        nodes = [node for node, _, _ in reversed(parts_of(operation.node, length))]
        late = []
        for node in nodes:
            node.backup_op = None
            has_written_state = node is operation.node and bool(operation.extra_transfers)
            has_state = any(state.host_value is not None for state in node.states)
            if has_state and not has_written_state:
                late.append(node)
            elif self._tree.host_is_buffer and node.has_unsaved_state:
                pass  # It came while the pages were written, and its copy follows.
            elif success and node.is_in_tree:
                # The epoch of the write's start: if L3 was lost meanwhile, the pages may be lost
                # too.
                self._store.note_stored(node, operation.epoch)
            self._tree.host.unpin(node)
        if success and late and self._store.attached is not None:
            # States that came while the pages were written.
            self._write_all(late)
        return nodes

    def _give_up_below(self, refused: set[TreeNode]) -> None:
        """Drop the writes of refused nodes and their descendants that are still to begin."""
        for waiting in (self.postponed, self.owed):
            for node in list(waiting.values()):
                if not refused.isdisjoint(node.path_up()):
                    del waiting[node.id]
                    self._count(NoWrite.SHORT, node)

    def _resume_postponed(self) -> None:
        """Queue the postponed writes, in their order, while there is room."""
        while self.postponed:
            node = next(iter(self.postponed.values()))
            for part in self._unsaved_path(node):
                refusal = self.write(part) if part.backuped else NoWrite.EVICTED
                if refusal is NoWrite.QUEUE_FULL:
                    return
                if refusal is not None:
                    self._count(refusal, part)
                    break
            del self.postponed[node.id]

    def _unsaved_path(self, node: TreeNode) -> list[TreeNode]:
        """`node` and the nodes split off above it since it was postponed, top first."""
        path: list[TreeNode] = []
        at = node
        while at.parent is not None and not self.has_stored(at) and at.backup_op is None:
            path.append(at)
            at = at.parent
        return path[::-1]
