"""Reads from L3 under way: who waits for which of their pages, and how it is decided.

No bytes are moved here. The tree starts operations, feeds each tick's agreed progress, and takes
back what landed and what is to be freed.

Life of a read: *under way* while requests wait for it. Whoever comes while pages of its prompt are
being read waits for these as well, and reads itself only what follows them. A request leaves when
it is scheduled or aborted, or when the tree has what it waits for; a read that nobody waits for is
*cut*. What landed is published before that, by whoever may be scheduled. Of the rest of its host
pages, those that the store was not yet given to write to are free at the next tick; those of the
call under way when it was cut stay with it until that call has returned. Mooncake's can take
minutes, if a store node hangs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

import torch

from sglang.srt.mem_cache.l3.fetch_worth import PendingRead
from sglang.srt.mem_cache.l3.storage_operation import PrefetchOperation
from sglang.srt.mem_cache.tree.ballot import MAX_PREFETCHES, PrefetchProgress
from sglang.srt.mem_cache.tree.radix_key import PageHash, RadixKey

_ANSWER_S: Final = 0.001
"""Asking a store takes a tenth of it to a third; a tick that has to be waited for, ten times it."""
_NO_PROGRESS: Final = PrefetchProgress()


class PrefetchPolicy(StrEnum):
    """How long a request waits for its prefetch."""

    BEST_EFFORT = "best_effort"
    """Not at all: it takes what has landed."""
    WAIT_COMPLETE = "wait_complete"
    """To the end, at most `prefetch_timeout_max`, however slow L3 is."""
    TIMEOUT = "timeout"
    """A base and some more for each 1,024 tokens, and no longer than computing would take."""


@dataclass(eq=False, slots=True)
class Read:
    """A read under way and the requests that wait for it."""

    operation: PrefetchOperation
    progress: PrefetchProgress = _NO_PROGRESS
    """As agreed last."""
    needs: dict[str, int] = field(default_factory=dict)
    """How many of its pages, from the first on, by request."""

    @property
    def is_reading(self) -> bool:
        """It may bring more."""
        return not (self.progress.ended or self.operation.is_overtaken)

    @property
    def reach(self) -> int:
        """Pages that it has brought or may bring yet, as far as the store has answered."""
        wanted, progress = self.operation.wanted_pages, self.progress
        if not self.is_reading:
            return progress.landed
        return wanted if progress.hit < 0 else min(wanted, progress.hit)

    def is_awaited_by(self, request_id: str) -> bool:
        """Whether it may still bring what one of its requests needs."""
        return self.is_reading and self.progress.landed < self.needs[request_id]


class Joined(NamedTuple):
    """What of a prompt is being read already."""

    tokens: int
    """The request waits for these, which come first."""
    rest: RadixKey
    """What is left for it to read itself; empty, too, where the store is known to lack it."""
    prior: PageHash | None
    """Hash of the page before `rest`."""


class PrefetchBoard:
    """The reads of one scheduler, in order of start. Scheduler thread only.

    Args:
        page_size: Tokens.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._reads: list[Read] = []
        self._by_request: dict[str, list[Read]] = {}
        """Those that a request waits for, in the order of its pages."""
        self._by_page: dict[PageHash, Read] = {}
        self._cut: list[PrefetchOperation] = []
        self._new: list[PrefetchOperation] = []
        self._unanswered: list[PrefetchOperation] = []

    def __len__(self) -> int:
        return len(self._reads) + len(self._cut)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    @property
    def is_full(self) -> bool:
        """No more may be started now: the ballot has that many slots."""
        return len(self) >= MAX_PREFETCHES

    def held_tokens(self) -> int:
        """Host tokens that reads own."""
        return sum(operation.owned_tokens for operation in self.operations())

    def stuck_tokens(self) -> int:
        """Host tokens of reads that nobody waits for any more."""
        return sum(operation.owned_tokens for operation in self._cut)

    def operations(self) -> list[PrefetchOperation]:
        """All that own host pages."""
        return [*(read.operation for read in self._reads), *self._cut]

    # ---- who waits for what ------------------------------------------------------------------

    def start(self, operation: PrefetchOperation) -> None:
        """Take up an operation, which is to be submitted with what comes in the same tick."""
        read = Read(operation)
        self._reads.append(read)
        self._by_page.update(dict.fromkeys(operation.hashes, read))
        self._add(operation.request_id, read, operation.wanted_pages)
        self._new.append(operation)

    def join(self, request_id: str, new: RadixKey, start: int, prior: PageHash | None) -> Joined:
        """Let a request wait for the pages of its prompt that are being read, and for no longer
        than the request that began to read them.

        Args:
            request_id: Waits for nothing yet.
            new: What no tier above L3 has of its prompt. Whole pages.
            start: Tokens of the prompt before `new`.
            prior: Hash of the page before `new`.
        """
        page, first = self._page_size, start
        while len(new):
            read = self._by_page.get(new.hash_page(0, page, prior))
            if read is None or read.operation.is_overtaken or read.progress.expired:
                break
            operation = read.operation
            # The hash of a page speaks for all that is before it.
            before = start - operation.start
            common = (before + operation.key[start:].match(new, page)) // page
            asked = min(common, operation.wanted_pages)
            if asked * page <= before:
                break
            reach = min(asked, read.reach)
            if reach * page > before:
                if not operation.owns(before, reach * page):
                    # The tree has lost what it was given of them.
                    break
                self._add(request_id, read, reach)
            if reach < asked:
                # The store lacks a page, and with it whatever follows.
                return Joined(max(0, reach * page - before) + start - first, new[:0], prior)
            done = asked * page - before
            new, start, prior = new[done:], start + done, operation.hashes[asked - 1]
        return Joined(start - first, new, prior)

    def _add(self, request_id: str, read: Read, pages: int) -> None:
        read.needs[request_id] = pages
        self._by_request.setdefault(request_id, []).append(read)

    def reads(self) -> list[Read]:
        """All that are under way."""
        return self._reads.copy()

    def reads_of(self, request_id: str) -> list[Read]:
        """Those that a request waits for, in the order of its pages."""
        return self._by_request.get(request_id, []).copy()

    def leave(self, request_id: str) -> list[Read]:
        """The request waits no more. Returns the reads that are cut for that, in the order of
        its pages: what of them is not published is freed at later ticks."""
        reads = self._by_request.pop(request_id, [])
        for read in reads:
            del read.needs[request_id]
            self._narrow(read)
        return [read for read in reads if not read.needs]

    def note_known(self, read: Read, tokens: int) -> None:
        """The tree has the first `tokens` of the prompt of a read: who needs no more of it waits
        for it no longer."""
        pages = (tokens - read.operation.start) // self._page_size
        if read.progress.ended and pages >= read.progress.landed:
            # It brings nothing more to anybody.
            pages = len(read.operation.hashes)
        for request_id in [rid for rid, needed in read.needs.items() if needed <= pages]:
            self._drop(request_id, read)
        if not read.needs and not read.progress.ended:
            read.operation.overtake()
        self._narrow(read)

    def _drop(self, request_id: str, read: Read) -> None:
        del read.needs[request_id]
        self._by_request[request_id].remove(read)
        if not self._by_request[request_id]:
            del self._by_request[request_id]

    def _narrow(self, read: Read) -> None:
        """Read no more than what is still waited for."""
        operation = read.operation
        if read.needs:
            operation.wanted_pages = max(read.needs.values())
            return
        operation.is_terminated = True
        self._reads.remove(read)
        self._cut.append(operation)
        for page in operation.hashes:
            if self._by_page.get(page) is read:
                del self._by_page[page]

    def check(self) -> None:
        """Assert that reads and requests know of each other, and that no read is for nobody."""
        waits = [(rid, read) for rid, reads in self._by_request.items() for read in reads]
        needs = [(rid, read) for read in self._reads for rid in read.needs]
        assert sorted((rid, id(read)) for rid, read in waits) == sorted(
            (rid, id(read)) for rid, read in needs
        ), f"{len(waits)} waits of requests, {len(needs)} needs of reads"
        assert all(self._by_request.values()), "a request waits for nothing"
        for read in self._reads:
            wanted = read.operation.wanted_pages
            assert wanted == max(read.needs.values(), default=-1), f"{wanted}: {read.needs}"
        known = {id(read) for read in self._reads}
        assert all(id(read) in known for read in self._by_page.values()), "pages of no read"

    # ---- one tick ----------------------------------------------------------------------------

    def take_new(self) -> list[PrefetchOperation]:
        """What has been started since this was called last; to be submitted now."""
        self._unanswered, self._new = self._new, []
        return self._unanswered

    def await_answers(self) -> None:
        """Give the store a moment to say what it has of the prompts that have just come, so that
        one of which it has nothing need not wait for the next tick."""
        if self._unanswered:
            until = time.monotonic() + _ANSWER_S
            for operation in self._unanswered:
                operation.wait_for_answer(until)
            self._unanswered = []

    def progress(self) -> Sequence[PrefetchProgress]:
        """What this rank sees of each of `operations`."""
        if not len(self):
            return ()
        now = time.monotonic()
        seen = []
        for operation in self.operations():
            # `ended` first: what it says of `landed_pages` must not be older than itself.
            ended = operation.ended
            expired = now > operation.deadline
            seen.append(
                PrefetchProgress(
                    operation.hit_pages,
                    operation.landed_pages,
                    ended,
                    expired,
                    operation.handed_pages,
                )
            )
        return seen

    def agree(self, agreed: Sequence[PrefetchProgress]) -> list[torch.Tensor]:
        """Take the tick's agreement on `progress`; returns the host slots to be freed now."""
        reads, cut = self.reads(), self._cut.copy()
        freed = []
        for read, progress in zip(reads, agreed[: len(reads)], strict=True):
            read.progress = progress
            if progress.hit >= 0:
                read.operation.agreed_hit = progress.hit
            if progress.ended:
                freed.append(self._release(read.operation, 0, progress.landed))
                if not progress.landed:
                    self.note_known(read, read.operation.start)
        for operation, progress in zip(cut, agreed[len(reads) :], strict=True):
            # A read that was cut is handed no more pages: only the call under way may write.
            end = progress.landed if progress.ended else progress.handed
            freed.append(self._release(operation, progress.landed, max(progress.landed, end)))
        if self._cut:
            self._cut = [operation for operation in self._cut if operation.owned_tokens]
        return [slots for slots in freed if len(slots)]

    def _release(self, operation: PrefetchOperation, begin: int, end: int) -> torch.Tensor:
        """Let go of all but the pages from `begin` to `end`."""
        return operation.release(begin * self._page_size, end * self._page_size)

    def may_schedule(self, request_id: str, policy: PrefetchPolicy) -> bool:
        """Whether a request need not wait any longer. From agreed progress only."""
        return policy is PrefetchPolicy.BEST_EFFORT or not any(
            read.is_awaited_by(request_id) and not read.progress.expired
            for read in self._by_request.get(request_id, ())
        )

    # ---- from agreed progress: what is to be read, and what to be computed, in tokens --------

    def waited_for(self) -> list[Read]:
        """The reads that may bring more to requests, in their order."""
        return [read for read in self._reads if read.is_reading]

    def pending(self, read: Read, waiting: Mapping[str, int]) -> PendingRead:
        """What is left of one of them.

        Args:
            read: One of `waited_for`.
            waiting: By request, what no tier had of its prompt when it came.
        """
        # Until the store has said what it has: all that it is asked for.
        missing = max(0, read.reach - read.progress.landed) * self._page_size
        # A request whose prompt is read in parts is counted with the last.
        last = [rid for rid in read.needs if self._by_request[rid][-1] is read]
        rests = [max(0, waiting.get(rid, 0) - self._landed(rid)) for rid in last]
        return PendingRead(
            unread=max(0, missing - self._half_of_call(read.progress)),
            missing=missing,
            uncached=max(missing, sum(rests)),
            is_spared=read.operation.is_spared,
        )

    def unread_tokens(self) -> int:
        """What these will read, as far as the store has answered."""
        known = [read for read in self.waited_for() if read.progress.hit >= 0]
        return sum(self.pending(read, {}).unread for read in known)

    def abandoned_tokens(self) -> int:
        """What is read before the first of `waited_for` though nobody waits for it. To be asked
        right after `agree`."""
        before = itertools.takewhile(lambda read: not read.is_reading, self._reads)
        calls = [self._half_of_call(read.progress) for read in before]
        return sum(calls) + self.stuck_tokens() // 2

    def uncached(self, request_id: str, tokens: int) -> int:
        """What of a request's `tokens` waits to be computed now: none while L3 may bring them."""
        reads = self._by_request.get(request_id)
        if reads is None:
            return tokens
        return 0 if reads[-1].is_reading else max(0, tokens - self._landed(request_id))

    def _landed(self, request_id: str) -> int:
        """What has been read for a request that waits."""
        pages = [
            min(read.progress.landed, read.needs[request_id])
            for read in self._by_request[request_id]
        ]
        return sum(pages) * self._page_size

    def _half_of_call(self, progress: PrefetchProgress) -> int:
        """A call to the store that is under way has done half of its work, on the average."""
        pages = 0 if progress.ended else max(0, progress.handed - progress.landed)
        return pages * self._page_size // 2
