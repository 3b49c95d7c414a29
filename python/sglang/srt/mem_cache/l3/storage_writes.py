"""The backup thread: writes the pages of nodes to the store."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer, join_transfers
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.srt.mem_cache.l3.stored_pools import num_keys
from sglang.srt.mem_cache.storage.types import CacheOutcome
from sglang.srt.mem_cache.tree.hicache_metrics import Decision
from sglang.srt.mem_cache.tree.radix_key import PageHash
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.srt.utils.threads import leave_cores_to_model, lower_priority

if TYPE_CHECKING:
    from sglang.srt.mem_cache.l3.store_calls import StoreCalls

PAGES_PER_CALL: Final = 64
"""Pages of one get or put: enough to hide the round trip, few enough to end a read soon. A call
takes as much CPU time as ten more pages of 64 KB in it, or 500 more keys."""
_GATHER_S: Final = 0.1
"""How long a write waits for others to go in the same call. No request waits for writes."""


@dataclass(eq=False, slots=True)
class StorageOperation:
    """A write of a node's pages to L3. The node's host pages are pinned until it has ended."""

    node: TreeNode
    """The node; after a split the lower part, whose ancestors are the upper parts."""
    host_indices: torch.Tensor
    """int64 `[n]`: host slots."""
    hashes: list[PageHash]
    prefix_hashes: list[PageHash]
    after: StorageOperation | None
    """The write of the pages before these. If it fails, this one does: writes are prefix-closed."""
    epoch: int
    """The store's epoch when the write was queued."""
    extra_transfers: Sequence[PoolTransfer] = ()
    """Host slots in other pools that have their own, pinned as well; see `StoredPools.objects`."""
    outcome: CacheOutcome | None = None
    """Transfer thread, last of all; None while the write is under way."""

    @property
    def transfers(self) -> list[PoolTransfer]:
        """One transfer for each pool with slots of its own, the primary pool's first."""
        return [PoolTransfer(PoolName.KV, self.host_indices), *self.extra_transfers]

    @property
    def lacks_predecessor(self) -> bool:
        """True if the store lacks the pages before these, so that no reader could use these."""
        return self.after is not None and self.after.outcome is not CacheOutcome.LANDED


class StorageWrites:
    """The queue of writes and the work of the thread that makes them."""

    def __init__(self, store: StoreCalls) -> None:
        self._store = store
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
                group = queued[:1] if self._store.settings.pass_prefix_keys else next_group(queued)
                for operation in group[self._write(group) :]:
                    self._write([operation])
                del queued[: len(group)]

    def _queued(self) -> Iterator[StorageOperation]:
        """Take the writes that are in the queue now."""
        while not self.queue.empty():
            operation = self.queue.get()
            if operation is None:
                self.queue.put(None)  # the end: for the loop to see
                break
            yield operation

    def _write(self, group: Sequence[StorageOperation]) -> int:
        """Write several operations in one call, or a single operation in one or more calls.

        Returns how many operations have ended, counted from the first. A single operation always
        ends. One of several counts as not ended if it was not stored whole: the caller then writes
        it alone, to learn its result.
        """
        store, started = self._store, time.monotonic()
        landed, sent, outcome = 0, 0.0, CacheOutcome.FAILED
        with store.reporting_failures("write"):
            landed, sent, outcome = self._put(group)
        ended = group
        if len(group) > 1:
            ends = list(itertools.accumulate(len(operation.hashes) for operation in group))
            ended = group[: sum(end <= landed for end in ends)]
            whole = ends[len(ended) - 1] if ended else 0
            landed, sent, outcome = whole, sent * whole / max(1, landed), CacheOutcome.LANDED
        seconds = time.monotonic() - started
        if ended:
            store.metrics.backup_outcomes.labels(outcome.value).inc(len(ended))
            store.metrics.transfer_seconds.labels("backup").observe(seconds)
        if ended and not outcome:
            refused = sum(len(operation.hashes) for operation in ended) - landed
            tokens = refused * store.page_size
            store.metrics.decisions.note(Decision.NO_WRITE, outcome.value, tokens)
        if landed:
            store.metrics.backuped.inc(landed * store.page_size)
        if sent:
            rate = sent * store.page_bytes / max(seconds, 1e-9)
            store.metrics.backup_bandwidth.set(rate / 1e9)
        for operation in ended:
            operation.after = None
            operation.outcome = outcome
        return len(ended)

    def _put(self, group: Sequence[StorageOperation]) -> tuple[int, float, CacheOutcome]:
        """Write the pages of operations, some at a time, until a part is refused.

        Returns:
            Number of leading pages whose parts of this rank are all in the store; how many of them
            this rank has written (a fraction of a page for some of its objects); why no more.
        """
        store, pools, first = self._store, self._store.pools, group[0]
        hashes = [page for operation in group for page in operation.hashes]
        if first.lacks_predecessor:
            return 0, 0.0, CacheOutcome.SHORT
        timeouts, total, sent = store.timeouts["set"], 0, 0.0
        before = first.prefix_hashes
        if len(group) > 1:
            # Each page once, and none that is written by this call itself.
            paths = itertools.chain.from_iterable(operation.prefix_hashes for operation in group)
            before = list(dict.fromkeys(paths).keys() - set(hashes))
        for begin in range(0, len(hashes), PAGES_PER_CALL):
            end = min(begin + PAGES_PER_CALL, len(hashes))
            objects = join_transfers(
                [pools.objects(one.transfers, one.hashes, begin, end) for one in group]
            )
            own = pools.to_write(objects)
            # Other ranks decide what becomes of the rest, also where the store fails on this one.
            if own and (timeouts.leading_allowed(hashes) < len(hashes) or store.breaker.is_open):
                return total, sent, CacheOutcome.UNAVAILABLE
            prefix = [*before, *hashes[:begin]]
            landed, why = store.transfer("set", hashes[begin:end], own, prefix)
            total += landed
            sent += landed if own is objects else landed * num_keys(own) / num_keys(objects)
            if not why:
                if len(group) == 1:
                    store.log.warning(
                        f"set-{why}", "L3: page %d of %d was not written: %s; nor is what follows "
                        "it", total, len(hashes), why.value,
                    )  # fmt: skip
                return total, sent, why
        return total, sent, CacheOutcome.LANDED


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
