"""Times and hits of a load, by simulation of its servers and the store that they share.

The device of each server makes one step at a time. The scheduler's own policies decide which
requests are admitted and what the next step is, and the prefetch cost model's which reads begin, so
that the simulation changes with the engine. Prompts are pages whose contents are known by name.

Left out: several ranks, recurrent states, samples of one prompt, stores that fail or evict.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sglang.planning.page_tiers import Page, front
from sglang.planning.served_costs import Clock, CopyThread, Costs, ServerSizes
from sglang.planning.served_tiers import Read, ServedTiers
from sglang.srt.managers.scheduler.policy import (
    AddOutcome,
    AddPlan,
    BatchLimits,
    BatchPolicy,
    NewTokenEstimate,
    PrefillAdder,
    ceil_to_page,
)
from sglang.srt.mem_cache.l3.prefetch_table import PrefetchPolicy

_NO_LIMIT: Final = 1 << 40


@dataclass(slots=True, kw_only=True, eq=False)
class ServedRequest:
    """A request, and what became of it. Lengths are tokens; times are seconds of the clock."""

    prompt: int
    answer: int
    """At least 1."""
    pages: Sequence[Page]
    """Whole pages of the prompt and of all tokens of the answer but the last."""
    on_end: Callable[[ServedRequest], None] = lambda request: None
    sent: float = 0.0
    scheduled: float | None = None
    first_token: float | None = None
    ended: float | None = None
    device: int = 0
    """Tokens of the prompt found in L1; the others likewise in L2, and in L3."""
    host: int = 0
    storage: int = 0

    @property
    def cached(self) -> int:
        return self.device + self.host + self.storage

    @property
    def ttft(self) -> float:
        assert self.first_token is not None
        return self.first_token - self.sent


@dataclass(slots=True, eq=False)
class _Job:
    """A request on a server."""

    request: ServedRequest
    arrival_number: int
    tokens: int
    """Tokens of the prompt and of the answer so far."""
    left: int
    """Tokens of the answer to come."""
    committed: int = 0
    """Tokens whose keys and values are in L1."""
    locked: int = 0
    """Its first pages, which are in the tree and pinned."""
    own: int = 0
    """Pages of L1 after them, which no prompt can find yet."""
    wanted: int = 0
    """Its first pages, which are marked as wanted."""
    read: Read | None = None
    may_read: bool = True
    """False if L3 brings no more than `read` does."""
    known: int = 0
    """Pages that L1 and L2 had when its last read began, or found no room."""
    reach: int = 0
    """The page at which that read ends."""
    wait_until: float = 0.0
    """Seconds of the clock at which it waits for reads no longer."""
    brought: int = 0
    """Pages that L3 brought."""
    on_arrival: int = 0
    """Pages that L1 and L2 had."""
    to_load: int = 0
    """Tokens of L2 that its first step waits for."""

    def matchable(self, page_size: int) -> Sequence[Page]:
        """The pages that a match may have: the last token is computed."""
        return self.request.pages[: (self.tokens - 1) // page_size]


class SimulatedServer:
    """One server, which requests are sent to."""

    def __init__(
        self,
        clock: Clock,
        costs: Costs,
        sizes: ServerSizes,
        copier: CopyThread,
        store: set[Page] | None,
    ) -> None:
        self._clock, self._costs, self._page = clock, costs, sizes.page_size
        self._sizes = sizes
        self._tiers = ServedTiers(clock, costs, sizes, copier, store, self._tick)
        self._l1, self._uses = self._tiers.l1, self._tiers.uses
        self._limits = BatchLimits(
            page_size=sizes.page_size,
            max_running_requests=_NO_LIMIT,
            max_queued_requests=_NO_LIMIT,
            max_prefill_tokens=sizes.chunk,
            chunk_tokens=sizes.chunk,
            pool_tokens=sizes.l1,
            context_len=_NO_LIMIT,
        )
        self._estimate, self._policy = NewTokenEstimate(1.0), BatchPolicy(None)
        self._numbers = itertools.count()
        self._inbox: list[ServedRequest] = []
        self._waiting: list[_Job] = []
        self._partial: _Job | None = None
        """The request whose prompt was cut."""
        self._decoding: list[_Job] = []
        self._is_busy = False
        self._blocked_by: tuple[int, int] | None = None
        """Running and waiting requests when L1 had no room for the next one: it has none until
        their numbers change."""

    def send(self, request: ServedRequest) -> None:
        """The server learns of a request at its next tick."""
        self._inbox.append(request)
        self._clock.after(0.0, self._tick)

    # ---- one tick --------------------------------------------------------------------------

    def _tick(self) -> None:
        """Launch the next step, unless one is under way."""
        if self._is_busy:
            return
        while self._inbox:
            self._arrive(self._inbox.pop(0))
        self._tiers.cancel_slower(self._to_compute())
        works = []
        if not self._decoding or self._policy.may_prefill(self._clock.now):
            works = self._schedule()
        if works:
            self._launch_prefill(works)
        elif self._decoding and self._make_room_to_decode():
            self._policy.on_decode()
            self._estimate.on_decode_step()
            self._is_busy = True
            seconds = self._costs.decode([job.tokens for job in self._decoding])
            self._clock.after(seconds, self._end_decode)

    def _arrive(self, request: ServedRequest) -> None:
        job = _Job(request, next(self._numbers), request.prompt, request.answer)
        pages = job.matchable(self._page)
        job.on_arrival = front(pages, self._l1, self._tiers.l2)
        self._uses.use(pages[: job.on_arrival])
        self._want(job, job.on_arrival)
        seconds = self._sizes.wait_s((len(pages) - job.on_arrival) * self._page)
        job.wait_until = self._clock.now + seconds
        if self._reads_on(job):
            self._clock.after(seconds, self._tick)
        self._waiting.append(job)

    def _reads_on(self, job: _Job) -> bool:
        """Begin to read what L1 and L2 lack of a waiting request. False: L3 brings no more of it,
        or L2 has no room; then it is tried again when there is some."""
        pages = job.matchable(self._page)
        known = front(pages, self._l1, self._tiers.l2)
        if job.known < job.reach > known:
            job.may_read = False  # L3 has no more of it.
            return False
        job.read = self._tiers.begin_read(
            pages, known, job.arrival_number, self._to_compute(), job.wait_until
        )
        job.known = job.reach = known
        if job.read is not None:
            job.reach += job.read.held
        job.may_read = job.reach < len(pages) and (job.read is not None or self._tiers.is_full)
        return job.read is not None

    def _want(self, job: _Job, pages: int) -> None:
        """Mark the first `pages` of a waiting request; 0: it waits no longer."""
        more, fewer = job.request.pages[job.wanted : pages], job.request.pages[pages : job.wanted]
        self._uses.want(more, job.arrival_number)
        self._uses.unwant(fewer, job.arrival_number)
        job.wanted = pages

    def _to_compute(self) -> int:
        """Tokens that wait to be computed: none of a prompt while L3 may bring them."""
        waiting = [job for job in self._waiting if job.read is None or not job.read.is_awaited]
        tokens = sum(job.tokens - (job.on_arrival + job.brought) * self._page for job in waiting)
        partial = self._partial
        return tokens + (0 if partial is None else partial.tokens - partial.committed)

    # ---- prefill ---------------------------------------------------------------------------

    def _schedule(self) -> list[tuple[_Job, int]]:
        """The requests of the next prefill, with the tokens to compute of each."""
        if self._partial is None and self._decoding and self._blocked_by == self._shortage():
            return []
        works: list[tuple[_Job, int]] = []
        reserved = sum(map(self._reserve, self._decoding))
        adder = PrefillAdder(self._limits, len(self._decoding), reserved)
        if (job := self._partial) is not None:
            plan = adder.plan_extend(job.tokens - job.committed)
            if not self._take(job, plan.extend_tokens):
                return []
            self._add(job, plan, adder, works)
        if self._partial is None:
            self._blocked_by = None
            for job in sorted(self._waiting, key=lambda one: one.arrival_number):
                if self._awaits_l3(job):
                    continue
                outcome = self._admit(job, adder, works)
                if outcome is AddOutcome.NO_MEMORY:
                    self._blocked_by = self._shortage()
                if outcome is not AddOutcome.ADDED:
                    break
        return works

    def _shortage(self) -> tuple[int, int]:
        return len(self._decoding), len(self._waiting)

    def _reserve(self, job: _Job) -> int:
        return ceil_to_page(self._estimate.reserve(job.left), self._page)

    def _awaits_l3(self, job: _Job) -> bool:
        if job.read is not None:
            if self._tiers.awaits(job.read):
                return True
            if not job.read.has_ended:
                return False
            self._publish(job, job.read)
        if not job.may_read or self._tiers.is_full or self._clock.now >= job.wait_until:
            return False
        return self._sizes.policy is not PrefetchPolicy.BEST_EFFORT and self._reads_on(job)

    def _publish(self, job: _Job, read: Read) -> None:
        job.read = None
        brought = self._tiers.publish(read)
        job.brought += brought
        if brought:
            self._want(job, max(job.wanted, read.begin + read.landed))

    def _admit(self, job: _Job, adder: PrefillAdder, works: list[tuple[_Job, int]]) -> AddOutcome:
        """Lock what L1 has of a prompt, load what L2 has, and take pages for the rest; or nothing
        of that."""
        if job.read is not None:
            self._publish(job, job.read)
        pages, page = job.matchable(self._page), self._page
        device = front(pages, self._l1)
        known = front(pages, self._tiers.l2, begin=device)
        self._uses.use(pages[:known])
        self._l1.pin(pages[:device])
        free = (self._l1.free + self._l1.evictable) * page
        new_tokens = self._estimate.reserve(job.left)
        plan = adder.plan(job.tokens - known * page, (known - device) * page, new_tokens, free)
        end = -(-(known * page + plan.extend_tokens) // page)
        if plan.is_admitted and self._l1.make_room(end - device) < end - device:
            plan = AddPlan(AddOutcome.NO_MEMORY)
        if not plan.is_admitted:
            self._l1.unpin(pages[:device])
            return plan.outcome
        self._l1.pages.update(pages[device:known])
        self._l1.pin(pages[device:known])
        self._l1.held += end - known
        job.committed, job.locked, job.own = known * page, known, end - known
        job.to_load = (known - device) * page
        self._want(job, 0)
        self._tiers.is_full = False  # L2 need not spare its pages any more.
        self._waiting.remove(job)
        request = job.request
        if request.scheduled is None:
            request.scheduled = self._clock.now
            stored = min(job.brought, known - device)
            request.device, request.storage = device * page, stored * page
            request.host = (known - device - stored) * page
        self._add(job, plan, adder, works)
        return plan.outcome

    def _add(
        self, job: _Job, plan: AddPlan, adder: PrefillAdder, works: list[tuple[_Job, int]]
    ) -> None:
        rest = job.tokens - job.committed - plan.extend_tokens
        adder.commit(plan, rest + self._reserve(job))
        self._partial = job if plan.outcome is AddOutcome.CHUNKED else None
        works.append((job, plan.extend_tokens))

    def _take(self, job: _Job, more: int) -> bool:
        """Take pages of L1 for `more` tokens of a running request; False: too few are free."""
        end = -(-(job.committed + more) // self._page)
        need = max(0, end - job.locked - job.own)
        if need and self._l1.make_room(need) < need:
            return False
        self._l1.held += need
        job.own += need
        return True

    def _launch_prefill(self, works: list[tuple[_Job, int]]) -> None:
        self._policy.on_prefill(self._clock.now)
        seconds = load = 0.0
        for job, new in works:
            seconds += self._costs.prefill(new, job.committed)
            load += self._costs.load * job.to_load
            job.to_load = 0
            job.committed += new
            self._insert(job)
        seconds = max(seconds, load)
        self._tiers.prefills.add(sum(new for _, new in works), seconds)
        self._is_busy = True
        self._clock.after(seconds, lambda: self._end_prefill([job for job, _ in works]))

    def _insert(self, job: _Job) -> None:
        """The tree takes over the whole pages of a running request."""
        whole = job.committed // self._page
        pages = job.request.pages[job.locked : whole]
        self._l1.held -= len(pages)
        job.own -= len(pages)
        self._l1.pages.update(pages)
        self._l1.pin(pages)
        job.locked += len(pages)
        self._uses.use(job.request.pages[: job.locked])

    def _end_prefill(self, jobs: list[_Job]) -> None:
        self._is_busy = False
        for job in jobs:
            self._tiers.copy(job.request.pages[: job.locked])
            if job is not self._partial:
                self._decoding.append(job)
                self._give_token(job)
        self._tick()

    # ---- decode ----------------------------------------------------------------------------

    def _make_room_to_decode(self) -> bool:
        """Pages for a token of each request, the newest of which gives its own up if there are too
        few. False: none is left."""
        page = self._page
        while self._decoding:
            full = [job for job in self._decoding if job.committed == (job.locked + job.own) * page]
            if self._l1.make_room(len(full)) >= len(full):
                for job in full:
                    self._take(job, 1)
                return True
            self._retract()
        return False

    def _retract(self) -> None:
        answers = [job.request.answer for job in self._decoding]
        done = sum(answers) - sum(job.left for job in self._decoding)
        self._estimate.on_retraction(done, sum(answers))
        partial = [] if self._partial is None else [self._partial]
        job = max([*self._decoding, *partial], key=lambda one: one.arrival_number)
        if job is self._partial:
            self._partial = None
        else:
            self._decoding.remove(job)
        self._release(job)
        self._waiting.append(job)

    def _end_decode(self) -> None:
        self._is_busy = False
        for job in list(self._decoding):
            job.committed += 1
            self._give_token(job)
        self._tick()

    def _give_token(self, job: _Job) -> None:
        """A step has brought the next token of a request that decodes."""
        request, now = job.request, self._clock.now
        request.first_token = now if request.first_token is None else request.first_token
        job.tokens += 1
        job.left -= 1
        if not job.left:
            self._decoding.remove(job)
            self._release(job)
            request.ended = now
            request.on_end(request)

    def _release(self, job: _Job) -> None:
        """A running request gives back what it holds; the tree keeps its whole pages."""
        self._insert(job)
        pages = job.request.pages[: job.locked]
        self._l1.unpin(pages)
        self._l1.held -= job.own
        job.committed = job.own = job.locked = 0
        self._tiers.copy(pages)
