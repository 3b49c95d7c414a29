"""The prefetch thread: asks how far the store reaches into prompts, and reads those pages."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.srt.mem_cache.l3.storage_writes import PAGES_PER_CALL
from sglang.srt.mem_cache.l3.stored_pools import usable_pages
from sglang.srt.mem_cache.storage.types import CacheOutcome
from sglang.srt.mem_cache.tree.hicache_metrics import Decision
from sglang.srt.mem_cache.tree.radix_key import PageHash
from sglang.srt.utils.threads import leave_cores_to_model

if TYPE_CHECKING:
    from sglang.srt.mem_cache.l3.prefetch_table import PrefetchOperation
    from sglang.srt.mem_cache.l3.store_calls import StoreCalls

logger = logging.getLogger(__name__)

_CHECK_PAUSE_S: Final = 30.0
_LONGEST_CHECK_PAUSE_S: Final = 600.0
"""Pauses between two checks that L3 still has its pages. The pause doubles after a check that found
a page missing, up to the longest, so that a store that is too small is not filled over and over."""
_STUCK_SHARE: Final = 8
"""A get is given at most this fraction of the pages of L2, since it keeps them while it hangs."""
_DEFAULT_RETRIES: Final = 8
"""Repetitions of a look-up, and milliseconds between them, where one of the two is not given."""
_PROMPTS_PER_QUESTION: Final = 16
_PAGES_PER_QUESTION: Final = 1024
"""Most pages of all prompts of a question together; a single prompt may have more."""


@dataclass(frozen=True, slots=True)
class LookUpRetries:
    """Repetitions of look-ups that missed, while requests wait: a writer may not have committed
    yet."""

    attempts: int = 0
    pause_s: float = 0.0

    @classmethod
    def of(cls, max_attempts: int | None, poll_interval_ms: int | None) -> LookUpRetries:
        """The repetitions that flags ask for; None: the flag was not given."""
        if max_attempts is None and poll_interval_ms is None:
            return cls()
        attempts = _DEFAULT_RETRIES if max_attempts is None else max_attempts
        pause = _DEFAULT_RETRIES if poll_interval_ms is None else poll_interval_ms
        return cls(attempts, pause / 1000)


NO_RETRIES: Final = LookUpRetries()


@dataclass(eq=False, slots=True)
class CheckOperation:
    """A question whether L3 still has all pages of a prompt that was written to it."""

    hashes: list[PageHash]
    """Hashes of pages, from the first page of the prompt on."""
    epoch: int
    """The store's epoch when the question was queued."""
    asked_at: int
    """`now` of the log of events then; see `KVEventLog.not_in_store`."""
    there: int | None = None
    """Transfer thread: pages that the store has, from the first on; all if it does not answer. None
    while the check is under way."""


