"""The reads from L3 under way, and which request waits for which of their pages.

No bytes are moved here. `StoragePrefetch` starts operations, feeds each tick's agreed progress, and
takes back the pages that landed and the slots to be freed.

A read is *under way* while requests wait for it. A request whose prompt is partly being read
already waits for those pages too, and reads only the pages after them. It leaves the read when it
is scheduled or aborted, or when the tree has the pages that it waits for. A read without requests
is *terminated*: the pages that landed have been published by then. Its other host pages are freed
at the next tick, except for pages in a call under way: they stay with the read until that call
returns. A call to Mooncake can take minutes if a store node hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.storage.types import CacheOutcome
from sglang.srt.mem_cache.tree.radix_key import PageHash, RadixKey
from sglang.srt.mem_cache.tree.tick_sync import MAX_PREFETCHES, PrefetchProgress
from sglang.srt.messages.cache_report import CacheReport, Tier

if TYPE_CHECKING:
    from sglang.srt.mem_cache.tree.host_tier import HostTier

_NO_PROGRESS: Final = PrefetchProgress()
_ANSWER_S: Final = 0.001
"""A store answers in a tenth to a third of it; the next tick is about ten times as far away."""


class PrefetchPolicy(StrEnum):
    """How long a request waits for its prefetch."""

    BEST_EFFORT = "best_effort"
    """The request does not wait: it uses the pages that have landed."""
    WAIT_COMPLETE = "wait_complete"
    """The request waits until the read ends, at most `prefetch_timeout_max`, however slow L3 is;
    but see `PrefetchCostModel.cancel_unanswered`."""
    TIMEOUT = "timeout"
    """The request waits a base time plus some for each 1,024 tokens, at most as long as computing
    takes."""


@dataclass(eq=False, slots=True)
class PrefetchOperation:
    """A read of the pages of a prompt after those that L1 and L2 have or that other reads bring.

    A small state machine with one terminal state. The scheduler thread makes it, the prefetch
    thread carries it out. The docstring of a field names the thread that writes it; the other
    thread sees single assignments of ints and flags.

    It owns `host_indices` until they are published (pages that landed) or released (the others),
    and `states` until these are published or released. Other slots of `extra_transfers` stay the
    caller's.

    States that are read follow the last page that the store has of the prompt: such a read is of
    use when all of it has landed, and not before.
    """

    request_id: str
    """The request that began it; others may wait for it too."""
    key: RadixKey
    """The whole prompt up to the last page asked for. Publishing matches it again, so no node
    needs to be pinned, and splits and evictions meanwhile do no harm."""
    start: int
    """Tokens of `key` that were in L1 or L2 at the start, or are read before these."""
    host_indices: torch.Tensor
    """int64 `[len(key) - start]`: host slots of the pages asked for."""
    hashes: list[PageHash]
    """One for each page asked for."""
    prefix_hashes: list[PageHash]
    """Hashes of the pages before."""
    deadline: float
    """`time.monotonic()` seconds."""
    epoch: int
    """The store's epoch when the read began; in a later one its objects may be gone."""
    asked_at: int = 0
    """`now` of the log of events when the read began; see `KVEventLog.not_in_store`."""
    extra_transfers: Sequence[PoolTransfer] = ()
    """Host slots in other pools that have their own; see `StoredPools.objects`. Auxiliary pools
    come along by themselves."""
    states: Mapping[HostTier, torch.Tensor] = field(default_factory=dict)
    """Scheduler: int64 `[1]` each, the host slots of the states that `extra_transfers` names, while
    they are this operation's."""

    misses: int = 0
    """Transfer thread: look-ups that missed and were repeated."""
    hit_pages: int = -1
    """Transfer thread: pages that the store reported to this rank; -1 while unknown."""
    handed_pages: int = 0
    """Transfer thread: pages that the store may write to, from the first on. Final once the read
    is terminated."""
    landed_pages: int = 0
    """Transfer thread: pages that can be used, from the first on: all their parts are there and
    verified, and a state follows the last where a pool has states."""
    whole_pages: int = field(init=False)
    """Transfer thread: pages before the first that the store was found to lack, or to have
    damaged."""
    began: float = 0.0
    """Transfer thread: `time.monotonic()` at which it began to read pages; 0: it has not."""
    ended: float = 0.0
    """Transfer thread, before `outcome`: the same at the end."""
    outcome: CacheOutcome | None = None
    """Transfer thread, last of all: from now on it does not touch `host_indices`."""
    answered: threading.Event = field(default_factory=threading.Event)
    """Transfer thread: the store has answered for this prompt, or the operation has ended."""
    progress: PrefetchProgress = _NO_PROGRESS
    """Scheduler: progress that the ranks agreed on last."""
    needs: dict[str, int] = field(default_factory=dict)
    """Scheduler: by waiting request, how many of the pages it needs, counted from the first."""
    wanted_pages: int = field(init=False)
    """Scheduler: the most of `needs`. It is only ever lowered."""
    is_terminated: bool = False
    """Scheduler: no request waits for more pages. The transfer stops at its next step."""
    is_cancelled: bool = False
    """Scheduler, before `is_terminated`: computing the prompt ended sooner, or was going to."""
    is_probe: bool = False
    """Scheduler: the read is never cancelled, because it measures how fast reads are."""
    owned: torch.Tensor = field(init=False)
    """Scheduler: bool, as long as `host_indices`: the slots that are neither the tree's nor
    free."""

    def __post_init__(self) -> None:
        self.owned = torch.ones(len(self.host_indices), dtype=torch.bool)
        self.wanted_pages = self.whole_pages = len(self.hashes)

    @property
    def has_states(self) -> bool:
        """True if states are read with the pages."""
        return bool(self.extra_transfers)

    @property
    def owned_tokens(self) -> int:
        """Host tokens that are still this operation's."""
        return int(self.owned.sum())

    @property
    def is_reading(self) -> bool:
        """True if the read may bring more pages."""
        return not (self.progress.ended or self.is_cancelled)

    @property
    def reach(self) -> int:
        """Pages that have landed or may still land, as far as the store has answered."""
        if not self.is_reading:
            return self.progress.landed
        hit = self.progress.hit
        return self.wanted_pages if hit < 0 else min(self.wanted_pages, hit)

    @property
    def ending(self) -> CacheOutcome | None:
        """Why the read brings no more than what has landed; None: it may bring more."""
        if self.is_cancelled:
            return CacheOutcome.OVERTAKEN
        if not self.progress.ended or self.outcome is None:
            return None
        if self.outcome is not CacheOutcome.LANDED:
            return self.outcome
        # All that the store has was read on this rank. Another rank may have got less.
        is_common = self.progress.landed == self.landed_pages
        return CacheOutcome.MISS if is_common else CacheOutcome.SHORT

    def release(self, begin: int, end: int) -> torch.Tensor:
        """Give up all but the tokens from `begin` to `end`; returns the host slots."""
        freed = self.owned.clone()
        freed[begin : max(begin, end)] = False
        self.owned &= ~freed
        return self.host_indices[freed]

    def cancel(self) -> None:
        """End the read, because computing the prompt is going to end sooner."""
        self.is_cancelled = True
        self.is_terminated = True


