"""The order in which grammars compile: long ones do not delay short ones. And their cache."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from sglang.srt.constrained.constraint import Constraint
from sglang.srt.constrained.grammar import GrammarTicket


class GrammarCache:
    """Evicts the least recently used tickets, by number and by bytes; never one whose grammar
    compiles.

    Failed tickets are kept too, so that an expensive constraint is refused at once the next time.
    No lock of its own; the owner's lock guards it.

    Args:
        max_tickets: Most done tickets.
        max_bytes: Most bytes of their grammars together. A single grammar may be larger.
    """

    def __init__(self, max_tickets: int, max_bytes: int) -> None:
        self._max_tickets = max_tickets
        self._max_bytes = max_bytes
        self._compiling: dict[Constraint, GrammarTicket] = {}
        self._done: OrderedDict[Constraint, GrammarTicket] = OrderedDict()

    @property
    def num_compiling(self) -> int:
        """Tickets that are not done."""
        return len(self._compiling)

    @property
    def num_done(self) -> int:
        """Tickets that are done, failed ones included."""
        return len(self._done)

    @property
    def num_bytes(self) -> int:
        """Bytes of the cached grammars."""
        return sum(map(_size_of, self._done.values()))

    def find(self, constraint: Constraint) -> GrammarTicket | None:
        """The ticket of a constraint, which becomes the most recently used one."""
        if constraint in self._done:
            self._done.move_to_end(constraint)
            return self._done[constraint]
        return self._compiling.get(constraint)

    def add_compiling(self, ticket: GrammarTicket) -> None:
        """Add a new ticket."""
        self._compiling[ticket.constraint] = ticket

    def finish(self, ticket: GrammarTicket, *, keep: bool) -> None:
        """Note that a ticket is done. `keep` False forgets it, so that the next request retries."""
        del self._compiling[ticket.constraint]
        if not keep:
            return
        self._done[ticket.constraint] = ticket
        while len(self._done) > self._max_tickets or (
            len(self._done) > 1 and self.num_bytes > self._max_bytes
        ):
            self._done.popitem(last=False)


def _size_of(ticket: GrammarTicket) -> int:
    # A failed ticket holds only its text, which is the key.
    has_failed = ticket.exception() is not None
    return len(ticket.constraint.text) if has_failed else ticket.result().size_bytes


@dataclass(slots=True)
class CompileJob:
    """A grammar that waits to be compiled."""

    ticket: GrammarTicket
    submitted_at: float
    """`time.monotonic()` seconds."""
    is_long: bool = False
    """True if the job may now use the whole compile timeout."""


class CompileQueue:
    """New jobs, and jobs whose first try was too short.

    A first try is short. If it does not finish, the job continues while less than half of the
    threads run long jobs; otherwise it restarts later. Half of the threads stay free for first
    tries. The newest and the oldest job alternate: a client that queues many jobs does not delay
    the single job of another client, and no job waits for ever.

    No lock of its own; the owner's lock guards it.

    Args:
        threads: Jobs that run at the same time.
    """

    def __init__(self, threads: int) -> None:
        self._max_long = max(threads // 2, 1)
        self._num_long = 0
        self._new: deque[CompileJob] = deque()
        self._retries: deque[CompileJob] = deque()
        self._newest_next = True

    def add(self, job: CompileJob) -> None:
        """Queue a new job."""
        self._new.append(job)

    def take(self) -> CompileJob | None:
        """The job to run now; None: no job waits, or all that wait must wait for a long job to
        end."""
        if self._retries and self._num_long < self._max_long:
            job = self._retries.popleft()
            self.may_go_on(job)
            return job
        if not self._new:
            return None
        job = self._new.pop() if self._newest_next else self._new.popleft()
        self._newest_next = not self._newest_next
        return job

    def may_go_on(self, job: CompileJob) -> bool:
        """True if a job may use the whole compile timeout after its first try."""
        if not job.is_long and self._num_long < self._max_long:
            self._num_long += 1
            job.is_long = True
        return job.is_long

    def put_back(self, job: CompileJob) -> None:
        """Queue a job to restart later, because it may not go on now."""
        self._retries.append(job)

    def end(self, job: CompileJob) -> None:
        """Note that a job is done."""
        self._num_long -= job.is_long
