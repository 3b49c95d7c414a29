"""Times of agents' conversations on several servers, from the rates of one idle server.

Each server computes one thing at a time: the prefill of the request that is ready first, or else a
step of all that decode. A link of its own reads one prompt at a time from L3. L1 is a list of
pages of which the last used stay; L2 is left out, since it holds no more than L1. The only rates
are those in `Costs`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from dataclasses import dataclass, field

from rigs.bench.multiturn import Conversations


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of one server."""

    linear: float
    """Of a new token, without attention to others."""
    by_pair: float
    """Of a new token for each token before it."""
    step: float
    """Of a decode step."""
    by_context: float
    """Added to a step for each token of context."""
    read: float | None
    """Of a token that is read from L3; None: there is no L3."""

    def prefill(self, new: int, before: int) -> float:
        return new * self.linear + new * (before + new / 2) * self.by_pair


@dataclass(slots=True, kw_only=True)
class Forecast:
    """Figures of all requests."""

    seconds: float = 0.0
    """Until the last answer ends."""
    ttft: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


@dataclass(slots=True)
class _Job:
    client: int
    turn: int
    tokens: int
    """Of the prompt."""
    arrived: float
    left: int
    """Tokens of the answer."""


class _L1:
    """Pages by their last use; a page is known by its client (-1: all) and its place."""

    def __init__(self, pages: int) -> None:
        self._most = pages
        self._pages: OrderedDict[tuple[int, int], None] = OrderedDict()

    def found(self, client: int, shared: int, pages: int) -> int:
        page = 0
        while page < pages and (-1 if page < shared else client, page) in self._pages:
            page += 1
        return page

    def keep(self, client: int, shared: int, pages: int) -> None:
        for page in reversed(range(pages)):
            key = -1 if page < shared else client, page
            self._pages[key] = None
            self._pages.move_to_end(key)
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)


@dataclass(slots=True)
class _L3:
    """Pages that any server computed: of each client, and whether the shared ones are there."""

    clients: dict[int, int] = field(default_factory=dict)

    def found(self, client: int, shared: int) -> int:
        return self.clients.get(client, shared if self.clients else 0)


class _Server:
    def __init__(self, costs: Costs, l1: int, page_size: int, shared: int, l3: _L3) -> None:
        self._costs, self._page, self._most = costs, page_size, l1
        self._shared = shared // page_size
        self._l1, self._l3 = _L1(l1 // page_size), l3
        self._link_free = self.now = 0.0
        self._ready: list[tuple[float, int, _Job]] = []
        self._decoding: list[_Job] = []
        self._used = 0
        """Tokens that running requests need at their end, without the shared ones."""

    @property
    def next_event(self) -> float:
        """The time at which there is something to do."""
        if self._decoding:
            return self.now
        return max(self.now, self._ready[0][0]) if self._ready else math.inf

    def arrive(self, job: _Job) -> None:
        local, found = self._found(job)
        start = max(job.arrived, self._link_free)
        ready = start + (found - local) * (self._costs.read or 0.0)
        if found > local:
            self._link_free = ready
        heapq.heappush(self._ready, (ready if found > local else job.arrived, job.client, job))

    def advance(self, out: Forecast) -> list[_Job]:
        """Do one thing. Returns the requests that it ends."""
        self.now = self.next_event
        if self._ready and self._ready[0][0] <= self.now:
            job = self._ready[0][2]
            if not self._decoding or self._used + job.tokens + job.left <= self._most:
                heapq.heappop(self._ready)
                self._prefill(job, out)
                return []
        contexts = sum(job.tokens for job in self._decoding)
        self.now += self._costs.step + contexts * self._costs.by_context
        for job in self._decoding:
            job.left -= 1
            job.tokens += 1
        ended = [job for job in self._decoding if not job.left]
        for job in ended:
            self._used -= job.tokens - self._shared * self._page
            self._keep(job)
        self._decoding = [job for job in self._decoding if job.left]
        return ended

    def _prefill(self, job: _Job, out: Forecast) -> None:
        _, found = self._found(job)
        out.prompt_tokens += job.tokens
        out.cached_tokens += found
        self._used += job.tokens - self._shared * self._page + job.left
        self.now += self._costs.prefill(job.tokens - found, found)
        self._keep(job)
        out.ttft.append(self.now - job.arrived)
        self._decoding.append(job)

    def _found(self, job: _Job) -> tuple[int, int]:
        """Tokens of a prompt in L1, and in L1 and L3."""
        usable = (job.tokens - 1) // self._page
        local = found = self._l1.found(job.client, self._shared, usable)
        if self._costs.read is not None:
            found = max(local, min(usable, self._l3.found(job.client, self._shared)))
        return local * self._page, found * self._page

    def _keep(self, job: _Job) -> None:
        pages = job.tokens // self._page
        self._l1.keep(job.client, self._shared, pages)
        self._l3.clients[job.client] = pages


def forecast(
    talk: Conversations, costs: Costs, *, servers: int, l1: int, page_size: int
) -> Forecast:
    """The load of `talk`. Its requests go to `servers` in turn; each has `l1` tokens of L1.

    `talk` has no limit of requests under way, and a `first_len`; answers have 2 tokens or more.
    """
    assert talk.first_len is not None and talk.parallel is None and talk.output_len > 1
    out, l3 = Forecast(), _L3()
    parts = [_Server(costs, l1, page_size, talk.shared_len, l3) for _ in range(servers)]
    turns = itertools.cycle(parts)
    # The first token of an answer is a prefill's.
    left = talk.output_len - 1
    for client in range(talk.clients):
        next(turns).arrive(_Job(client, 0, talk.shared_len + talk.first_len, 0.0, left))
    while (now := min(parts, key=lambda one: one.next_event)).next_event < math.inf:
        for job in now.advance(out):
            out.seconds = max(out.seconds, now.now)
            if job.turn + 1 < talk.rounds:
                tokens = job.tokens + 1 + talk.request_len
                next(turns).arrive(_Job(job.client, job.turn + 1, tokens, now.now, left))
    return out
