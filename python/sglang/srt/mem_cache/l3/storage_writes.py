"""The backup thread: writes the pages of nodes to the store."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Iterator, Sequence
from typing import Final

from sglang.srt.mem_cache.device.pool_transfer import join_transfers
from sglang.srt.mem_cache.l3.guarded_store import PAGES_PER_CALL, GuardedStore
from sglang.srt.mem_cache.l3.storage_operation import StorageOperation
from sglang.srt.mem_cache.l3.stored_pools import num_keys
from sglang.srt.mem_cache.storage.types import CacheOutcome
from sglang.srt.mem_cache.tree.radix_key import PageHash
from sglang.srt.utils.threads import leave_cores_to_model, lower_priority

_GATHER_S: Final = 0.1
"""How long a write waits for others to go in the same call. No request waits for writes."""


class StorageWrites:
    """The queue of writes and the work of the thread that makes them.

    Args:
        store: The store to write to.
        page_size: Tokens.
        page_bytes: Bytes of a page in all host pools.
    """

    def __init__(self, store: GuardedStore, *, page_size: int, page_bytes: int) -> None:
        self._store = store
        self._page_size = page_size
        self._page_bytes = page_bytes
        self.queue: queue.SimpleQueue[StorageOperation | None] = queue.SimpleQueue()
        """None ends the thread."""

    def run(self) -> None:
        """Body of the backup thread."""
        leave_cores_to_model()
        # Mooncake waits for the end of a transfer by asking over and over.
        lower_priority()
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
        if len(group) < 2 or self._store.pass_prefix_keys:
            return 0
        hashes = [page for operation in group for page in operation.hashes]
        if not self._may_write(hashes):
            return 0
        pools = self._store.pools
        objects = join_transfers([pools.objects(one.transfers, one.hashes) for one in group])
        own = pools.to_write(objects)
        started = time.monotonic()
        landed = 0
        with self._store.reporting_failures("write"):
            landed, _ = self._store.transfer("set", hashes, own, ())
        ends = itertools.accumulate(len(operation.hashes) for operation in group)
        settled = group[: sum(end <= landed for end in ends)]
        if settled:
            pages = sum(len(operation.hashes) for operation in settled)
            share = num_keys(own) / num_keys(objects)
            outcomes = [CacheOutcome.LANDED] * len(settled)
            self._report(pages, pages * share, outcomes, time.monotonic() - started)
        for operation in settled:
            operation.finish(CacheOutcome.LANDED)
        return len(settled)

    def _may_write(self, hashes: Sequence[PageHash]) -> bool:
        """True if the store may be given these pages now."""
        reach = self._store.timeouts["set"].leading_allowed(hashes)
        return reach == len(hashes) and self._store.allows_calls()

    def _write_alone(self, operation: StorageOperation) -> None:
        pools = self._store.pools
        objects = pools.objects(operation.transfers, operation.hashes)
        share = num_keys(pools.to_write(objects)) / num_keys(objects)
        started = time.monotonic()
        landed, outcome = 0, CacheOutcome.FAILED
        with self._store.reporting_failures("write"):
            landed, outcome = self._write(operation, share)
        self._report(landed, landed * share, [outcome], time.monotonic() - started)
        operation.finish(outcome)

    def _write(self, operation: StorageOperation, share: float) -> tuple[int, CacheOutcome]:
        """Write an operation's pages, some at a time, until a part is refused.

        Args:
            operation: What to write.
            share: How much of it this rank writes, from 0 to 1; the rest is for other ranks.

        Returns:
            The leading pages of which the store has every part that this rank writes, and why no
            more.
        """
        transfers, hashes, pools = operation.transfers, operation.hashes, self._store.pools
        if operation.lacks_predecessor:
            return 0, CacheOutcome.SHORT
        if not share:
            # Other ranks decide what becomes of it, also where the store fails on this one.
            return len(hashes), CacheOutcome.LANDED
        if not self._may_write(hashes):
            return 0, CacheOutcome.UNAVAILABLE
        total = 0
        for begin in range(0, len(hashes), PAGES_PER_CALL):
            end = min(begin + PAGES_PER_CALL, len(hashes))
            landed, why = self._store.transfer(
                "set",
                hashes[begin:end],
                pools.to_write(pools.objects(transfers, hashes, begin, end)),
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
            self._store.metrics.backup_outcomes.labels(outcome.value).inc()
        self._store.metrics.transfer_seconds.labels("backup").observe(seconds)
        if landed:
            self._store.metrics.backuped.inc(landed * self._page_size)
        if sent:
            rate = sent * self._page_bytes / max(seconds, 1e-9)
            self._store.metrics.backup_bandwidth.set(rate / 1e9)


def next_group(queued: Sequence[StorageOperation]) -> list[StorageOperation]:
    """The first writes of `queued` that can go in one call; at least one.

    A write joins where the pages before its own are in the store, or are written before it in
    the same call.
    """
    group: list[StorageOperation] = []
    pages = 0
    for operation in queued:
        pages += len(operation.hashes)
        may_join = operation.after in group or not operation.lacks_predecessor
        if pages > PAGES_PER_CALL or not may_join:
            break
        group.append(operation)
    return group or list(queued[:1])
