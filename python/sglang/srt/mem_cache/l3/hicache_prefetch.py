"""The reads from L3 under way, and which request waits for which of their pages.

No bytes are moved here. The tree starts operations, feeds each tick's agreed progress, and takes
back the pages that landed and the slots to be freed.

A read is *under way* while requests wait for it. A request whose prompt is partly being read
already waits for those pages too, and reads only the pages after them. It leaves the read when it
is scheduled or aborted, or when the tree has the pages that it waits for. A read without requests
is *cut*: the pages that landed have been published by then. Its other host pages are freed at the
next tick, except for those of the call under way: they stay with the read until that call returns.
With Mooncake that can take minutes, if a store node hangs.
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
"""A store answers in a tenth to a third of it; the next tick is about ten times as far away."""
_NO_PROGRESS: Final = PrefetchProgress()


class PrefetchPolicy(StrEnum):
    """How long a request waits for its prefetch."""

    BEST_EFFORT = "best_effort"
    """The request does not wait: it uses the pages that have landed."""
    WAIT_COMPLETE = "wait_complete"
    """The request waits until the read ends, at most `prefetch_timeout_max`, however slow L3 is."""
    TIMEOUT = "timeout"
    """It waits a base time plus some for each 1,024 tokens, and no longer than computing takes."""


@dataclass(eq=False, slots=True)
class Read:
    """A read under way and the requests that wait for it."""

    operation: PrefetchOperation
    progress: PrefetchProgress = _NO_PROGRESS
    """Progress that the ranks agreed on last."""
    needs: dict[str, int] = field(default_factory=dict)
    """How many of the read's pages each request needs, counted from the first; by request."""

    @property
    def is_reading(self) -> bool:
        """The read may bring more pages."""
        return not (self.progress.ended or self.operation.is_overtaken)

    @property
    def reach(self) -> int:
        """Pages that have landed or may still land, as far as the store has answered."""
        wanted, progress = self.operation.wanted_pages, self.progress
        if not self.is_reading:
            return progress.landed
        return wanted if progress.hit < 0 else min(wanted, progress.hit)

    def is_awaited_by(self, request_id: str) -> bool:
        """Whether pages that this request needs may still land."""
        return self.is_reading and self.progress.landed < self.needs[request_id]


