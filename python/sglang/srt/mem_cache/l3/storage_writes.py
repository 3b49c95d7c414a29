"""The backup thread: writes the pages of nodes to the store."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Iterator, Sequence
from typing import Final

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer, join_transfers
from sglang.srt.mem_cache.l3.guarded_store import PAGES_PER_CALL, GuardedStore
from sglang.srt.mem_cache.l3.pool_parts import parts_of_pages
from sglang.srt.mem_cache.l3.storage_operation import StorageOperation
from sglang.srt.mem_cache.storage.types import CacheOutcome
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
from sglang.srt.utils.threads import give_way, leave_cores_to_model

_GATHER_S: Final = 0.1
"""How long a write waits for others to go in the same call. No request waits for writes."""


class StorageWrites:
    """The queue of writes and the work of the thread that makes them.

    Args:
        store: The store to write to.
        page_size: Tokens.
        page_bytes: Bytes of a page in all host pools.
        metrics: Counts what happened.
    """

    def __init__(
        self, store: GuardedStore, *, page_size: int, page_bytes: int, metrics: HiCacheMetrics
    ) -> None:
        self._store = store
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._metrics = metrics
        self.queue: queue.SimpleQueue[StorageOperation | None] = queue.SimpleQueue()
        """None ends the thread."""

    def run(self) -> None:
        """Body of the backup thread."""
        leave_cores_to_model()
        # Mooncake waits for the end of a transfer by asking over and over.
        give_way()
        while (first := self.queue.get()) is not None:
            # Asleep, so that the writes queued meanwhile do not wake this thread one by one.
            time.sleep(_GATHER_S)
            queued = [first, *self._queued()]
            while queued:
                group = next_group(queued)
                for operation in group[self._write_together(group) :]:
                    self._write_alone(operation)
                del queued[: len(group)]

    def _queued(self) -> Iterator[StorageOperation]:
        """Take the writes that are in the queue now."""
        while not self.queue.empty():
            operation = self.queue.get()
            if operation is None:
                self.queue.put(None)  # the end: for the loop to see
                break
            yield operation

    def _write_together(self, group: Sequence[StorageOperation]) -> int:
        """Write several operations in one call; returns how many of the first have landed whole.

        The others are left to `_write_alone`, which finds out how each of them ends.
        """
        hashes = [page for operation in group for page in operation.hashes]
        allowed = self._store.timeouts["set"].leading_allowed(hashes) == len(hashes)
        if len(group) < 2 or self._store.pass_prefix_keys or not allowed:
            return 0
        if not self._store.allows_calls():
            return 0
        parts = join_transfers(list(map(_parts_of, group)))
        started = time.monotonic()
        landed = 0
        with self._store.reporting_failures("write"):
            landed, _ = self._store.transfer("set", parts, ())
        ends = itertools.accumulate(len(operation.hashes) for operation in group)
        settled = sum(end <= landed for end in ends)
        if settled:
            pages = sum(len(operation.hashes) for operation in group[:settled])
            sent = pages * self._store.pools.share_to_write(parts)
            self._report(pages, sent, [CacheOutcome.LANDED] * settled, time.monotonic() - started)
        for operation in group[:settled]:
            operation.finish(CacheOutcome.LANDED)
        return settled

    def _write_alone(self, operation: StorageOperation) -> None:
        started = time.monotonic()
        landed, outcome = 0, CacheOutcome.FAILED
        share = self._store.pools.share_to_write(_parts_of(operation))
        with self._store.reporting_failures("write"):
            landed, outcome = self._write(operation, share)
        self._report(landed, landed * share, [outcome], time.monotonic() - started)
        operation.finish(outcome)

    def _write(self, operation: StorageOperation, share: float) -> tuple[int, CacheOutcome]:
        """Write an operation's pages, some at a time, until a part is refused.

        Args:
            operation: What to write.
            share: How much of it this rank writes.

        Returns:
            The leading pages of which the store has every part that this rank writes, and why no
            more.
        """
        if lacks_predecessor(operation):
            return 0, CacheOutcome.SHORT
        if not share:
            # Other ranks say what becomes of it, also where the store fails on this one.
            return len(operation.hashes), CacheOutcome.LANDED
        transfers, hashes = operation.transfers, operation.hashes
        reach = self._store.timeouts["set"].leading_allowed(hashes)
        if reach < len(hashes) or not self._store.allows_calls():
            return 0, CacheOutcome.UNAVAILABLE
        total = 0
        for begin in range(0, len(hashes), PAGES_PER_CALL):
            end = min(begin + PAGES_PER_CALL, len(hashes))
            landed, why = self._store.transfer(
                "set",
                parts_of_pages(transfers, hashes, begin, end),
                [*operation.prefix_hashes, *hashes[:begin]],
            )
            total += landed
            if not why:
                self._store.log.warning(
                    f"set-{why}", "L3: page %d of %d was not written: %s; nor is what follows it",
                    total, len(hashes), why.value,
                )  # fmt: skip
                return total, why
        return total, CacheOutcome.LANDED

    def _report(
        self, landed: int, sent: float, outcomes: Sequence[CacheOutcome], seconds: float
    ) -> None:
        """Count writes that have ended.

        Args:
            landed: Pages that have landed.
            sent: Pages of these that this rank has written.
            outcomes: One for each write.
            seconds: Duration of all writes together.
        """
        for outcome in outcomes:
            self._metrics.backup_outcomes.labels(outcome.value).inc()
        self._metrics.transfer_seconds.labels("backup").observe(seconds)
        if landed:
            self._metrics.backuped.inc(landed * self._page_size)
        if sent:
            rate = sent * self._page_bytes / max(seconds, 1e-9)
            self._metrics.backup_bandwidth.set(rate / 1e9)


def _parts_of(operation: StorageOperation) -> list[PoolTransfer]:
    """All pages of an operation, in all pools."""
    return parts_of_pages(operation.transfers, operation.hashes, 0, len(operation.hashes))


def next_group(queued: Sequence[StorageOperation]) -> list[StorageOperation]:
    """The first writes of `queued` that can go in one call; at least one.

    A write joins where the pages before its own are in the store, or are written before it in
    the same call.
    """
    group: list[StorageOperation] = []
    pages = 0
    for operation in queued:
        pages += len(operation.hashes)
        may_join = operation.after in group or not lacks_predecessor(operation)
        if pages > PAGES_PER_CALL or not may_join:
            break
        group.append(operation)
    return group or list(queued[:1])


def lacks_predecessor(operation: StorageOperation) -> bool:
    """Whether the pages before these are not in the store, so that no reader could use these."""
    return operation.after is not None and operation.after.outcome is not CacheOutcome.LANDED
