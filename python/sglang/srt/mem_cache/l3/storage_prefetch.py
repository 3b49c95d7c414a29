"""Flow from L3 to L2: reads pages that prompts need and that neither L1 nor L2 has.

`hicache_prefetch.py` has the book of the reads in flight, `fetch_choice.py` decides which reads are
worth it, and `storage_reads.py` has the thread that makes them. A failing L3 shortens a prefix, and
never fails a request.

Threads: the scheduler's only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from sglang.srt.mem_cache.l3.fetch_choice import EXPECTED, FetchChoice, NoRead
from sglang.srt.mem_cache.l3.hicache_prefetch import PrefetchBoard, PrefetchPolicy, Read
from sglang.srt.mem_cache.l3.storage_operation import PrefetchOperation
from sglang.srt.mem_cache.tree.ballot import Progress
from sglang.srt.mem_cache.tree.base_prefix_cache import Workload
from sglang.srt.mem_cache.tree.radix_key import ChildKey, PageHash, RadixKey, TokenArray
from sglang.srt.mem_cache.tree.tier_flow import TierFlow
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from sglang.srt.mem_cache.l3.store_connection import StoreConnection
    from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
    from sglang.srt.mem_cache.tree.pool_tier import PoolTier
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree

logger = logging.getLogger(__name__)

_PREFETCH_SHARE: Final = 0.5
"""Share of L2 that reads in flight may hold, so that L2 does not run short."""


class StoragePrefetch(TierFlow):
    """Reads from L3 for one tree.

    Args:
        tree: The tree in which read pages are published; they are read to pages of its host tier.
        store: The connection to L3.
        metrics: Metrics of the tiers.

    Attributes:
        board: The reads in flight.
    """

    def __init__(self, tree: PrefixTree, store: StoreConnection, metrics: HiCacheMetrics) -> None:
        self.page_size = tree.page_size
        self._tree = tree
        self._host = tree.host
        self._states = next(iter(tree.components), None)
        self._store = store
        self._metrics = metrics
        self._log = RateLimitedLogger(logger)
        self.board = PrefetchBoard(self.page_size)
        self._choice = FetchChoice(self.board)
        self._loaded: dict[str, int] = {}
        """Number of tokens that L3 contributed, by request."""
        self._used: set[ChildKey] = set()
        """First pages of prompts that were put on the device or used again since the last tick."""

    def busy(self) -> dict[str, int]:
        return {"prefetches": len(self.board)} if len(self.board) else {}

    def owned_slots(self) -> Iterator[tuple[PoolTier, str, torch.Tensor]]:
        for operation in self.board.operations():
            owner = f"prefetch of {operation.request_id}"
            yield self._host, owner, operation.owned_slots()
            if operation.host_state is not None and self._states is not None:
                yield self._states.host, owner, operation.host_state

    def stuck_tokens(self) -> int:
        """Host tokens that hanging reads hold though no request waits for them."""
        return self.board.stuck_tokens()

    def check(self) -> None:
        self.board.check()

    def reset(self) -> None:
        self._loaded.clear()

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """See `BasePrefixCache.note_prefill`: L3 is read only if that is not much slower than
        computing."""
        if self._store.attached is not None:
            self._store.attached.worth.prefills.add(tokens, seconds)

    def watch_workload(self, workload: Callable[[], Workload]) -> None:
        """See `BasePrefixCache.watch_workload`."""
        self._choice.watch(workload)

    # ---- arrival of a request --------------------------------------------------------------

    def prefetch_from_storage(
        self,
        req_id: str,
        last_host_node: TreeNode,
        new_input_tokens: Sequence[int] | TokenArray,
        last_hash: PageHash | None = None,
        prefix_keys: list[PageHash] | None = None,
        *,
        extra_key: str | None = None,
        only_join: bool = False,
    ) -> None:
        """Read the pages that follow `last_host_node` in the prompt of `req_id`. The read begins at
        the next tick. Pages that are being read already are waited for and not read again.

        Args:
            last_host_node: Last node that the request matched on arrival.
            new_input_tokens: The tokens after that node; a partial last page is ignored.
            last_hash: Hash of the node's last page, if the caller knows it.
            prefix_keys: Hashes of the pages before, if the caller knows them.
            extra_key: Extra key of the request.
            only_join: Start no read; only join reads in flight.
        """
        if self._store.attached is None:
            return
        new = RadixKey(new_input_tokens, extra_key)
        if self._states is not None:
            # A state after the last token is of no use: see `StateComponent.usable`.
            new = new[: max(0, len(new) - 1)]
        reason = self._join_or_read(
            req_id,
            last_host_node,
            new.page_aligned(self.page_size),
            last_hash,
            prefix_keys,
            only_join=only_join,
        )
        if reason is not None:
            self._metrics.prefetch_outcomes.labels(reason.value).inc()
            if reason not in EXPECTED:
                self._log.info(
                    f"no-prefetch-{reason.value}", "no L3 read for a prompt: %s", reason.value
                )

    def _join_or_read(
        self,
        req_id: str,
        node: TreeNode,
        new: RadixKey,
        last_hash: PageHash | None,
        prefix_keys: list[PageHash] | None,
        *,
        only_join: bool,
    ) -> NoRead | None:
        """Join reads or start one for `new`, which follows `node`; return None, or the reason why
        no read was started."""
        is_root = node is self._tree.root
        if node.parent is None and not is_root:
            # The node has left the tree: pages after it could not be published.
            return NoRead.ORPHAN
        assert self._store.attached is not None
        settings = self._store.attached.settings
        least = settings.threshold_pages(self.page_size) * self.page_size
        if len(new) < least:
            return NoRead.TOO_SHORT
        if req_id in self.board:
            return NoRead.DUPLICATE
        if last_hash is None and not is_root:
            last_hash = node.page_hashes(self.page_size)[-1]
        above = _path_tokens(node)
        joined, rest, prior = self.board.join(req_id, new, len(above), last_hash)
        host_indices = None
        if only_join:
            reason: NoRead | None = NoRead.SAMPLE
        elif not len(rest):
            reason = NoRead.MISS
        else:
            reason, host_indices = self._room_for_prefetch(req_id, node, len(rest), least)
        state = None
        extra = []
        if host_indices is not None and self._states is not None:
            state = self._room_for_state(node)
            if state is None:
                self._host.pool.free(host_indices)
                reason, host_indices = NoRead.NO_HOST_MEMORY, None
            else:
                extra.append(self._states.transfer(state))
        if host_indices is None:
            if joined >= least:
                return NoRead.JOINED
            # The joined pages are too few to wait for.
            self.board.leave(req_id)
            return reason
        start = len(above) + joined
        key = RadixKey(np.concatenate([above, new.ids]), new.extra_key)[: start + len(host_indices)]
        if prefix_keys is None or joined:
            prefix = key[:start] if settings.pass_prefix_keys else key[:0]
            prefix_keys = prefix.page_hashes(self.page_size)
        operation = PrefetchOperation(
            request_id=req_id,
            key=key,
            start=start,
            host_indices=host_indices,
            hashes=key[start:].page_hashes(self.page_size, prior),
            prefix_hashes=prefix_keys,
            # The time for all of `new`: the read may come after the joined ones.
            deadline=time.monotonic() + self._store.prefetch_seconds(len(new)),
            epoch=self._store.epoch,
            extra_transfers=extra,
            host_state=state,
        )
        self.board.start(operation)
        return None

    def _room_for_prefetch(
        self, req_id: str, node: TreeNode, wanted: int, least: int
    ) -> tuple[NoRead | None, torch.Tensor | None]:
        """Allocate host pages for a read of at most `wanted` tokens after `node`, or give the
        reason why there is no read."""
        page = self.page_size
        if wanted < least:
            return NoRead.TOO_SHORT, None
        if not self._store.available:
            return NoRead.UNAVAILABLE, None
        share = int(_PREFETCH_SHARE * self._host.pool.size) - self.board.held_tokens()
        wanted = min(wanted, share // page * page)
        if self.board.is_full or wanted < least:
            return NoRead.QUEUE_FULL, None
        if not self._choice.may_begin(
            req_id, wanted, self._store.prefetch_policy, self._store.rates
        ):
            return NoRead.SLOWER, None
        missing = wanted - self._host.pool.available_size()
        if missing > 0:
            # The eviction must not take the node that the read continues.
            node.protect_host()
            self._host.evict(missing)
            self._host.unpin(node)
            wanted = min(wanted, self._host.pool.available_size() // page * page)
        if wanted < least:
            return NoRead.NO_HOST_MEMORY, None
        return None, self._host.pool.alloc(wanted)

    def _room_for_state(self, node: TreeNode) -> torch.Tensor | None:
        """Allocate a host slot for the state that a read after `node` brings; None: there is no
        room."""
        assert self._states is not None
        states = self._states.host
        if self.board.held_states() + 1 > max(1.0, _PREFETCH_SHARE * states.pool.size):
            return None
        # The eviction must not take the node that the read continues.
        node.protect_host()
        slot = states.alloc(1)
        self._host.unpin(node)
        return slot

    # ---- while a request waits -------------------------------------------------------------

    def check_prefetch_progress(self, req_id: str) -> bool:
        if not self.board.may_schedule(req_id, self._store.prefetch_policy):
            return False
        for read in self.board.reads_of(req_id):
            # Landed pages are published now. The read is cut when the request is scheduled, which
            # may be much later.
            new = self._publish(read, read.needs[req_id]) or 0
            if new:
                self._loaded[req_id] = self._loaded.get(req_id, 0) + new
            if new or read.progress.ended:
                self._settle_known(read)
        return True

    def pop_prefetch_loaded_tokens(self, req_id: str) -> int:
        return self._loaded.pop(req_id, 0)

    def _publish(self, read: Read, pages: int) -> int | None:
        """Put the landed ones of the first `pages` of a read into the tree; return the number of
        tokens that were new to the tree.

        The prompt is matched again, since other requests may have inserted some of its pages
        meanwhile. None: the tree lacks pages before the read, so that its pages cannot be used.
        """
        operation = read.operation
        if operation.has_state:
            # The state is after the last page, so that no part of the read is of use without it.
            pages = read.progress.landed if operation.host_state is not None else 0
        landed = min(pages, read.progress.landed) * self.page_size
        if not landed:
            return 0
        self._choice.note_read()
        end = operation.start + landed
        path = self._tree.walk(operation.key[:end])
        known = sum(len(node.key) for node in path)
        begin = known - operation.start
        if begin < 0:
            return None
        if begin == landed and operation.has_state:
            self._add_state(operation, path[-1], landed)
        if not begin < landed or not operation.owns(begin, landed):
            # Other flows have brought the pages, or the pages published before have been evicted.
            return 0
        parent = path[-1] if path else self._tree.root
        leaf = self._tree.add_leaf(operation.key[known:end], parent)
        self._publish_pages(operation, leaf, begin, landed)
        return end - known

    def _add_state(self, operation: PrefetchOperation, node: TreeNode, landed: int) -> None:
        """Give the state that a read has brought to `node`, whose pages the tree has already.

        A host state needs host pages: where the node's are on the device only, and are not being
        copied, it takes those of the read.

        Args:
            landed: Tokens of the read that have landed; the node ends there.
        """
        begin = landed - len(node.key)
        if not node.backuped and node.write_id is None and begin >= 0:
            if operation.host_state is not None and operation.owns(begin, landed):
                self._publish_pages(operation, node, begin, landed)
        elif node.backuped:
            self._publish_state(operation, node)

    def _publish_pages(
        self, operation: PrefetchOperation, node: TreeNode, begin: int, end: int
    ) -> None:
        """Give `node` the pages of a read from token `begin` to `end`, and its state, if any."""
        self._host.put(node, operation.publish(begin, end), is_stored=True)
        node.hash_value = operation.hashes[begin // self.page_size : end // self.page_size]
        node.storage_epoch = operation.epoch
        self._publish_state(operation, node)

    def _publish_state(self, operation: PrefetchOperation, node: TreeNode) -> None:
        """Give the state that a read has brought, if any, to `node`, which ends at its position."""
        if (slot := operation.take_state()) is not None:
            assert self._states is not None
            self._states.host.put(node, slot, is_stored=True)

    def _settle_known(self, read: Read) -> None:
        """Mark the pages of a read that the tree has as known, for the requests that wait for it,
        and cut the read if it is not needed any more."""
        operation = read.operation
        path = self._tree.walk(operation.key)
        # Its requests can use a state at the end of the read.
        known = sum(len(node.key) for node in self._tree.usable(path, len(operation.key) + 1))
        if known <= operation.start:
            return
        for pages in set(read.needs.values()):
            end = min(known, operation.start + pages * self.page_size)
            last = self._tree.walk(operation.key[:end])[-1]
            for request_id, needed in read.needs.items():
                if needed == pages:
                    self._tree.look_ahead.extend(request_id, last)
        self.board.note_known(read, known)

    def on_insert(self, path: list[TreeNode]) -> None:
        if path and len(self.board):
            self._used.add(path[0].key.child_key(self.page_size))

    def _settle_used(self) -> None:
        """Settle the reads of prompts with the same first page as prompts that were computed since
        the last tick: the tree may have their pages now."""
        if self._used:
            for read in self.board.reads():
                if read.operation.key.child_key(self.page_size) in self._used:
                    self._settle_known(read)
            self._used.clear()

    # ---- end of the wait -------------------------------------------------------------------

    def on_scheduled(self, rid: str) -> None:
        self._leave(rid)

    def on_aborted(self, rid: str) -> None:
        self._leave(rid)
        self._loaded.pop(rid, None)

    def _leave(self, rid: str) -> None:
        """Let request `rid` leave its reads: cut those that no other request waits for, and publish
        their landed pages."""
        for read in self.board.leave(rid):
            if self._publish(read, read.progress.landed) is None:
                self._metrics.prefetch_outcomes.labels(NoRead.ORPHAN.value).inc()
            if not read.operation.ended and not read.operation.is_overtaken:
                landed = read.progress.landed * self.page_size
                self._log.info("late", "an L3 read was cut; %d tokens of it had landed", landed)

    # ---- one tick --------------------------------------------------------------------------

    def begin_tick(self) -> None:
        self._choice.begin_tick()
        self._submit()

    def _submit(self) -> None:
        """Submit the reads of the prompts that have come since the last tick, with one query for
        all."""
        if started := self.board.take_new():
            attached = self._store.attached
            assert attached is not None, "L3 is detached when nothing is under way"
            attached.reads.queue.put(started)

    def report(self, progress: Progress) -> None:
        if self._store.prefetch_policy is not PrefetchPolicy.BEST_EFFORT:
            self.board.await_answers()
        progress.prefetches = self.board.progress()

    def act_on(self, agreed: Progress) -> None:
        for slots in self.board.agree(agreed.prefetches):
            self._host.pool.free(slots)
        for slot in self.board.take_freed_states():
            assert self._states is not None
            self._states.host.free(slot)
        self._settle_used()
        self._cut_overtaken()
        if not self._store.available and (stuck := self.board.stuck_tokens()):
            self._log.warning(
                "stuck", "an L3 read hangs: %d tokens of L2 stay with it until it returns", stuck
            )

    def _cut_overtaken(self) -> None:
        """Cut the reads that would take longer than computing the prompts."""
        for operation in self._choice.cut_overtaken(self._store.prefetch_policy, self._store.rates):
            self._log.info(
                "overtaken",
                "an L3 read of %d tokens is cut: computing them is faster",
                len(operation.host_indices),
            )


def _path_tokens(node: TreeNode) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Tokens from the root to the end of `node`."""
    parts = []
    while node.parent is not None:
        parts.append(node.key.ids)
        node = node.parent
    return np.concatenate([np.empty(0, dtype=np.uint32), *reversed(parts)])
