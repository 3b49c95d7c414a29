"""Tickets by constraint: those compiling, and the latest of those done."""

from __future__ import annotations

from collections import OrderedDict

from sglang.srt.constrained.constraint import Constraint
from sglang.srt.constrained.ticket import GrammarTicket, TicketState


class GrammarCache:
    """Least recently used goes first, by number and by bytes; what compiles stays.

    Failures are kept as well, so that a constraint that cost much is refused at once the next
    time. Not locked: its owner is.

    Args:
        max_tickets: Done tickets kept.
        max_bytes: What their grammars may hold together; one alone may hold more.
    """

    def __init__(self, max_tickets: int, max_bytes: int) -> None:
        self._max_tickets = max_tickets
        self._max_bytes = max_bytes
        self._compiling: dict[Constraint, GrammarTicket] = {}
        self._done: OrderedDict[Constraint, int] = OrderedDict()
        self._tickets: dict[Constraint, GrammarTicket] = {}
        self._bytes = 0

    @property
    def num_compiling(self) -> int:
        """Tickets that are not done."""
        return len(self._compiling)

    @property
    def num_done(self) -> int:
        """Tickets kept, failed ones included."""
        return len(self._done)

    @property
    def num_bytes(self) -> int:
        """What the kept grammars hold."""
        return self._bytes

    def find(self, constraint: Constraint) -> GrammarTicket | None:
        """The ticket, now the most recently used."""
        ticket = self._compiling.get(constraint)
        if ticket is None and constraint in self._done:
            self._done.move_to_end(constraint)
            ticket = self._tickets[constraint]
        return ticket

    def add_compiling(self, ticket: GrammarTicket) -> None:
        """Enter a new ticket."""
        self._compiling[ticket.constraint] = ticket

    def finish(self, ticket: GrammarTicket, *, keep: bool) -> None:
        """A ticket is done. `keep` False forgets it, so that the next request tries again."""
        constraint = ticket.constraint
        del self._compiling[constraint]
        if not keep:
            return
        ready = ticket.state is TicketState.READY
        # A failure holds its text, which is the key.
        size = ticket.grammar.size_bytes if ready else len(constraint.text)
        self._done[constraint] = size
        self._tickets[constraint] = ticket
        self._bytes += size
        while len(self._done) > 1 and (
            len(self._done) > self._max_tickets or self._bytes > self._max_bytes
        ):
            oldest, oldest_size = self._done.popitem(last=False)
            del self._tickets[oldest]
            self._bytes -= oldest_size