class Joined(NamedTuple):
    """How much of a prompt is being read already."""

    tokens: int
    """The first tokens, which the request waits for."""
    rest: RadixKey
    """The tokens after them, which the request reads; empty where the store lacks them."""
    prior: PageHash | None
    """Hash of the page before `rest`."""


class PrefetchTable:
    """The reads of one scheduler. Scheduler thread only.

    Args:
        page_size: Tokens.

    Attributes:
        operations: In order of start, the reads under way, and those terminated that still own host
            pages or a host state. Read only.
        new: Reads that were not submitted yet, a part of `operations`. Read only.
        reports: Cache reports of the waiting requests that asked for one. Reads note in them what
            the store had, and why they fell short.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.operations: list[PrefetchOperation] = []
        self._by_request: dict[str, list[PrefetchOperation]] = {}
        """The reads that a request waits for, in the order of its pages."""
        self._by_page: dict[PageHash, PrefetchOperation] = {}
        self.new: list[PrefetchOperation] = []
        self.reports: dict[str, CacheReport] = {}
        self._unanswered: list[PrefetchOperation] = []

    @property
    def reads(self) -> list[PrefetchOperation]:
        """The reads under way, in order of start."""
        return [read for read in self.operations if read.needs]

    def room(self, tokens: int) -> int:
        """How many host tokens a new read may take, where all reads may hold `tokens`; 0: the
        tick sync has no slot for another read."""
        if len(self.operations) >= MAX_PREFETCHES:
            return 0
        return tokens - sum(operation.owned_tokens for operation in self.operations)

    def stuck_tokens(self) -> int:
        """Host tokens of reads that were terminated, and whose call has not returned."""
        return sum(read.owned_tokens for read in self.operations if not read.needs)

    # ---- who waits for what ------------------------------------------------------------------

    def start(self, operation: PrefetchOperation) -> None:
        """Add a read. It is submitted with the others of the same tick; see `take_new`."""
        self.operations.append(operation)
        self._by_page.update(dict.fromkeys(operation.hashes, operation))
        self._let_wait(operation.request_id, operation, operation.wanted_pages)
        self.new.append(operation)

    def join(self, request_id: str, new: RadixKey, start: int, prior: PageHash | None) -> Joined:
        """Let a request wait for the pages of its prompt that are being read. It waits no longer
        than the request that began the read.

        Args:
            request_id: A request that waits for nothing yet.
            new: The part of its prompt that neither L1 nor L2 has. Whole pages.
            start: Tokens of the prompt before `new`.
            prior: Hash of the page before `new`.
        """
        page, first = self._page_size, start
        while len(new):
            read = self._by_page.get(new[:page].page_hashes(page, prior)[0])
            if read is None or read.is_cancelled or read.progress.expired:
                break
            # Equal hashes of a page mean equal pages before it.
            before = start - read.start
            common = (before + read.key[start:].match(new, page)) // page
            asked = min(common, read.wanted_pages)
            if asked * page <= before:
                break
            reach = min(asked, read.reach)
            is_longer = len(new) > asked * page - before
            if read.has_states and not self._brings_state(read, reach, before, is_longer):
                break
            if reach * page > before:
                if not read.owned[before : reach * page].all():
                    # Some were published, and the tree has evicted them since.
                    break
                self._let_wait(request_id, read, reach)
            if reach < asked and not (read.has_states and is_longer):
                # The store lacks a page; the pages after it are of no use.
                return Joined(max(0, reach * page - before) + start - first, new[:0], prior)
            done = reach * page - before
            new, start, prior = new[done:], start + done, read.hashes[reach - 1]
            if reach < asked:
                # The read ends at the last state of its own prompt. This one may have a later one.
                break
        return Joined(start - first, new, prior)

    def _brings_state(
        self, read: PrefetchOperation, reach: int, before: int, is_longer: bool
    ) -> bool:
        """True if a request may wait for the first `reach` pages of a read that brings a state.

        Args:
            before: Tokens of the read's prompt after its start that the request has already.
            is_longer: The request's prompt goes on where the read's ends.
        """
        if reach < read.reach:
            # The state follows pages that this prompt does not have.
            return False
        if not is_longer:
            return True
        # The store's answer decides where the read ends, so where the rest begins.
        return read.progress.hit >= 0 and reach * self._page_size > before

    def _let_wait(self, request_id: str, read: PrefetchOperation, pages: int) -> None:
        read.needs[request_id] = pages
        self._by_request.setdefault(request_id, []).append(read)

    def reads_of(self, request_id: str) -> list[PrefetchOperation]:
        """The reads that a request waits for, in the order of its pages."""
        return self._by_request.get(request_id, []).copy()

    def leave(self, request_id: str) -> list[PrefetchOperation]:
        """Remove a request from its reads. Returns the reads that are terminated by that, in the
        order of its pages; the pages that are not published are freed at later ticks."""
        reads = self._by_request.pop(request_id, [])
        for read in reads:
            self._drop_need(read, request_id, CacheOutcome.LATE)
            self._narrow(read)
        self.reports.pop(request_id, None)
        return [read for read in reads if not read.needs]

    def note_known(self, read: PrefetchOperation, tokens: int) -> None:
        """Note that the tree has the first `tokens` of a read's prompt: requests that need no more
        leave the read."""
        pages = (tokens - read.start) // self._page_size
        if read.progress.ended and pages >= read.progress.landed:
            # The read has ended, and the tree has every page that landed.
            pages = len(read.hashes)
        for request_id in [rid for rid, needed in read.needs.items() if needed <= pages]:
            self._drop_need(read, request_id, CacheOutcome.OVERTAKEN)
            self._by_request[request_id].remove(read)
            if not self._by_request[request_id]:
                del self._by_request[request_id]
        if not read.needs and not read.progress.ended:
            read.cancel()
        self._narrow(read)

    def _drop_need(self, read: PrefetchOperation, request_id: str, cut: CacheOutcome) -> None:
        """Let a request need nothing of a read any more, and tell its report what that brought;
        `cut`: why the request leaves a read that goes on."""
        needed = read.needs.pop(request_id)
        if (report := self.reports.get(request_id)) is not None:
            _report_read(report, read, needed, self._page_size, cut)

    def _narrow(self, read: PrefetchOperation) -> None:
        """Read no further than the requests need; terminate a read that has none."""
        if read.needs:
            read.wanted_pages = max(read.needs.values())
            return
        read.is_terminated = True
        for page in read.hashes:
            if self._by_page.get(page) is read:
                del self._by_page[page]

    def check(self) -> None:
        """Assert that reads and requests know of each other."""
        waits = [(rid, id(read)) for rid, reads in self._by_request.items() for read in reads]
        needs = [(rid, id(read)) for read in self.reads for rid in read.needs]
        assert sorted(waits) == sorted(needs), (
            f"{len(waits)} waits of requests, {len(needs)} needs of reads"
        )
        assert all(self._by_request.values()), "a request waits for nothing"
        for read in self.operations:
            wanted = read.wanted_pages
            assert read.is_terminated or read.needs, "a read goes on without a request"
            assert wanted == max(read.needs.values(), default=wanted), f"{wanted}: {read.needs}"
        assert set(self._by_page.values()) <= set(self.reads), "pages of no read"

    # ---- one tick ----------------------------------------------------------------------------

    def take_new(self) -> list[PrefetchOperation]:
        """The reads that were started since the last call, to be submitted now."""
        self._unanswered, self.new = self.new, []
        return self._unanswered

    def report(self, *, awaits_answers: bool) -> Sequence[PrefetchProgress]:
        """This rank's progress on each of `operations`.

        Args:
            awaits_answers: Wait for about a millisecond for the store's answers about new prompts,
                so that a prompt that the store does not have need not wait for the next tick.
        """
        if awaits_answers:
            until = time.monotonic() + _ANSWER_S
            for operation in self._unanswered:
                operation.answered.wait(max(0.0, until - time.monotonic()))
            self._unanswered = []
        now = time.monotonic()
        seen = []
        for operation in self.operations:
            # `ended` first: `landed_pages` is final once it is true.
            ended = operation.outcome is not None
            progress = PrefetchProgress(
                operation.hit_pages,
                operation.landed_pages,
                ended,
                now > operation.deadline,
                operation.handed_pages,
                operation.whole_pages,
            )
            seen.append(_with_state(operation, progress) if operation.has_states else progress)
        return seen

    def agree(
        self, agreed: Sequence[PrefetchProgress]
    ) -> tuple[list[torch.Tensor], list[tuple[HostTier, torch.Tensor]]]:
        """Take the progress that the ranks agreed on; returns the host slots of pages and of states
        that are to be freed now."""
        page = self._page_size
        pages: list[torch.Tensor] = []
        states: list[tuple[HostTier, torch.Tensor]] = []
        for read, progress in zip(self.operations, agreed, strict=True):
            read.progress = progress
            landed = progress.landed
            if not read.needs:
                # The store gets no more pages, so only the call under way may write.
                end = landed if progress.ended else max(landed, progress.handed)
                pages.append(read.release(landed * page, end * page))
                # The store may write to pages that it was handed until the read has ended.
                lets_go = progress.ended or not progress.handed
            else:
                lets_go = progress.ended and not landed
                if progress.ended and landed < len(read.hashes):
                    pages.append(read.release(0, landed * page))
                if lets_go:
                    self.note_known(read, read.start)
            if lets_go:
                states += read.states.items()
                read.states = {}
        self.operations = [
            read for read in self.operations if read.needs or read.owned.any() or read.states
        ]
        return [slots for slots in pages if len(slots)], states

    def may_schedule(self, request_id: str, policy: PrefetchPolicy) -> bool:
        """True if a request may be scheduled now. Depends only on agreed progress."""
        return policy is PrefetchPolicy.BEST_EFFORT or not any(
            read.is_reading
            and read.progress.landed < read.needs[request_id]
            and not read.progress.expired
            for read in self._by_request.get(request_id, ())
        )


def _report_read(
    report: CacheReport, read: PrefetchOperation, needed: int, page_size: int, cut: CacheOutcome
) -> None:
    """Note in the cache report of a request what `read` has brought to it.

    Args:
        needed: Pages of the read that the request needed.
        page_size: Tokens.
        cut: Why the request leaves a read that goes on.
    """
    landed = read.progress.landed
    stored = read.start + min(needed, max(0, read.progress.hit)) * page_size
    report.storage = max(report.storage or 0, stored - report.on_arrival)
    reason: CacheOutcome | None = None
    if landed < needed:
        ending = read.ending
        reason = cut if ending is None else ending
        report.cut(Tier.STORAGE, read.start + landed * page_size, reason)
    if read.began:
        tokens = min(landed, needed) * page_size
        report.add_span("l3_read", read.began, read.ended or time.monotonic(), tokens, reason)


def _with_state(operation: PrefetchOperation, progress: PrefetchProgress) -> PrefetchProgress:
    """The progress of a read that brings a state, as this rank reports it to the others.

    The state follows the pages of this rank's own hit. If the ranks agree on a shorter hit,
    no rank can use its state, so nothing counts as landed before they have agreed.
    """
    hit = 0 if progress.ended and progress.hit < 0 else progress.hit
    if hit == 0:
        return progress._replace(hit=0, landed=0)
    if operation.progress.hit < 0:
        return progress._replace(landed=0, ended=False)
    is_common = operation.progress.hit == operation.hit_pages
    return progress if is_common else progress._replace(landed=0)
