"""Decides which reads from L3 are begun, and which are cut because computing would end sooner.

The rule is in `fetch_worth.py`. This file collects its inputs: the tokens that the reads under way
have still to bring, and the tokens that wait to be computed. Both are the same on every rank, since
they come from the scheduler's queue and from what the ranks agreed on in this tick or the last.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final

from sglang.srt.mem_cache.l3.fetch_worth import is_hopeless, overtaken
from sglang.srt.mem_cache.l3.hicache_prefetch import PrefetchBoard, PrefetchPolicy
from sglang.srt.mem_cache.l3.storage_operation import PrefetchOperation
from sglang.srt.mem_cache.tree.ballot import Rates
from sglang.srt.mem_cache.tree.base_prefix_cache import Workload

_PROBE_EVERY: Final = 32
"""Every 32nd of the reads given up in a row is made after all: stores and networks recover."""


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
    """Reads in flight hold their whole share of L2, or all slots of the ballot."""
    SLOWER = "slower_than_computing"
    """Computing is faster than reading."""
    NO_HOST_MEMORY = "no_host_memory"
    """L2 is full of pages in use."""


EXPECTED: Final = (NoRead.TOO_SHORT, NoRead.JOINED, NoRead.SAMPLE, NoRead.MISS)
"""Reasons that are not logged, since they are expected."""


class FetchChoice:
    """Decides for one tree. Scheduler thread only.

    Args:
        board: The reads under way.
    """

    def __init__(self, board: PrefetchBoard) -> None:
        self._board = board
        self._workload: Callable[[], Workload] | None = None
        self._waiting: int | None = None
        self._given_up = 0

    def watch(self, workload: Callable[[], Workload]) -> None:
        """Set the function that tells how much waits to be computed. Without it nothing waits."""
        self._workload = workload

    def begin_tick(self) -> None:
        """Begin a tick: forget what was known of the queue."""
        self._waiting = None

    def may_begin(self, request_id: str, tokens: int, policy: PrefetchPolicy, rates: Rates) -> bool:
        """Whether to begin a read of `tokens` for a new request.

        Args:
            rates: Rates that the ranks agreed on last.
        """
        if policy is PrefetchPolicy.WAIT_COMPLETE or not all(rates):
            return True
        if self._waiting is None:
            work = self._look()
            self._waiting = self._to_compute(work) - work.waiting.get(request_id, 0)
        ahead = self._board.unread_tokens()
        if not is_hopeless(tokens, rates, ahead=ahead, waiting=self._waiting):
            return True
        if not self._may_give_up():
            return True
        self._waiting += tokens
        return False

    def cut_overtaken(self, policy: PrefetchPolicy, rates: Rates) -> list[PrefetchOperation]:
        """Cut the reads that computing would overtake, and return them; `rates` as for
        `may_begin`."""
        # With best effort no request waits, and with `wait_complete` all wait to the end.
        if policy is not PrefetchPolicy.TIMEOUT or not all(rates):
            return []
        awaited = self._board.awaited_reads()
        if not awaited:
            return []
        work = self._look()
        later = overtaken(
            [self._board.pending(one, work.waiting) for one in awaited],
            rates,
            ahead=self._board.abandoned_tokens(),
            waiting=self._to_compute(work),
        )
        cut = []
        for read, is_later in zip(awaited, later, strict=True):
            if not is_later:
                continue
            if self._may_give_up():
                read.operation.overtake()
                cut.append(read.operation)
            else:
                read.operation.is_spared = True
        return cut

    def note_read(self) -> None:
        """Note that pages have been read, so that the rate of reads is known."""
        self._given_up = 0

    def _may_give_up(self) -> bool:
        self._given_up += 1
        return self._given_up % _PROBE_EVERY != 0

    def _look(self) -> Workload:
        return Workload(0, {}) if self._workload is None else self._workload()

    def _to_compute(self, work: Workload) -> int:
        return work.computing + sum(
            self._board.uncached(request_id, tokens) for request_id, tokens in work.waiting.items()
        )