class StorageReads:
    """The queue of reads and the work of the thread that makes them."""

    def __init__(self, store: StoreCalls, retries: LookUpRetries) -> None:
        self._store = store
        self._retries = retries
        self._missed: list[tuple[float, PrefetchOperation]] = []
        """Reads whose look-up is repeated, each with `time.monotonic()` seconds, ascending."""
        self._check_pause = _CHECK_PAUSE_S
        self._check_at = 0.0
        """`time.monotonic()` seconds before which no check is made."""
        self.queue: queue.SimpleQueue[Sequence[PrefetchOperation] | CheckOperation | None]
        self.queue = queue.SimpleQueue()
        """None ends the thread."""

    def run(self) -> None:
        """Body of the prefetch thread."""
        leave_cores_to_model()
        while (work := self._next_work()) is not None:
            if isinstance(work, CheckOperation):
                work.there = self._check(work.hashes)
                continue
            for group in prompts_per_question(work):
                self._prefetch_group(group)
        for _, operation in self._missed:
            self._end(operation, CacheOutcome.MISS, 0.0)

    def _next_work(self) -> Sequence[PrefetchOperation] | CheckOperation | None:
        """The next work of the queue, else reads whose look-up is to be repeated now."""
        while True:
            pause = self._missed[0][0] - time.monotonic() if self._missed else None
            try:
                # First what is new: the store may have it.
                return self.queue.get(timeout=None if pause is None else max(0.0, pause))
            except queue.Empty:
                now = time.monotonic()
            due = [read for at, read in self._missed if at <= now]
            if due:
                self._missed = self._missed[len(due) :]
                return due

    def _prefetch_group(self, group: Sequence[PrefetchOperation]) -> None:
        """Ask about several prompts, end those with nothing to read, and read the others."""
        started = time.monotonic()
        to_read: list[PrefetchOperation] = []
        for operation, answer in zip(group, self._ask(group), strict=True):
            if self._is_repeated(operation, answer):
                continue
            operation.hit_pages = 0 if isinstance(answer, CacheOutcome) else answer
            if isinstance(answer, CacheOutcome):
                self._end(operation, answer, time.monotonic() - started)
            elif answer < self._store.threshold_pages:
                outcome = CacheOutcome.REVOKED if answer else CacheOutcome.MISS
                self._end(operation, outcome, time.monotonic() - started)
            else:
                operation.answered.set()
                to_read.append(operation)
        for operation in to_read:
            started = operation.began = time.monotonic()
            ended = CacheOutcome.FAILED
            with self._store.reporting_failures("read"):
                ended = self._read_pages(operation)
            self._end(operation, ended, time.monotonic() - started)

    def _is_repeated(self, operation: PrefetchOperation, answer: int | CacheOutcome) -> bool:
        """True if the look-up missed and is going to be made again."""
        is_miss = answer is CacheOutcome.NO_STATE or (
            not isinstance(answer, CacheOutcome) and answer < self._store.threshold_pages
        )
        if not is_miss or operation.is_terminated or operation.misses == self._retries.attempts:
            return False
        operation.misses += 1
        operation.whole_pages = len(operation.hashes)
        self._missed.append((time.monotonic() + self._retries.pause_s, operation))
        return True

    def _ask(self, group: Sequence[PrefetchOperation]) -> list[int | CacheOutcome]:
        """For each prompt the pages that the store has, or why that is not known."""
        known: dict[int, int | CacheOutcome] = {
            index: outcome_now(operation) if operation.is_terminated else CacheOutcome.UNAVAILABLE
            for index, operation in enumerate(group)
        }
        timeouts = self._store.timeouts["get"]
        reaches = [timeouts.leading_allowed(operation.hashes) for operation in group]
        asked = [i for i, one in enumerate(group) if reaches[i] and not one.is_terminated]
        if not asked or self._store.breaker.is_open:
            return list(known.values())
        known.update(dict.fromkeys(asked, CacheOutcome.FAILED))
        with self._store.reporting_failures("read"):
            hits = self._store.hit_pages(
                [group[i].hashes[: reaches[i]] for i in asked],
                [group[i].prefix_hashes for i in asked],
            )
            for i, hit in zip(asked, hits, strict=True):
                known[i] = hit.pages
                if not group[i].has_states:
                    if hit.pages < reaches[i]:
                        group[i].whole_pages = hit.pages
                # A hit ends with a state, if there are states, and the next page may be there.
                elif hit.pages < self._store.threshold_pages <= hit.primary_pages:
                    known[i] = CacheOutcome.NO_STATE
        return list(known.values())

    def _read_pages(self, operation: PrefetchOperation) -> CacheOutcome:
        """Read the pages that the store has, some at a time, until a part is missing."""
        store, hashes, pages = self._store, operation.hashes, operation.hit_pages
        extra, read, ended = operation.extra_transfers, 0, CacheOutcome.LANDED
        for begin in range(0, pages, store.pages_per_read):
            end = min(begin + store.pages_per_read, pages)
            if not hand_over(operation, end):
                return outcome_now(operation)
            started = time.monotonic()
            transfers = [PoolTransfer(PoolName.KV, operation.host_indices), *extra]
            objects = store.pools.objects(transfers, hashes, begin, end, last=pages)
            prefix = [*operation.prefix_hashes, *hashes[:begin]]
            landed, why = store.transfer("get", hashes[begin:end], objects, prefix)
            # Pages that land after the end of the wait are of no use.
            ended = outcome_now(operation)
            read += landed
            operation.landed_pages = usable_pages(read, extra, hashes, pages) if extra else read
            # For each call, not for each prompt: long prompts then give rates while they are read.
            store.read_rate.add(landed * store.page_size, time.monotonic() - started)
            if not why:
                if why in (CacheOutcome.MISS, CacheOutcome.DAMAGED):
                    operation.whole_pages = begin + landed
                store.log.warning(
                    f"get-{why}", "L3: page %d of %d is %s; the rest is recomputed",
                    begin + landed, pages, why.value,
                )  # fmt: skip
                return why
        store.breaker.reset()
        return ended

    def _end(self, operation: PrefetchOperation, outcome: CacheOutcome, seconds: float) -> None:
        metrics = self._store.metrics
        metrics.prefetch_outcomes.labels(outcome.value).inc()
        metrics.transfer_seconds.labels("prefetch").observe(seconds)
        if not outcome:
            missing = len(operation.hashes) - operation.landed_pages
            tokens = missing * self._store.page_size
            metrics.decisions.note(Decision.READ_ENDED, outcome.value, tokens)
        if operation.landed_pages:
            metrics.prefetched.inc(operation.landed_pages * self._store.page_size)
            rate = operation.landed_pages * self._store.page_bytes / max(seconds, 1e-9)
            metrics.prefetch_bandwidth.set(rate / 1e9)
        operation.ended = time.monotonic()
        operation.outcome = outcome
        operation.answered.set()

    def _check(self, hashes: Sequence[PageHash]) -> int:
        """Number of leading pages of `hashes` that the store still has. All if it is too early to
        ask, or the store does not answer."""
        if self._store.breaker.is_open or time.monotonic() < self._check_at:
            return len(hashes)
        there: int | None = None
        with self._store.reporting_failures("question"):
            ((there, _),) = self._store.hit_pages([hashes], [()])
        if there is None:
            return len(hashes)
        is_whole = there == len(hashes)
        longer = min(2 * self._check_pause, _LONGEST_CHECK_PAUSE_S)
        self._check_pause = _CHECK_PAUSE_S if is_whole else longer
        self._check_at = time.monotonic() + self._check_pause
        if is_whole:
            return there
        self._store.metrics.pages.labels("check", CacheOutcome.MISS.value).inc()
        logger.warning(
            "L3 has lost page %d of %d of a prompt: whatever prompts use is looked for there "
            "again, and written where it is missing", there, len(hashes),
        )  # fmt: skip
        return there