class Joined(NamedTuple):
    """How much of a prompt is being read already."""

    tokens: int
    """The first tokens, which the request waits for."""
    rest: RadixKey
    """The tokens after them, which the request reads; empty where the store lacks them."""
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
        """The reads that a request waits for, in the order of its pages."""
        self._by_page: dict[PageHash, Read] = {}
        self._cut: list[PrefetchOperation] = []
        self._new: list[PrefetchOperation] = []
        self._unanswered: list[PrefetchOperation] = []
        self._freed_states: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._reads) + len(self._cut)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    @property
    def is_full(self) -> bool:
        """No read may be started now: the ballot has no free slot."""
        return len(self) >= MAX_PREFETCHES

    def held_tokens(self) -> int:
        """Host tokens that reads own."""
        return sum(operation.owned_tokens for operation in self.operations())

    def stuck_tokens(self) -> int:
        """Host tokens of reads that were cut, and whose call has not returned."""
        return sum(operation.owned_tokens for operation in self._cut)

    def held_states(self) -> int:
        """Host states that reads own."""
        return sum(operation.host_state is not None for operation in self.operations())

    def operations(self) -> list[PrefetchOperation]:
        """The operations that own host pages."""
        return [*(read.operation for read in self._reads), *self._cut]

    # ---- who waits for what ------------------------------------------------------------------

    def start(self, operation: PrefetchOperation) -> None:
        """Add a read. It is submitted with the others of the same tick; see `take_new`."""
        read = Read(operation)
        self._reads.append(read)
        self._by_page.update(dict.fromkeys(operation.hashes, read))
        self._add(operation.request_id, read, operation.wanted_pages)
        self._new.append(operation)

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
            read = self._by_page.get(new.hash_page(0, page, prior))
            if read is None or read.operation.is_overtaken or read.progress.expired:
                break
            operation = read.operation
            # Equal hashes of a page mean equal pages before it.
            before = start - operation.start
            common = (before + operation.key[start:].match(new, page)) // page
            asked = min(common, operation.wanted_pages)
            if asked * page <= before:
                break
            reach = min(asked, read.reach)
            is_longer = len(new) > asked * page - before
            if operation.has_state and not self._brings_state(read, reach, before, is_longer):
                break
            if reach * page > before:
                if not operation.owns(before, reach * page):
                    # Some were published, and the tree has evicted them since.
                    break
                self._add(request_id, read, reach)
            if reach < asked and not (operation.has_state and is_longer):
                # The store lacks a page; the pages after it are of no use.
                return Joined(max(0, reach * page - before) + start - first, new[:0], prior)
            done = reach * page - before
            new, start, prior = new[done:], start + done, operation.hashes[reach - 1]
            if reach < asked:
                # The read ends at the last state of its own prompt. This one may have a later one.
                break
        return Joined(start - first, new, prior)

    def _brings_state(self, read: Read, reach: int, before: int, is_longer: bool) -> bool:
        """Whether a request may wait for the first `reach` pages of a read that brings a state.

        Args:
            before: Tokens of the read's prompt, behind its start, that the request has already.
            is_longer: The request's prompt goes on where the read's ends.
        """
        if reach < read.reach:
            # The state stands behind pages that this prompt does not have.
            return False
        if not is_longer:
            return True
        # Only the store's answer says where the read ends, so where the rest begins.
        return read.progress.hit >= 0 and reach * self._page_size > before

    def _add(self, request_id: str, read: Read, pages: int) -> None:
        read.needs[request_id] = pages
        self._by_request.setdefault(request_id, []).append(read)

    def reads(self) -> list[Read]:
        """The reads under way."""
        return self._reads.copy()

    def reads_of(self, request_id: str) -> list[Read]:
        """The reads that a request waits for, in the order of its pages."""
        return self._by_request.get(request_id, []).copy()

    def leave(self, request_id: str) -> list[Read]:
        """Remove a request from its reads. Returns the reads that are cut by that, in the order of
        its pages; the pages that are not published are freed at later ticks."""
        reads = self._by_request.pop(request_id, [])
        for read in reads:
            del read.needs[request_id]
            self._narrow(read)
        return [read for read in reads if not read.needs]

    def note_known(self, read: Read, tokens: int) -> None:
        """The tree has the first `tokens` of a read's prompt: requests that need no more leave
        the read."""
        pages = (tokens - read.operation.start) // self._page_size
        if read.progress.ended and pages >= read.progress.landed:
            # It has ended, and all that landed is known.
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
        """Read no further than its requests need; cut it where there is none."""
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
        """Assert that reads and requests know of each other, and that every read has a request."""
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
        """The reads that were started since the last call, to be submitted now."""
        self._unanswered, self._new = self._new, []
        return self._unanswered

    def await_answers(self) -> None:
        """Wait for about a millisecond for the store's answers about new prompts, so that a prompt
        that the store does not have need not wait for the next tick."""
        if self._unanswered:
            until = time.monotonic() + _ANSWER_S
            for operation in self._unanswered:
                operation.wait_for_answer(until)
            self._unanswered = []

    def progress(self) -> Sequence[PrefetchProgress]:
        """This rank's progress on each of `operations`."""
        if not len(self):
            return ()
        now = time.monotonic()
        seen = []
        for operation in self.operations():
            # `ended` first: `landed_pages` is final once it is true.
            ended = operation.ended
            expired = now > operation.deadline
            progress = PrefetchProgress(
                operation.hit_pages,
                operation.landed_pages,
                ended,
                expired,
                operation.handed_pages,
            )
            seen.append(_with_state(operation, progress) if operation.has_state else progress)
        return seen

    def agree(self, agreed: Sequence[PrefetchProgress]) -> list[torch.Tensor]:
        """Take the progress that the ranks agreed on; returns the host slots to be freed now."""
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
            if progress.hit >= 0:
                operation.agreed_hit = progress.hit
            # A read that was cut is handed no more pages: only the call under way may write.
            end = progress.landed if progress.ended else progress.handed
            freed.append(self._release(operation, progress.landed, max(progress.landed, end)))
        self._release_states(reads, cut, agreed)
        if self._cut:
            self._cut = [operation for operation in self._cut if operation.is_held]
        return [slots for slots in freed if len(slots)]

    def _release_states(
        self,
        reads: Sequence[Read],
        cut: Sequence[PrefetchOperation],
        agreed: Sequence[PrefetchProgress],
    ) -> None:
        """Let go of the states that no read brings any more; see `take_freed_states`."""
        for read, progress in zip(reads, agreed[: len(reads)], strict=True):
            if progress.ended and not progress.landed:
                self._release_state(read.operation)
        for operation, progress in zip(cut, agreed[len(reads) :], strict=True):
            # What was handed over may be written to until the read has ended.
            if progress.ended or not progress.handed:
                self._release_state(operation)

    def _release_state(self, operation: PrefetchOperation) -> None:
        if (slot := operation.take_state()) is not None:
            self._freed_states.append(slot)

    def take_freed_states(self) -> list[torch.Tensor]:
        """The host slots of states that reads have let go of, int64 `[1]` each, to be freed now."""
        freed, self._freed_states = self._freed_states, []
        return freed

    def _release(self, operation: PrefetchOperation, begin: int, end: int) -> torch.Tensor:
        """Let go of all but the pages from `begin` to `end`."""
        return operation.release(begin * self._page_size, end * self._page_size)

    def may_schedule(self, request_id: str, policy: PrefetchPolicy) -> bool:
        """Whether a request need not wait any longer. Depends only on agreed progress."""
        return policy is PrefetchPolicy.BEST_EFFORT or not any(
            read.is_awaited_by(request_id) and not read.progress.expired
            for read in self._by_request.get(request_id, ())
        )

    # ---- tokens to be read and to be computed, from agreed progress -------------------------

    def awaited_reads(self) -> list[Read]:
        """The reads that requests wait for and that may bring more, in their order."""
        return [read for read in self._reads if read.is_reading]

    def pending(self, read: Read, waiting: Mapping[str, int]) -> PendingRead:
        """How much of a read is left.

        Args:
            read: One of `awaited_reads`.
            waiting: By request, the tokens of its prompt that no tier had when it arrived.
        """
        # Until the store answers, it is taken to have all pages.
        missing = max(0, read.reach - read.progress.landed) * self._page_size
        # A prompt that is read by several operations counts with the last of them.
        last = [rid for rid in read.needs if self._by_request[rid][-1] is read]
        rests = [max(0, waiting.get(rid, 0) - self._landed(rid)) for rid in last]
        return PendingRead(
            unread=max(0, missing - self._half_of_call(read.progress)),
            missing=missing,
            uncached=max(missing, sum(rests)),
            is_spared=read.operation.is_spared,
        )

    def unread_tokens(self) -> int:
        """Tokens that `awaited_reads` will still read, as far as the store has answered."""
        known = [read for read in self.awaited_reads() if read.progress.hit >= 0]
        return sum(self.pending(read, {}).unread for read in known)

    def abandoned_tokens(self) -> int:
        """Tokens that are read before the first of `awaited_reads` and that no request waits for.
        Call it right after `agree`."""
        before = itertools.takewhile(lambda read: not read.is_reading, self._reads)
        calls = [self._half_of_call(read.progress) for read in before]
        return sum(calls) + self.stuck_tokens() // 2

    def uncached(self, request_id: str, tokens: int) -> int:
        """How many of a request's `tokens` have to be computed: none while L3 may bring them."""
        reads = self._by_request.get(request_id)
        if reads is None:
            return tokens
        return 0 if reads[-1].is_reading else max(0, tokens - self._landed(request_id))

    def _landed(self, request_id: str) -> int:
        """Tokens that have been read for a request."""
        pages = [
            min(read.progress.landed, read.needs[request_id])
            for read in self._by_request[request_id]
        ]
        return sum(pages) * self._page_size

    def _half_of_call(self, progress: PrefetchProgress) -> int:
        """Half the tokens of the call under way: on average it has done so much of its work."""
        pages = 0 if progress.ended else max(0, progress.handed - progress.landed)
        return pages * self._page_size // 2


def _with_state(operation: PrefetchOperation, progress: PrefetchProgress) -> PrefetchProgress:
    """The progress of a read that brings a state, as this rank tells it to the others.

    The state stands behind the pages of this rank's own hit. Where the ranks agree on a shorter one
    it is of no use to any, so nothing counts as landed before they have agreed.
    """
    hit = 0 if progress.ended and progress.hit < 0 else progress.hit
    if hit == 0:
        return progress._replace(hit=0, landed=0)
    if operation.agreed_hit is None:
        return progress._replace(landed=0, ended=False)
    is_common = operation.agreed_hit == operation.hit_pages
    return progress if is_common else progress._replace(landed=0)
