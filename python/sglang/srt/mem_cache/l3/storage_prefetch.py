"""Flow from L3 to L2: reads pages that prompts need and that neither L1 nor L2 has.

`prefetch_table.py` has the reads in flight, `prefetch_cost.py` compares them with computing, and
`storage_reads.py` has the thread that makes them. A failing L3 shortens a prefix, and never fails a
request.

Threads: the scheduler's only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import torch

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.srt.mem_cache.l3.prefetch_cost import PrefetchCostModel
from sglang.srt.mem_cache.l3.prefetch_table import (
    PrefetchOperation,
    PrefetchPolicy,
    PrefetchTable,
)
from sglang.srt.mem_cache.tree.hicache_metrics import Decision
from sglang.srt.mem_cache.tree.radix_key import ChildKey, PageHash, RadixKey
from sglang.srt.mem_cache.tree.tenants import Evictor
from sglang.srt.mem_cache.tree.tick_sync import Progress
from sglang.srt.mem_cache.tree.tree_node import TreeNode, tokens_of
from sglang.srt.messages.cache_report import Tier
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from sglang.srt.mem_cache.l3.store_connection import StoreConnection
    from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
    from sglang.srt.mem_cache.tree.pool_tier import PoolTier
    from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree
    from sglang.srt.mem_cache.tree.state_component import StateComponent
    from sglang.srt.messages.cache_report import CacheReport

logger = logging.getLogger(__name__)

PREFETCH_SHARE: Final = 0.5
"""Share of L2 that reads in flight may hold, so that L2 does not run short."""


class NoRead(StrEnum):
    """Reason why no pages are read for a prompt. Label values of
    `sglang:hicache_prefetch_total`."""

    ORPHAN = "orphan"
    """The pages before it have left the tree, so that read pages could not be published."""
    TOO_SHORT = "too_short"
    """Below the threshold."""
    DUPLICATE = "duplicate"
    """The request has a read already."""
    JOINED = "joined"
    """Reads of other requests bring all its pages."""
    SAMPLE = "sample"
    """Another request computes the same prompt."""
    MISS = "miss"
    """The store is known to lack it."""
    UNAVAILABLE = "unavailable"
    """L3 may not be asked now."""
    QUEUE_FULL = "queue_full"
    """Reads in flight hold their whole share of L2, or all slots of the tick sync."""
    SLOWER = "slower_than_computing"
    """The cost model rejected the read: computing is faster."""
    NO_HOST_MEMORY = "no_host_memory"
    """L2 is full of pages in use."""


_EXPECTED: Final = (NoRead.TOO_SHORT, NoRead.JOINED, NoRead.SAMPLE, NoRead.MISS)
"""Reasons that are not logged, since they are expected."""


_Room: TypeAlias = "tuple[torch.Tensor, dict[StateComponent, torch.Tensor], NoRead]"
"""Host slots for a read, int64: of pages, and of states; and the reason if they are fewer pages
than wanted."""


class StoragePrefetch:
    """Reads from L3 for one tree.

    Args:
        tree: The tree in which read pages are published; they are read to pages of its host tier.

    Attributes:
        table: The reads in flight.
        cost_model: Rejects or cancels reads that are slower than computing.
    """

    def __init__(self, tree: PrefixTree, store: StoreConnection, metrics: HiCacheMetrics) -> None:
        self.page_size = tree.page_size
        self._tree = tree
        self._host = tree.host
        self._store = store
        self._metrics = metrics
        self._log = RateLimitedLogger(logger)
        self.table = PrefetchTable(self.page_size)
        self.cost_model = PrefetchCostModel(self.table, self.page_size)
        self._used: set[ChildKey] = set()
        """First pages of prompts that were put on the device or used again since the last tick."""

    @property
    def share(self) -> int:
        """Tokens of L2 that reads in flight may hold."""
        return int(PREFETCH_SHARE * self._host.pool.size)

    def owned_slots(self) -> Iterator[tuple[PoolTier, str, torch.Tensor]]:
        """Slots that reads own and no node has: the tier, the owner, and int64 slots."""
        for operation in self.table.operations:
            owner = f"prefetch of {operation.request_id}"
            yield self._host, owner, operation.host_indices[operation.owned]
            for tier, slots in operation.states.items():
                yield tier, owner, slots

    # ---- arrival of a request --------------------------------------------------------------

    def join_or_read(
        self,
        req_id: str,
        node: TreeNode,
        new: RadixKey,
        last_hash: PageHash | None,
        prefix_keys: list[PageHash] | None,
        *,
        only_join: bool,
        report: CacheReport | None = None,
        seconds: float | None = None,
    ) -> NoRead | None:
        """Join the reads of pages of `new` that are under way, and start one for the pages after
        them; return None, or the reason why no read was started. A read begins at the next tick.

        Args:
            node: Last node that the request matched on arrival.
            new: The tokens after that node; whole pages.
            last_hash: Hash of the node's last page, if the caller knows it.
            prefix_keys: Hashes of the pages before, if the caller knows them.
            only_join: Start no read.
            report: Gets the reason why only a part of `new` is read; None: not wanted.
            seconds: The longest time for the read; None: the policy's.
        """
        is_root = node is self._tree.root
        if not (node.is_in_tree or is_root):
            # The node has left the tree: pages after it could not be published.
            return NoRead.ORPHAN
        attached = self._store.attached
        assert attached is not None
        least = attached.threshold_pages * self.page_size
        if len(new) < least:
            return NoRead.TOO_SHORT
        path = node.path_up()[::-1]
        above = np.concatenate([np.empty(0, dtype=np.uint32), *(one.key.ids for one in path)])
        if last_hash is None and not is_root:
            last_hash = node.page_hashes(self.page_size)[-1]
        if self.table.reads_of(req_id):
            return NoRead.DUPLICATE
        joined, rest, prior = self.table.join(req_id, new, len(above), last_hash)
        if only_join:
            room: NoRead | _Room = NoRead.SAMPLE
        elif not len(rest):
            room = NoRead.MISS
        else:
            room = self._make_room(Evictor(req_id, new.extra_key), node, len(rest), least)
        if isinstance(room, NoRead):
            if joined >= least:
                if report is not None and joined < len(new):
                    report.cut(Tier.STORAGE, len(above) + joined, room)
                return NoRead.JOINED
            # The joined pages are too few to wait for.
            self.table.leave(req_id)
            return room
        pages, states, limit = room
        start = len(above) + joined
        if len(pages) < len(rest):
            if report is not None:
                report.cut(Tier.STORAGE, start + len(pages), limit)
            if not self._tree.host_is_buffer:  # Else another read follows.
                self._log.info(
                    f"part-{limit.value}", "an L3 read brings at most %d of %d tokens: %s",
                    len(pages), len(rest), limit.value,
                )  # fmt: skip
        key = RadixKey(np.concatenate([above, new.ids]), new.extra_key)[: start + len(pages)]
        if prefix_keys is None or joined:
            prefix = key[:start] if attached.settings.pass_prefix_keys else key[:0]
            prefix_keys = prefix.page_hashes(self.page_size)
        waits_to_end = self._store.prefetch_policy is PrefetchPolicy.WAIT_COMPLETE
        timeout = attached.settings.timeout
        # The time for all of `new`: the read may come after the joined ones.
        if seconds is None:
            seconds = timeout.max if waits_to_end else timeout.seconds_for(len(new))
        operation = PrefetchOperation(
            request_id=req_id,
            key=key,
            start=start,
            host_indices=pages,
            hashes=key[start:].page_hashes(self.page_size, prior),
            prefix_hashes=prefix_keys,
            deadline=time.monotonic() + seconds,
            epoch=self._store.epoch,
            asked_at=self._store.asked_at,
            extra_transfers=[kind.transfer(slot) for kind, slot in states.items()],
            states={kind.host: slot for kind, slot in states.items()},
        )
        # Not every backend notes the checksums of the pages that it reads.
        self._store.host_pools.forget_checksums(
            [PoolTransfer(PoolName.KV, pages), *operation.extra_transfers]
        )
        self.table.start(operation)
        return None

    def _make_room(self, by: Evictor, node: TreeNode, wanted: int, least: int) -> NoRead | _Room:
        """Allocate host slots for a read of at most `wanted` tokens after `node`, or give the
        reason why there is no read."""
        page, pool, asked, req_id = self.page_size, self._host.pool, wanted, by.request
        assert req_id is not None, "requests alone read from L3"
        if wanted < least:
            return NoRead.TOO_SHORT
        if not self._store.available:
            return NoRead.UNAVAILABLE
        wanted = min(wanted, self.table.room(self.share) // page * page)
        if self._tree.host_is_buffer:
            # One part is loaded to L1 while the next is read.
            wanted = min(wanted, max(self.share // 2, least) // page * page)
        if wanted < least:
            return NoRead.QUEUE_FULL
        if self.is_hopeless(req_id, wanted):
            return NoRead.UNAVAILABLE
        policy, rates = self._store.prefetch_policy, self._store.rates
        if not self.cost_model.may_begin(req_id, wanted, policy, rates):
            return NoRead.SLOWER
        limit = NoRead.QUEUE_FULL if wanted < asked else NoRead.NO_HOST_MEMORY
        # Evictions must not take the node that the read continues.
        self._host.pin(node)
        arrival = self._tree.look_ahead.arrival_of(req_id)
        self._host.make_room(wanted, by, node, arrival=arrival)
        there = pool.available_size() // page * page
        if there < wanted:
            wanted, limit = there, NoRead.NO_HOST_MEMORY
        components = self._tree.components_from_storage
        states = self._alloc_states() if wanted >= least and components else {}
        self._host.unpin(node)
        if wanted < least or len(states) < len(components):
            for component, slot in states.items():
                component.host.free(slot)
            return NoRead.NO_HOST_MEMORY
        pages = pool.alloc(wanted)
        assert pages is not None
        return pages, states, limit

    def is_hopeless(self, req_id: str, tokens: int) -> bool:
        """True if request `req_id` must not wait for `tokens` from L3, since it is silent."""
        store = self._store
        return self.cost_model.is_hopeless(
            req_id, tokens, store.prefetch_policy, store.rates, store.silence_ms
        )

    def _alloc_states(self) -> dict[StateComponent, torch.Tensor]:
        """A host slot for the state of each kind that a read brings, as far as there is room."""
        states = {}
        for component in self._tree.components_from_storage:
            tier = component.host
            held = sum(tier in operation.states for operation in self.table.operations)
            has_share = held + 1 <= max(1.0, PREFETCH_SHARE * tier.pool.size)
            if has_share and (slot := tier.alloc(1)) is not None:
                states[component] = slot
        return states

    # ---- while a request waits -------------------------------------------------------------

    def publish(self, operation: PrefetchOperation, pages: int) -> int | None:
        """Put the landed ones of the first `pages` of a read into the tree; return the number of
        tokens that were new to the tree.

        The prompt is matched again, since other requests may have inserted some of its pages
        meanwhile. None: the tree lacks pages before the read, so that its pages cannot be used.
        """
        if operation.has_states:
            # States follow the last page, so that no part of the read is of use without them.
            pages = operation.progress.landed if operation.states else 0
        landed = min(pages, operation.progress.landed) * self.page_size
        if not landed:
            return 0
        self.cost_model.given_up = 0
        end = operation.start + landed
        path = self._tree.walk(operation.key[:end])
        known = tokens_of(path)
        begin = known - operation.start
        if begin < 0:
            return None
        if begin == landed and operation.has_states:
            self._add_states(operation, path[-1], landed)
        if not begin < landed or not operation.owned[begin:landed].all():
            # Other flows have brought the pages, or the pages published before have been evicted.
            return 0
        parent = path[-1] if path else self._tree.root
        leaf = self._tree.add_leaf(operation.key[known:end], parent)
        self._publish_pages(operation, leaf, begin, landed)
        return end - known

    def _add_states(self, operation: PrefetchOperation, node: TreeNode, landed: int) -> None:
        """Give the states that a read has brought to `node`, whose pages the tree has already.

        A host state needs host pages. If the node's pages are on the device only, and no copy of
        them is under way, the state takes the host pages of the read.

        Args:
            landed: Tokens of the read that have landed; the node ends there.
        """
        begin = landed - len(node.key)
        if not node.backuped and node.write_id is None and begin >= 0:
            if operation.states and operation.owned[begin:landed].all():
                self._publish_pages(operation, node, begin, landed)
        elif node.backuped:
            self._publish_states(operation, node)

    def _publish_pages(
        self, operation: PrefetchOperation, node: TreeNode, begin: int, end: int
    ) -> None:
        """Give `node` the pages of a read from token `begin` to `end`, and its states, if any."""
        operation.owned[begin:end] = False
        self._host.put(node, operation.host_indices[begin:end].clone(), is_stored=True)
        node.hash_value = operation.hashes[begin // self.page_size : end // self.page_size]
        self._store.note_stored(node, operation.epoch)
        if operation.states:
            self._publish_states(operation, node)

    @staticmethod
    def _publish_states(operation: PrefetchOperation, node: TreeNode) -> None:
        """Give the states that a read has brought to `node`, which ends at their position."""
        # L3 may have lost them since, and got the pages again without them.
        is_stored = node.storage_epoch <= operation.epoch
        for tier, slot in operation.states.items():
            tier.put(node, slot, is_stored=is_stored)
        operation.states = {}

    def settle_known(self, read: PrefetchOperation) -> None:
        """Mark the pages of a read that the tree has as known, for the requests that wait for it,
        and terminate the read if it is not needed any more."""
        path = self._tree.walk(read.key)
        if read.has_states:
            # Requests of the read can use a state at its end.
            path = self._tree.usable(path, len(read.key) + 1)
        known = tokens_of(path)
        if known <= read.start:
            return
        for pages in set(read.needs.values()):
            end = min(known, read.start + pages * self.page_size)
            last = self._tree.walk(read.key[:end])[-1]
            for request_id, needed in read.needs.items():
                if needed == pages:
                    self._tree.look_ahead.extend(request_id, last)
        self.table.note_known(read, known)

    def note_used(self, path: list[TreeNode]) -> None:
        """The nodes of `path`, root's child first, were put on the device or used again."""
        if path:
            self._used.add(path[0].key.child_key(self.page_size))

    def _settle_used(self) -> None:
        """Settle the reads of prompts with the same first page as prompts that were computed since
        the last tick: the tree may have their pages now."""
        for read in self.table.reads:
            if read.key.child_key(self.page_size) in self._used:
                self.settle_known(read)
        self._used.clear()

    def explain(self, rid: str, report: CacheReport, refusal: NoRead | None) -> None:
        """Tell `report` what the store has for request `rid`, until the request leaves its reads;
        `refusal` is the answer of `join_or_read`, which has just been called."""
        report.storage = 0
        if self.table.reads_of(rid):
            self.table.reports[rid] = report
        elif refusal is not None:
            report.cut(Tier.STORAGE, report.on_arrival, refusal)

    def note_refusal(self, reason: NoRead, tokens: int) -> None:
        """Count the reason why no read of `tokens` tokens was started, and log it unless it is
        expected."""
        self._metrics.prefetch_outcomes.labels(reason.value).inc()
        if reason is not NoRead.JOINED:
            self._metrics.decisions.note(Decision.NO_READ, reason.value, tokens)
        if reason not in _EXPECTED:
            self._log.info(
                f"no-prefetch-{reason.value}", "no L3 read for a prompt: %s", reason.value
            )

    # ---- end of the wait -------------------------------------------------------------------

    def release(self, rid: str) -> None:
        """Let request `rid` leave its reads: terminate those that no other request waits for, and
        publish their landed pages."""
        report = self.table.reports.get(rid)
        for read in self.table.leave(rid):
            if self.publish(read, read.progress.landed) is None:
                self._metrics.prefetch_outcomes.labels(NoRead.ORPHAN.value).inc()
                if report is not None:
                    report.cut(Tier.STORAGE, read.start, NoRead.ORPHAN)
            if read.outcome is None and not read.is_cancelled:
                landed = read.progress.landed * self.page_size
                self._log.info("late", "an L3 read was cut; %d tokens of it had landed", landed)

    # ---- one tick --------------------------------------------------------------------------

    def begin_tick(self) -> None:
        """Submit the reads of the prompts that have come since the last tick, with one query for
        all."""
        self.cost_model.waiting = None
        if self.table.new:
            attached = self._store.attached
            assert attached is not None, "L3 is detached when nothing is under way"
            attached.reads.queue.put(self.table.take_new())

    def report(self, progress: Progress) -> None:
        awaits_answers = self._store.prefetch_policy is not PrefetchPolicy.BEST_EFFORT
        progress.prefetches = self.table.report(awaits_answers=awaits_answers)

    def act_on(self, agreed: Progress) -> None:
        for read, progress in zip(self.table.operations, agreed.prefetches, strict=True):
            is_new = progress.ended and not read.progress.ended
            if is_new and progress.whole < len(read.hashes):
                self._store.note_lost(read.hashes[progress.whole], read.asked_at)
        pages, states = self.table.agree(agreed.prefetches)
        for slots in pages:
            self._host.pool.free(slots)
        for tier, slot in states:
            tier.free(slot)
        if self._used:
            self._settle_used()
        policy, rates = self._store.prefetch_policy, self._store.rates
        silence_ms = self._store.silence_ms
        for read in self.cost_model.cancel_unanswered(policy, rates, silence_ms):
            self._log.info(
                "silent",
                "an L3 read of %d tokens is cut: L3 has not answered for %.1f s, longer than "
                "computing takes",
                len(read.host_indices),
                silence_ms / 1000,
            )
        for read in self.cost_model.cancel_slower(policy, rates):
            self._log.info(
                "overtaken",
                "an L3 read of %d tokens is cut: computing them is faster",
                len(read.host_indices),
            )
        if not self._store.available and (stuck := self.table.stuck_tokens()):
            self._log.warning(
                "stuck", "an L3 read hangs: %d tokens of L2 stay with it until it returns", stuck
            )