def pages_per_read(host_pages: int) -> int:
    """Pages of one get where L2 has `host_pages` pages."""
    return max(1, min(PAGES_PER_CALL, host_pages // _STUCK_SHARE))


def outcome_now(operation: PrefetchOperation) -> CacheOutcome:
    """The outcome of a read that ends now. LATE if it was terminated before all awaited pages that
    the store has had landed."""
    if operation.is_cancelled:
        return CacheOutcome.OVERTAKEN
    agreed = operation.progress.hit
    hit = operation.hit_pages if agreed < 0 else agreed
    awaited = operation.wanted_pages if hit < 0 else min(operation.wanted_pages, hit)
    is_late = operation.is_terminated and operation.landed_pages < awaited
    return CacheOutcome.LATE if is_late else CacheOutcome.LANDED


def hand_over(operation: PrefetchOperation, pages: int) -> bool:
    """True if the store may write to the first `pages` pages of a read. Call it before it does.

    False if no request waits for more than the store has been given already, or if another rank
    lacks the pages that follow. This thread writes the number and then reads `is_terminated`; the
    scheduler writes `is_terminated` and then reads the number, so at least one of them sees the
    other's write.
    """
    hit = operation.progress.hit
    wanted = operation.wanted_pages if hit < 0 else min(operation.wanted_pages, hit)
    if operation.handed_pages >= wanted:
        return False
    operation.handed_pages = pages
    return not operation.is_terminated


def prompts_per_question(
    operations: Sequence[PrefetchOperation],
) -> Iterator[list[PrefetchOperation]]:
    """Prompts in groups, in their order; one call asks the store about a group."""
    group: list[PrefetchOperation] = []
    pages = 0
    for operation in operations:
        pages_then = pages + len(operation.hashes)
        if group and (len(group) == _PROMPTS_PER_QUESTION or pages_then > _PAGES_PER_QUESTION):
            yield group
            group, pages = [], 0
        group.append(operation)
        pages += len(operation.hashes)
    yield group
