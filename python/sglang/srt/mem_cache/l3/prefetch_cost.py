"""The prefetch cost model: compares reading a prompt from L3 with computing it.

Both are queues: one thread reads prompts one after the other, one device computes them. A prompt
joins the queue that ends sooner, so that a burst is divided between the two. A read that would be
much slower is *rejected*, so it does not begin; one that computing is going to overtake is
*cancelled*. While L3 is *silent*, no request waits for it longer than computing takes.

Decisions depend on measured rates, on the scheduler's queue and on progress, all as the ranks
agreed on them in this tick or the last: all ranks decide the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from sglang.srt.mem_cache.base_prefix_cache import Workload
from sglang.srt.mem_cache.l3.prefetch_table import (
    PrefetchOperation,
    PrefetchPolicy,
    PrefetchTable,
)
from sglang.srt.mem_cache.tree.tick_sync import PrefetchProgress, Rates

_CANCEL_MARGIN: Final = 1.25
"""A read may take longer than computing by this factor: it leaves the device to other requests and
to decoding, and rates are known to about ten percent."""
_CANCEL_SLACK_S: Final = 0.01
"""A read may take longer by this time as well: no client notices it, and a cancellation loses what
a call has half read."""
_START_MARGIN: Final = 2.0
"""A read that looks slower than computing by this factor is rejected. It is larger than
`_CANCEL_MARGIN` because the hit is not known yet."""
_PROBE_EVERY: Final = 32
"""Every 32nd of the reads given up in a row is made after all: stores and networks recover."""


class PendingRead(NamedTuple):
    """A prompt that waits for L3. Tokens."""

    unread: int
    """Tokens that the thread has still to read."""
    missing: int
    """Tokens that need not be computed if they are read."""
    uncached: int
    """Tokens to be computed if nothing more is read: `missing`, and those that the store lacks."""
    is_probe: bool = False
    """True if the read is not cancelled, even if computing would end sooner."""


def slower_reads(
    reads: Sequence[PendingRead], rates: Rates, *, ahead: int, waiting: int
) -> list[bool]:
    """For each read, True if it should be cancelled because computing would end sooner.

    Args:
        reads: In the order in which they are read.
        rates: If one is unknown, no read is cancelled.
        ahead: Tokens that the thread reads before them and that no request waits for.
        waiting: Tokens that wait to be computed already.
    """
    cancelled = []
    for read in reads:
        later = _is_later(ahead + read.unread, waiting + read.missing, rates, _CANCEL_MARGIN)
        is_cancelled = later and not read.is_probe
        cancelled.append(is_cancelled)
        # A cancelled prompt joins the queue of computing; others stay in the queue of reads.
        if is_cancelled:
            waiting += read.uncached
        else:
            ahead += read.unread
    return cancelled


def is_rejected(tokens: int, rates: Rates, *, ahead: int, waiting: int) -> bool:
    """True if a read of `tokens` should not begin, because computing them would end much sooner.

    Args:
        tokens: Tokens to be read.
        rates: If one is unknown, nothing is rejected.
        ahead: Tokens that are known to be read before it.
        waiting: Tokens that wait to be computed already.
    """
    return _is_later(ahead + tokens, waiting + tokens, rates, _START_MARGIN)


def outlasts(silence_ms: int, to_compute: int, rates: Rates) -> bool:
    """True if L3 has been silent for longer than `to_compute` tokens take; see `Progress`.

    A request that waits so long, and then computes, takes at most twice the time of the better
    choice, whenever L3 answers: the ski-rental rule of Karlin et al., "Competitive Snoopy Caching"
    (1988).
    """
    return silence_ms * rates.prefills > 1000 * to_compute if rates.prefills else silence_ms > 0


def _is_later(to_read: int, to_compute: int, rates: Rates, margin: float) -> bool:
    if not all(rates):
        return False
    return to_read / rates.reads > margin * to_compute / rates.prefills + _CANCEL_SLACK_S


class PrefetchCostModel:
    """Decides for one tree which reads begin and which are cancelled. Scheduler thread only.

    Args:
        page_size: Tokens.

    Attributes:
        workload: Tells how much waits to be computed; by default nothing does.
        waiting: Tokens that wait to be computed in this tick; None: not looked up yet, as at the
            begin of each tick.
        given_up: Reads that were rejected or cancelled since pages last landed.
    """

    def __init__(self, table: PrefetchTable, page_size: int) -> None:
        self._table = table
        self._page_size = page_size
        self.workload: Callable[[], Workload] = lambda: Workload(0, {})
        self.waiting: int | None = None
        self.given_up = 0

    def may_begin(self, request_id: str, tokens: int, policy: PrefetchPolicy, rates: Rates) -> bool:
        """True if a read of `tokens` for a new request may begin.

        Args:
            rates: Rates that the ranks agreed on last.
        """
        if policy is PrefetchPolicy.WAIT_COMPLETE or not all(rates):
            return True
        waiting = self._waiting_before(request_id)
        known = [read for read in self._awaited() if read.progress.hit >= 0]
        ahead = sum(self._pending(read, {}).unread for read in known)
        if not is_rejected(tokens, rates, ahead=ahead, waiting=waiting):
            return True
        if not self._may_give_up():
            return True
        self.waiting = waiting + tokens
        return False

    def is_hopeless(
        self, request_id: str, tokens: int, policy: PrefetchPolicy, rates: Rates, silence_ms: int
    ) -> bool:
        """True if a new request must not wait for a read of `tokens`, since L3 is silent; `rates`
        as for `may_begin`."""
        if not silence_ms or policy is PrefetchPolicy.BEST_EFFORT:
            return False
        waiting = self._waiting_before(request_id)
        if not outlasts(silence_ms, waiting + tokens, rates):
            return False
        self.waiting = waiting + tokens
        return True

    def cancel_unanswered(
        self, policy: PrefetchPolicy, rates: Rates, silence_ms: int
    ) -> list[PrefetchOperation]:
        """Cancel the reads for which L3 has been silent for too long, and return them. All of them,
        with those that measure L3: the call that hangs goes on, and its end tells enough."""
        if not silence_ms or policy is PrefetchPolicy.BEST_EFFORT:
            return []
        work = self.workload()
        waiting = self._to_compute(work)
        cancelled = []
        for read in self._awaited():
            pending = self._pending(read, work.waiting)
            if outlasts(silence_ms, waiting + pending.missing, rates):
                read.cancel()
                cancelled.append(read)
                waiting += pending.uncached
        return cancelled

    def _waiting_before(self, request_id: str) -> int:
        """Tokens that wait to be computed before a new request's."""
        if self.waiting is None:
            work = self.workload()
            self.waiting = self._to_compute(work) - work.waiting.get(request_id, 0)
        return self.waiting

    def cancel_slower(self, policy: PrefetchPolicy, rates: Rates) -> list[PrefetchOperation]:
        """Cancel the reads that computing would overtake, and return them; `rates` as for
        `may_begin`."""
        # Requests do not wait under `best_effort`, and wait to the end under `wait_complete`.
        if policy is not PrefetchPolicy.TIMEOUT or not all(rates):
            return []
        awaited = self._awaited()
        if not awaited:
            return []
        work = self.workload()
        slower = slower_reads(
            [self._pending(read, work.waiting) for read in awaited],
            rates,
            ahead=self.abandoned_tokens(),
            waiting=self._to_compute(work),
        )
        cancelled = []
        for read in itertools.compress(awaited, slower):
            if self._may_give_up():
                read.cancel()
                cancelled.append(read)
            else:
                read.is_probe = True
        return cancelled

    def _may_give_up(self) -> bool:
        self.given_up += 1
        return self.given_up % _PROBE_EVERY != 0

    # ---- tokens to be read and to be computed, from agreed progress -------------------------

    def _awaited(self) -> list[PrefetchOperation]:
        """The reads that requests wait for and that may bring more, in their order."""
        return [read for read in self._table.reads if read.is_reading]

    def _pending(self, read: PrefetchOperation, waiting: Mapping[str, int]) -> PendingRead:
        """How much of an awaited read is left.

        Args:
            waiting: Tokens of each request's prompt that no tier had when it arrived.
        """
        # Until the store answers, it is taken to have all pages.
        missing = max(0, read.reach - read.progress.landed) * self._page_size
        # A prompt that is read by several operations counts with the last of them.
        last = [rid for rid in read.needs if self._table.reads_of(rid)[-1] is read]
        rests = [max(0, waiting.get(rid, 0) - self._landed(rid)) for rid in last]
        return PendingRead(
            unread=max(0, missing - self._half_of_call(read.progress)),
            missing=missing,
            uncached=max(missing, sum(rests)),
            is_probe=read.is_probe,
        )

    def abandoned_tokens(self) -> int:
        """Tokens that are read before the first awaited read and that no request waits for. Call
        it right after the table has taken the agreed progress."""
        before = itertools.takewhile(lambda read: not read.is_reading, self._table.reads)
        calls = [self._half_of_call(read.progress) for read in before]
        return sum(calls) + self._table.stuck_tokens() // 2

    def _to_compute(self, work: Workload) -> int:
        return work.computing + sum(itertools.starmap(self.uncached, work.waiting.items()))

    def uncached(self, request_id: str, tokens: int) -> int:
        """How many of a request's `tokens` have to be computed: none while L3 may bring them."""
        reads = self._table.reads_of(request_id)
        if reads and reads[-1].is_reading:
            return 0
        return max(0, tokens - self._landed(request_id))

    def _landed(self, request_id: str) -> int:
        """Tokens that have been read for a request."""
        reads = self._table.reads_of(request_id)
        pages = [min(read.progress.landed, read.needs[request_id]) for read in reads]
        return sum(pages) * self._page_size

    def _half_of_call(self, progress: PrefetchProgress) -> int:
        """Half the tokens of the call under way, the average part that it has done."""
        pages = 0 if progress.ended else max(0, progress.handed - progress.landed)
        return pages * self._page_size // 2
